"""`Job`: one recipe that somebody asked for, and what became of it."""

import json
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any

WAITING, RUNNING, STOPPING = "waiting", "running", "stopping"
DONE, FAILED, STOPPED, CANCELLED = "done", "failed", "stopped", "cancelled"
STATES = (WAITING, RUNNING, STOPPING, DONE, FAILED, STOPPED, CANCELLED)
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
    """Of the card's memory that the run may fill. Jobs run together where their shares do."""
    state: str = WAITING
    why: str = ""
    """Why it waits, or what ended it, in words."""
    goes: int = 0
    """How often a process was started for it."""
    resume: bool = False
    """Whether the next start goes on from the last checkpoint."""
    peak_bytes: int | None = None
    """What the plan says that it needs; None where no plan was made."""
    came: float = 0.0
    began: float | None = None
    ended: float | None = None
    exit_code: int | None = None

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Job":
        """From a row of the database."""
        kept = {one.name: row[one.name] for one in fields(cls)}
        return cls(**kept | {"options": json.loads(row["options"]), "resume": bool(row["resume"])})

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @property
    def is_over(self) -> bool:
        return self.state in OVER


@dataclass(frozen=True)
class Asked:
    """What somebody asks for, checked: ValueError says which field is wrong."""

    recipe: str
    options: list[str] = field(default_factory=list)
    priority: int = 0
    time_limit: float | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, str) or not NAME.fullmatch(self.recipe):
            raise ValueError(f"recipe is {self.recipe!r}; give the name of a recipe (`lowmem-grpo run` lists them), or "
                             "of a file in the server's folder of recipes (NAME.py)")
        if not isinstance(self.options, list) or not all(isinstance(one, str) for one in self.options):
            raise ValueError(f"options is {self.options!r}; give a list of texts such as \"max_steps=100\"")
        for one in self.options:
            if (name := one.removeprefix("--").partition("=")[0].replace("-", "_")) in OURS:
                raise ValueError(f"options has {one!r}; the queue sets {name} itself: a job's run is in the server's "
                                 "folder, `lowmem-grpo resume` goes on with it, --share gives it a part of the card")
        if not is_whole(self.priority) or abs(self.priority) > MOST_PRIORITY:
            raise ValueError(f"priority is {self.priority!r}; it must be a whole number from {-MOST_PRIORITY} to "
                             f"{MOST_PRIORITY}, of which higher ones start first")
        if self.time_limit is not None and not (is_number(self.time_limit) and 0 < self.time_limit < float("inf")):
            raise ValueError(f"time_limit is {self.time_limit!r}; it must be seconds above 0, or null for none")
        if not is_number(self.share) or not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share!r}; it must be a part of the card, above 0 and at most 1")

    @classmethod
    def of(cls, given: Any) -> "Asked":
        """From the JSON of a request."""
        if not isinstance(given, dict) or "recipe" not in given:
            raise ValueError("send a JSON object with recipe, and if you like options, priority, time_limit and share")
        known = {one.name for one in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise ValueError(f"a job has no {', '.join(map(str, unknown))}; it has {', '.join(sorted(known))}")
        return cls(**given)


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, and not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a number, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def seconds_of(text: str) -> float:
    """Seconds of "90", "90s", "45m", "2h" or "1h30m". Raises ValueError for other texts."""
    found = TIME.fullmatch(text.strip().lower())
    if found is None or not any(found.groups()):
        raise ValueError(f"the time {text!r} cannot be read; write 90s, 45m, 2h or 1h30m")
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    if not (total := hours * 3600 + minutes * 60 + seconds):
        raise ValueError(f"the time {text!r} is nothing; give at least 1s, or leave it out")
    return float(total)
