"""Turns completions into questions for a judge: one by one, or the completions of a group side by side."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lowmem_grpo.rewards.judge.question import Question
from lowmem_grpo.runs.records import prompt_text

EQUAL = 0.5  # the reward of completions that have none to be compared with


@dataclass(frozen=True)
class Row:
    """A completion, and what it is judged by."""

    prompt: str
    rubric: str
    reference: str | None
    text: str


@dataclass(frozen=True)
class Asked:
    """A question, and the numbers of the completions behind each of its answers. Without a question all get `equal`."""

    places: list[list[int]]
    question: Question | None = None
    equal: float = EQUAL


@dataclass(frozen=True)
class Form(ABC):
    """How completions are put to a judge, and what its scores are worth."""

    rubric: str
    rubric_column: str | None  # of the dataset: holds a row's own rubric
    reference: str | None  # the dataset column with a row's reference answer

    @property
    def columns(self) -> tuple[str, ...]:
        """The dataset columns that it reads."""
        return tuple(dict.fromkeys(name for name in (self.rubric_column, self.reference) if name is not None))

    def rows(self, texts: list[str], columns: dict[str, list[Any]], prompts: list[Any]) -> list[Row]:
        """Each completion with its prompt, rubric and reference, as text."""
        nothing = [None] * len(texts)
        rubrics = nothing if self.rubric_column is None else columns[self.rubric_column]
        references = nothing if self.reference is None else columns[self.reference]
        together = zip(texts, prompts, rubrics, references, strict=True)
        return [Row(prompt_text(prompt), self.rubric if rubric in (None, "") else str(rubric),
                    None if known is None else str(known), text) for text, prompt, rubric, known in together]

    @abstractmethod
    def ask(self, texts: list[str], columns: dict[str, list[Any]], prompts: list[Any]) -> list[Asked]:
        """Questions about N completions. Each completion has one place in one of them."""

    @abstractmethod
    def worth(self, score: float) -> float:
        """The reward for a score."""


@dataclass(frozen=True)
class SingleForm(Form):
    """Each completion by itself, on a scale from `low` to `high`; rewards go from 0 to 1."""

    low: float
    high: float

    def ask(self, texts: list[str], columns: dict[str, list[Any]], prompts: list[Any]) -> list[Asked]:
        places: dict[Row, list[int]] = {}
        for place, row in enumerate(self.rows(texts, columns, prompts)):
            places.setdefault(row, []).append(place)
        return [Asked([found], Question(row.prompt, (row.text,), row.rubric, row.reference, False, self.low, self.high))
                for row, found in places.items()]

    def worth(self, score: float) -> float:
        return (score - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class GroupForm(Form):
    """The completions of each group in one question, identical ones once. A group is completions in a row with the same
    prompt. If there is nothing to compare, nothing is asked."""

    def ask(self, texts: list[str], columns: dict[str, list[Any]], prompts: list[Any]) -> list[Asked]:
        rows = enumerate(self.rows(texts, columns, prompts))
        return [self.group(list(found)) for _, found in groupby(rows, lambda item: common(item[1]))]

    def group(self, rows: list[tuple[int, Row]]) -> Asked:
        places: dict[str, list[int]] = {}
        for place, row in rows:
            places.setdefault(row.text, []).append(place)
        if len(places) == 1:
            return Asked(list(places.values()), equal=EQUAL if rows[0][1].text.strip() else 0.0)
        prompt, rubric, reference = common(rows[0][1])
        return Asked(list(places.values()), Question(prompt, tuple(places), rubric, reference, grouped=True))

    def worth(self, score: float) -> float:
        return score


def common(row: Row) -> tuple[str, str, str | None]:
    """What the completions of a group share."""
    return row.prompt, row.rubric, row.reference
