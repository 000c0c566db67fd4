"""Checks before a run: mistakes that would stop it or make it learn nothing. docs/preflight.md lists them.

    for finding in trainer.preflight():
        print(finding.severity, finding.problem, finding.fix)

`train()` does this itself, unless GRPOConfig(preflight=False): an error ends the run before anything is sampled or
written, and warnings are logged.
"""

import logging
import time
from statistics import fmean
from typing import Any

from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.planning.run_time import PlannedTime
from lowmem_grpo.planning.time_plan import TimePlan
from lowmem_grpo.planning.workload import COMPLETION_SHARE, Workload
from lowmem_grpo.preflight.checks import CHECKS
from lowmem_grpo.preflight.subject import Subject
from lowmem_grpo.runs.findings import Finding, by_severity, has_error, mistakes, warn
from lowmem_grpo.units import time_text

logger = logging.getLogger(__name__)


class PreflightError(DataError):
    """A run would fail or learn nothing. The message has one line for each problem, with its fix."""


def preflight(trainer: Any) -> list[Finding]:
    """Return every finding about a trainer, errors first. Nothing is sampled, called or written."""
    return look_over(Subject(trainer))


def look_over(subject: Subject) -> list[Finding]:
    """Return what the checks find, errors first."""
    return by_severity(finding for check in CHECKS if check.fits(subject) for finding in check.look(subject))


def before_training(trainer: Any) -> None:
    """Check a run as `train()` begins.

    Raises PreflightError for errors, and logs a warning for each other problem. Where nothing is wrong, the live view
    says so in one line. On a card whose data sheet is known, it also says how long the run should take.
    """
    if not trainer.args.preflight:
        return
    began = time.monotonic()
    subject = Subject(trainer)
    findings = look_over(subject)
    refuse_errors(findings)
    warn(logger, "preflight", findings)
    if trainer.view is None:
        return
    if not mistakes(findings):
        rows = f"{len(subject.sample.rows):,} of {subject.sample.total:,} rows, the rewards"
        trainer.view.say(f"preflight: checked {'the chat template' if subject.without_rows else rows}, disk and memory "
                         f"in {time.monotonic() - began:.1f} s; nothing is wrong")
    if (expected := how_long(subject)) is not None:
        trainer.view.say(expected)


def refuse_errors(findings: list[Finding]) -> None:
    """Raise PreflightError with all problems where one of them is an error."""
    if has_error(findings):
        wrong = mistakes(findings)
        lines = "\n".join(f"- {finding}" for finding in wrong)
        raise PreflightError(f"preflight found {len(wrong)} problem{'s' if len(wrong) > 1 else ''}; nothing was "
                             f"sampled or written:\n{lines}")


def how_long(subject: Subject) -> str | None:
    """Estimate in one line, from the data sheet of the card, how long a run will take; None on the CPU, on a card
    without a data sheet, and in fine-tuning."""
    work = expected_work(subject)
    plan = None if work is None else PlannedTime(subject.plan, subject.policy.base.config).of(work)
    return None if plan is None else line_of(plan, subject.state.max_steps - subject.state.global_step)


def expected_work(subject: Subject) -> Workload | None:
    """Return the work of a step, with the prompts of the sampled rows. The length of completions is a guess."""
    args, lengths = subject.args, [looked.tokens for looked in subject.sample.fitting]
    if subject.scorer is None or not lengths:
        return None
    longest = args.max_completion_length
    updates = args.optimizer_steps_per_generation * args.num_iterations
    return Workload(
        args.prompts_per_generation, args.num_generations, max(1.0, fmean(lengths)),
        max(1.0, COMPLETION_SHARE * longest), longest, args.num_iterations, updates, int(args.beta != 0),
    )


def line_of(plan: TimePlan, steps: int) -> str | None:
    """Return 'estimated, not measured: 2.3 s a step ...'; None without an estimate."""
    whole, generate, train = plan.step_seconds, plan.generate_seconds, plan.train_seconds
    if whole is None or generate is None or train is None:
        return None
    work = plan.workload
    each = whole / work.updates
    return (f"estimated, not measured: {time_text(each)} a step on {plan.card} (sampling {generate / whole:.0%}, "
            f"training {train / whole:.0%}), so {time_text(each * steps)} for {steps} steps, if completions have "
            f"{work.completion_length:.0f} of at most {work.longest} tokens; the second step measures it")
