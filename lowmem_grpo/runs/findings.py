"""`Finding`: a problem and its fix, as reported by checks, judges, alarms and the doctor. No torch is needed."""

from collections.abc import Iterable
from dataclasses import dataclass
from logging import Logger

SEVERITIES = ("error", "warning", "note")  # the run fails or learns nothing; probably a mistake; for information


@dataclass(frozen=True)
class Finding:
    """A problem and what to do about it. `str` returns one line."""

    severity: str  # one of SEVERITIES
    about: str  # a reward function, judge or alarm; empty for the run as a whole
    problem: str
    fix: str
    kind: str = ""  # a short name that identifies the same problem when it recurs

    def __str__(self) -> str:
        about = f"{self.about}: " if self.about else ""
        return " ".join(f"{about}{self.problem}. What to do: {self.fix}".split())


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def has_error(findings: Iterable[Finding]) -> bool:
    """Return whether a finding is an error: the run would fail or learn nothing."""
    return any(finding.severity == "error" for finding in findings)


def mistakes(findings: Iterable[Finding]) -> list[Finding]:
    """Return the errors and warnings, without the notes."""
    return [finding for finding in findings if finding.severity != "note"]


def warn(logger: Logger, where: str, findings: Iterable[Finding]) -> None:
    """Log a warning for each error and warning, prefixed by `where`."""
    for finding in mistakes(findings):
        logger.warning("%s: %s", where, finding)
