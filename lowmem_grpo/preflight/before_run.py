"""Checks before a run: mistakes that would stop it or make it learn nothing. docs/preflight.md lists them.

    for finding in trainer.preflight():
        print(finding.severity, finding.problem, finding.fix)

`train()` does this itself, unless GRPOConfig(preflight=False): an error ends the run before anything is sampled or
written, and warnings are logged.
"""

import logging
import time
from typing import Any

from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.preflight.checks import CHECKS
from lowmem_grpo.preflight.how_long import how_long
from lowmem_grpo.preflight.subject import Subject
from lowmem_grpo.runs.findings import Finding, by_severity, has_error, mistakes, warn

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
