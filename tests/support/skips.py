"""A plugin of pytest that counts skipped tests by reason, and with `--no-skips` fails for all but the reasons below. It
also prints what tests record as "printed".

A test that is skipped where somebody forgot to install something is a promise that nobody checks.
"""

import re
from collections import Counter

import pytest

# The only reasons that `.ci/run` accepts: each names what nobody can install on the machine.
ALLOWED = (
    r"needs a CUDA device", r"does not compute in bfloat16",  # the mark `gpu`
    r"\bcards?\b", r"process that uses CUDA cannot fork",  # where there is a card, or none
    r"AVX-512", r"this kernel lacks Landlock",  # of the processor, of the kernel
    r"imports torchvision",  # package indexes have it for CUDA, which does not load beside a torch for CPUs
    r"reaches no package index", r"package registry cannot be reached",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true",
                     help="fail if a test is skipped for a reason that tests/support/skips.py does not allow")


def by_reason(config: pytest.Config) -> Counter[str]:
    """The number of skipped tests, and of skipped files, for each reason."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    reports = terminal.stats.get("skipped", []) if terminal else []
    reasons = (report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr) for report in reports)
    return Counter(" ".join(reason.removeprefix("Skipped: ").split()) for reason in reasons)


def refused(reasons: Counter[str]) -> list[str]:
    return [reason for reason in reasons if not any(re.search(words, reason) for words in ALLOWED)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a run fail that skipped what it must not; with workers, in the process that hands out the tests."""
    is_main = not hasattr(session.config, "workerinput")
    if is_main and session.config.getoption("--no-skips") and session.exitstatus == 0 and refused(
            by_reason(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what passed tests have recorded, and the skipped tests by reason, a line each."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "printed":
                terminalreporter.write_line(str(text))
    reasons = by_reason(config)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count} x {reason[:200]}")
    if config.getoption("--no-skips") and (wrong := refused(reasons)):
        terminalreporter.write_line(
            f"--no-skips: {sum(reasons[each] for each in wrong)} tests must not be skipped: install what they lack "
            "(CONTRIBUTING.md); tests/support/skips.py lists the allowed reasons", red=True)
