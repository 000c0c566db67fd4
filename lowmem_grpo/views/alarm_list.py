"""The alarms of a run in words: what warned, at which steps, what it means and what to do."""

from dataclasses import dataclass
from html import escape
from typing import Any

from lowmem_grpo.runs.alarms import ALARMS
from lowmem_grpo.units import count_text

Record = dict[str, Any]

PREFIX = "alarms/"


@dataclass(frozen=True)
class Warned:
    """How often an alarm warned, and in which steps first and last."""

    times: int
    first: int
    last: int

    def again(self, step: int) -> "Warned":
        return Warned(self.times + 1, min(self.first, step), max(self.last, step))


def alarmed(rows: list[Record]) -> dict[str, Warned]:
    """How often each alarm warned, by its name."""
    found: dict[str, Warned] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith(PREFIX) and value:
                name = key.removeprefix(PREFIX)
                found[name] = found.get(name, Warned(0, row["step"], row["step"])).again(row["step"])
    return found


def alarms_section(alarms: dict[str, Warned]) -> str:
    """A card for each alarm that warned, the newest first; empty where none did."""
    found = sorted(alarms.items(), key=lambda each: each[1].last, reverse=True)
    cards = "".join(card(name, warned) for name, warned in found)
    return f'<section><h2>Alarms</h2><div class="articles">{cards}</div></section>' if cards else ""


def card(name: str, warned: Warned) -> str:
    """One alarm; one that this version does not know has only its name."""
    known = next((alarm for alarm in ALARMS if alarm.name == name), None)
    title = name if known is None else known.title[:1].upper() + known.title[1:]
    words = "" if known is None else f"<p>{escape(sentence(known.means))} {escape(sentence(known.fix))}</p>"
    times = f"in step {warned.first:,}" if warned.times == 1 else \
        f"{count_text(warned.times, 'time')}, first in step {warned.first:,}, last in step {warned.last:,}"
    return (f'<article class="card ending failed"><p><b class="wrong">\u26a0 {escape(title)}</b> '
            f'<span class="quiet">{times}</span></p>{words}</article>')


def sentence(words: str) -> str:
    """Words as a sentence of their own."""
    words = words.removeprefix("so ").removeprefix("and ")
    return words[:1].upper() + words[1:] + "."
