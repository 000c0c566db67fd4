"""Findings: what is wrong and what to do, as checks, judges, alarms and the doctor say it (who has no torch)."""

from collections.abc import Iterable
from dataclasses import dataclass
from logging import Logger

SEVERITIES = ("error", "warning", "note")  # it fails or learns nothing; it is probably a mistake; it is good to know


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, and what to do about it. `str` gives it as one line."""

    severity: str  # one of SEVERITIES
    about: str  # a reward function, a judge or an alarm; empty where it is about the run as a whole
    problem: str
    fix: str
    kind: str = ""  # a short name by which the same trouble is recognised when it comes again

    def __str__(self) -> str:
        about = f"{self.about}: " if self.about else ""
        return " ".join(f"{about}{self.problem}. What to do: {self.fix}".split())


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def has_error(findings: Iterable[Finding]) -> bool:
    """Return whether a finding is an error: the run would fail or learn nothing."""
    return any(finding.severity == "error" for finding in findings)


def mistakes(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity != "note"]


def warn(logger: Logger, where: str, findings: Iterable[Finding]) -> None:
    """Log one warning for each mistake, which begins with `where` it was seen."""
    for finding in mistakes(findings):
        logger.warning("%s: %s", where, finding)
