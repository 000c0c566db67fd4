"""Scripted players of the inbox, to compare a policy with."""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lowmem_grpo.recipes.games.inbox import Inbox
from lowmem_grpo.recipes.problems.inbox_worlds import Kind, MailWorld

Asker = Callable[[Inbox, str, random.Random], tuple[str, list[int]]]  # (inbox, question) -> answer and sources
VALUE = r"(\d(?:[\d.,:]*\d)?(?: euros| [A-Z]\w+)?|[A-Z]\w+(?: [A-Z]\w+)?)"  # a number, an amount, a day, or a name


def random_player(inbox: Inbox, question: str, rng: random.Random) -> tuple[str, list[int]]:
    """Searches for one word of the question, reads any result, and gives any value that stands there."""
    ids = ids_in(inbox.search(rng.choice(re.findall(r"\w+", question))))
    if not ids:
        return "unknown", []
    chosen = rng.choice(ids)
    values = re.findall(VALUE, inbox.read(chosen).partition("\n\n")[2])
    return rng.choice(values or ["unknown"]), [chosen]


def keyword_player(inbox: Inbox, question: str, rng: random.Random) -> tuple[str, list[int]]:
    """The perfect player: it knows how mails tell what is asked, searches for that, and believes the newest mail."""
    kind, topic = understood(question, inbox.world)
    told: list[tuple[str, int, str]] = []  # date, id, value
    for words, form in ways(kind, topic):
        for line in sorted(inbox.search(words).splitlines(), key=day_of, reverse=True):
            values = [re.findall(form, inbox.read(number)) for number in ids_in(line) if inbox.left > 2]
            if any(values):  # older mails are out of date
                told.append((day_of(line), ids_in(line)[0], values[0][0]))
                break
    _, number, value = max(told, default=("", 0, "unknown"))
    return value, [number]


def understood(question: str, world: MailWorld) -> tuple[Kind, str]:
    """Which kind of fact is asked for, and about what. Raises ValueError for a question that nobody generated."""
    for kind in world.kinds:
        for form in kind.questions:
            if match := re.fullmatch(re.escape(form).replace(r"\{topic\}", "(.+)"), question):
                return kind, match[1]
    raise ValueError(f"{question[:100]!r} is no question about this mailbox")


def ways(kind: Kind, topic: str) -> Iterator[tuple[str, str]]:
    """For each way to tell a fact: phrases to search for, and the expression that finds the value in a mail."""
    for sentence in kind.sentences:
        phrased = sentence if "{topic}" in sentence else kind.subjects[0]
        parts = phrased.format(topic=topic, value="|").split("|")
        form = re.escape(sentence.format(topic=topic, value="|")).replace(r"\|", VALUE)
        yield " ".join(f'"{part.strip(" ,.")}"' for part in parts if re.search(r"\w", part)), form


def day_of(line: str) -> str:
    match = re.search(r"\d{4}-\d\d-\d\d", line)
    return match[0] if match else ""


def ids_in(results: str) -> list[int]:
    return [int(line.partition(" ")[0]) for line in results.splitlines() if line[0].isdigit()]


def played(player: Asker, row: Mapping[str, Any]) -> Inbox:
    inbox, question = Inbox(), row["prompt"][-1]["content"]
    inbox.reset(**row)
    answer, sources = player(inbox, question, random.Random(f"player-{question}"))
    inbox.answer(answer, sources)
    return inbox


def baselines(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The share of questions that each player answers rightly, by its name."""
    rows = list(rows)
    return {name: sum(played(player, row).right for row in rows) / len(rows) for name, player in PLAYERS.items()}


PLAYERS: dict[str, Asker] = {"random": random_player, "keywords": keyword_player}
