"""The alarms of a run in words: what warned, at which steps, what it means and what to do."""

from html import escape
from typing import Any

from lowmem_grpo.runs.alarms import ALARMS
from lowmem_grpo.units import count_text

Record = dict[str, Any]

PREFIX = "alarms/"


def alarmed(rows: list[Record]) -> dict[str, list[int]]:
    """The steps at which each alarm warned, by its name."""
    found: dict[str, list[int]] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith(PREFIX) and value:
                found.setdefault(key.removeprefix(PREFIX), []).append(row["step"])
    return found


def alarms_section(rows: list[Record]) -> str:
    """A card for each alarm that warned, the newest first; empty where none did."""
    found = sorted(alarmed(rows).items(), key=lambda each: each[1][-1], reverse=True)
    cards = "".join(card(name, steps) for name, steps in found)
    return f'<section><h2>Alarms</h2><div class="articles">{cards}</div></section>' if cards else ""


def card(name: str, steps: list[int]) -> str:
    """One alarm; one that this version does not know has only its name."""
    known = next((alarm for alarm in ALARMS if alarm.name == name), None)
    title = name if known is None else known.title[:1].upper() + known.title[1:]
    words = "" if known is None else f"<p>{escape(sentence(known.means))} {escape(sentence(known.fix))}</p>"
    times = f"in step {steps[0]:,}" if len(steps) == 1 else \
        f"{count_text(len(steps), 'time')}, first in step {steps[0]:,}, last in step {steps[-1]:,}"
    return (f'<article class="card ending failed"><p><b class="wrong">\u26a0 {escape(title)}</b> '
            f'<span class="quiet">{times}</span></p>{words}</article>')


def sentence(words: str) -> str:
    """Words as a sentence of their own."""
    words = words.removeprefix("so ").removeprefix("and ")
    return words[:1].upper() + words[1:] + "."
