"""`JobRequest`: a recipe that somebody asks for; `Job`: what becomes of it."""

import json
import re
import sys
from dataclasses import dataclass, field, fields
from typing import Any

WAITING, RUNNING, STOPPING = "waiting", "running", "stopping"
DONE, FAILED, STOPPED, CANCELLED = "done", "failed", "stopped", "cancelled"
LIVE = (RUNNING, STOPPING)  # a process works on it
OVER = (DONE, FAILED, STOPPED, CANCELLED)
NAME = re.compile(r"[A-Za-z0-9_-]{1,100}(\.py)?")
OURS = ("output_dir", "resume", "card_share", "overwrite_output_dir")  # options that the queue gives
TIME = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")
MOST_PRIORITY = 1000


@dataclass(frozen=True)
class Job:
    """A row of the queue. Times are seconds since 1970; bytes are of the card."""

    id: int
    recipe: str
    options: list[str]
    """`key=value`, as `lowmem-grpo run` takes them."""
    owner: str
    """The name of the key that asked for it."""
    priority: int = 0
    """Higher ones start first; equal ones in the order in which they came."""
    time_limit: float | None = None
    """Seconds of one go; the run is then stopped after its step, and saved."""
    share: float = 1.0
    """The part of the card's memory that the run may fill. Jobs run together where their shares do."""
    state: str = WAITING
    why: str = ""
    """Why it waits, or what ended it, in words."""
    goes: int = 0
    """How often a process was started for it."""
    resume: bool = False
    """Whether the next start goes on from the last checkpoint."""
    peak_bytes: int | None = None
    """The memory that it needs by its plan; None where no plan was made."""
    came: float = 0.0
    began: float | None = None
    ended: float | None = None
    exit_code: int | None = None

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> "Job":
        return cls(**row | {"options": json.loads(row["options"]), "resume": bool(row["resume"])})

    @property
    def is_over(self) -> bool:
        return self.state in OVER


@dataclass(frozen=True)
class JobRequest:
    """A job that somebody asks for. ValueError says which field is wrong."""

    recipe: str
    options: list[str] = field(default_factory=list)
    priority: int = 0
    time_limit: float | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, str) or not NAME.fullmatch(self.recipe):
            raise ValueError(f"recipe is {self.recipe!r}; give the name of a recipe (`lowmem-grpo run` lists them), or "
                             "of a file in the server's folder of recipes (NAME.py)")
        if not isinstance(self.options, list) or not all(isinstance(option, str) for option in self.options):
            raise ValueError(f"options is {self.options!r}; give a list of texts such as \"max_steps=100\"")
        for option in self.options:
            if (name := option.removeprefix("--").partition("=")[0].replace("-", "_")) in OURS:
                raise ValueError(f"options has {option!r}; the queue sets {name} itself: a job's run is in the "
                                 "server's folder, `lowmem-grpo resume` goes on with it, --share gives it a part of "
                                 "the card")
        if type(self.priority) is not int or abs(self.priority) > MOST_PRIORITY:
            raise ValueError(f"priority is {self.priority!r}; it must be a whole number from {-MOST_PRIORITY} to "
                             f"{MOST_PRIORITY}, of which higher ones start first")
        if self.time_limit is not None and not is_between(self.time_limit, sys.float_info.max):
            raise ValueError(f"time_limit is {self.time_limit!r}; it must be seconds above 0, or null for none")
        if not is_between(self.share, 1):
            raise ValueError(f"share is {self.share!r}; it must be a part of the card, above 0 and at most 1")

    @classmethod
    def from_json(cls, body: Any) -> "JobRequest":
        if not isinstance(body, dict) or "recipe" not in body:
            raise ValueError("send a JSON object with recipe, and if you like options, priority, time_limit and share")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(body) - known):
            raise ValueError(f"a job has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return cls(**body)


def is_between(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 < value <= most


def seconds_of(text: str) -> float:
    """Return the seconds of "90", "90s", "45m", "2h" or "1h30m". Raises ValueError for other texts."""
    match = TIME.fullmatch(text.strip().lower())
    if match is None or not any(match.groups()):
        raise ValueError(f"the time {text!r} cannot be read; write 90s, 45m, 2h or 1h30m")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    if not (total := hours * 3600 + minutes * 60 + seconds):
        raise ValueError(f"the time {text!r} is nothing; give at least 1s, or leave it out")
    return float(total)
