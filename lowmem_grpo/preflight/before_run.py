"""Checks before a run: mistakes that would stop it or make it learn nothing. docs/preflight.md lists them.

    for finding in trainer.preflight():
        print(finding.severity, finding.problem, finding.fix)

`train()` does this itself, unless GRPOConfig(preflight=False): an error ends the run before anything is sampled or
written, and warnings are logged.
"""

import logging
import time

from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.preflight.checks import CHECKS
from lowmem_grpo.preflight.first_steps import FirstSteps
from lowmem_grpo.preflight.how_long import how_long
from lowmem_grpo.preflight.subject import Subject, Trainer
from lowmem_grpo.runs.findings import Finding, by_severity

__all__ = ["CHECKS", "Finding", "FirstSteps", "PreflightError", "before_training", "preflight"]

logger = logging.getLogger(__name__)


class PreflightError(DataError):
    """A run would fail or learn nothing. The message has one line for each problem, with its fix."""


def preflight(trainer: Trainer) -> list[Finding]:
    """Every finding about a trainer, errors first. Nothing is sampled, called or written."""
    return look_over(Subject.of(trainer))


def look_over(subject: Subject) -> list[Finding]:
    """What the checks find, errors first."""
    return by_severity([finding for check in CHECKS if check.fits(subject) for finding in check.look(subject)])


def before_training(trainer: Trainer) -> None:
    """Check a run as `train()` begins.

    Raises PreflightError for errors, and logs a warning for each other problem. Where nothing is wrong, the live view
    says so in one line. On a card whose data sheet is known, it also says how long the run should take.
    """
    if not trainer.args.preflight:
        return
    began = time.monotonic()
    subject = Subject.of(trainer)
    found = look_over(subject)
    refuse_errors(found)
    wrong = [finding for finding in found if finding.severity != "note"]
    for finding in wrong:
        logger.warning("preflight: %s", finding)
    if not wrong and trainer.view is not None:
        looked = f"{len(subject.sample.rows):,} of {subject.sample.total:,} rows, the rewards"
        looked = "the chat template" if subject.without_rows else looked
        seconds = time.monotonic() - began
        trainer.view.say(f"preflight: checked {looked}, disk and memory in {seconds:.1f} s; nothing is "
                         "wrong")
    expected = None if trainer.view is None else how_long(subject)
    if trainer.view is not None and expected is not None:
        trainer.view.say(expected)


def refuse_errors(found: list[Finding]) -> None:
    """Raise PreflightError with all problems where one of them is an error."""
    wrong = [finding for finding in found if finding.severity != "note"]
    if any(finding.severity == "error" for finding in wrong):
        count = f"{len(wrong)} problem{'s' if len(wrong) > 1 else ''}"
        lines = "\n".join(f"- {finding}" for finding in wrong)
        raise PreflightError(f"preflight found {count}; nothing was sampled or written:\n{lines}")
