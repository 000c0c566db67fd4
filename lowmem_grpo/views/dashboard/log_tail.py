"""The end of what a run printed, as lines that people read."""

import re
from pathlib import Path

from lowmem_grpo.views.dashboard.plain_file import end_of

LOG = "log.txt"
MOST_BYTES = 16 * 1024
SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")  # colours and moves
INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def log_tail(path: Path) -> str:
    """The last lines of a log; empty where there is none. Of a line that was written over, as by a progress bar, the
    last state is left, and what moves a terminal's cursor is left out."""
    said = end_of(path, MOST_BYTES)
    text = said.decode("utf-8", errors="replace")
    whole = text.partition("\n")[2] if len(said) == MOST_BYTES and "\n" in text else text
    return "\n".join(map(shown, whole.split("\n")))


def shown(line: str) -> str:
    """A line as a terminal has it in the end."""
    states = [state for state in SEQUENCE.sub("", line).split("\r") if state]
    return INVISIBLE.sub("", states[-1]) if states else ""
