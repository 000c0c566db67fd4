"""Findings in words, a line each."""

from lowmem_grpo.rewards.checking.findings import Finding


def line_of(finding: Finding) -> str:
    """A finding on one line: the problem, then its fix."""
    about = f"{finding.function}: " if finding.function else ""
    return " ".join(f"{about}{finding.problem}: {finding.fix}".split())


def report(found: list[Finding]) -> str:
    """Findings below one another, as the message of an error."""
    count = f"{len(found)} problem{'s' if len(found) > 1 else ''}"
    lines = [f"- {line_of(finding)}" for finding in found]
    return "\n".join([f"nothing was sampled or written, preflight found {count}:", *lines])
