"""The alarms of a run in words: what warned, at which steps, what it means and what to do."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.runs.alarms import ALARMS
from lowmem_grpo.units import count_text

Record = dict[str, Any]

PREFIX = "alarms/"


@dataclass(frozen=True)
class Warned:
    """The number of warnings of an alarm, and its first and last step."""

    times: int
    first: int
    last: int

    @property
    def words(self) -> str:
        if self.times == 1:
            return f"in step {self.first:,}"
        return f"{count_text(self.times, 'time')}, first in step {self.first:,}, last in step {self.last:,}"


def count_alarms(rows: Iterable[Record], earlier: dict[str, Warned] | None = None) -> dict[str, Warned]:
    """Return how often each alarm warned, by its name: in these rows, and `earlier`."""
    alarms = dict(earlier or {})
    for row in rows:
        for key, value in row.items():
            if key.startswith(PREFIX) and value:
                name, step = key.removeprefix(PREFIX), row["step"]
                before = alarms.get(name, Warned(0, step, step))
                alarms[name] = Warned(before.times + 1, min(before.first, step), max(before.last, step))
    return alarms


def alarms_in_words(alarms: dict[str, Warned]) -> list[Record]:
    """Return each alarm that warned, the newest first; one that this version does not know has only its name."""
    known = {alarm.name: alarm for alarm in ALARMS}
    return [{"title": sentence(known[name].title if name in known else name), "times": warned.words,
             "words": f"{sentence(known[name].means)}. {sentence(known[name].fix)}." if name in known else ""}
            for name, warned in sorted(alarms.items(), key=lambda alarm: alarm[1].last, reverse=True)]


def sentence(words: str) -> str:
    words = words.removeprefix("so ").removeprefix("and ")
    return words[:1].upper() + words[1:]
