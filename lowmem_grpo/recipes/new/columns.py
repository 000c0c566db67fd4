"""Finds the columns of prompts and of answers in a user's data: by their names, else by their content."""

import re
from dataclasses import dataclass, replace
from typing import Any

from lowmem_grpo.data.files import listed

PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "task", "puzzle", "text", "user",
           "messages")
ANSWERS = ("answer", "final_answer", "answers", "solution", "label", "target", "expected", "ground_truth",
           "correct_answer", "gold", "output", "response", "completion", "result", "ideal", "reference")
CHOICES = ("choices", "options")
BELONGING = ("context", "passage", "input", *CHOICES)  # columns that a prompt needs as well
CLEARLY = 2.0  # a column with this many times the letters of the other one holds the prompts
NUMBERING = ("", "id", "idx", "index", "row", "number", "no", "nr", "unnamed: 0")  # columns that say nothing
MOST = 100  # the largest number of columns to guess from


@dataclass(frozen=True)
class Columns:
    """The two columns, and why they were chosen."""

    prompt: str = ""
    """Empty if it cannot be told."""
    answer: str | None = ""
    """Empty if it cannot be told; None if no answers are wanted."""
    why_prompt: str = ""
    why_answer: str = ""

    more: tuple[str, ...] = ()
    """Further columns that go into the prompt."""

    @property
    def known(self) -> bool:
        """Whether nothing has to be filled in."""
        return self.prompt != "" and self.answer != ""


def find_columns(rows: list[dict[str, Any]], prompt: str | None, answer: str | None, source: str) -> Columns:
    """The columns that the user named, or a guess from names and first rows. ValueError if no column can be used."""
    names = list(rows[0])
    for name in (prompt, answer):
        if name is not None and name not in names:
            raise ValueError(f"{source} has no column {name!r}; it has {listed(names)}")
    if prompt is not None and answer is not None and prompt != answer:
        return with_more(rows, checked(rows, Columns(prompt, answer, "named", "named"), source))
    if prompt is not None and prompt == answer:
        raise ValueError(f"prompts and answers cannot both be the column {prompt!r}; name two of {listed(names)}")
    if len(names) == 1 and prompt is None:
        raise ValueError(f"{source} has one column, {names[0]!r}{separated(names[0])}; a recipe needs prompts and "
                         f"answers. Add a column, or write --prompt-column {names[0]!r} for rewards without answers")
    if len(names) > MOST:
        raise ValueError(f"{source} has {len(names)} columns, too many to guess from: name two with --prompt-column "
                         f"and --answer-column. The first are {listed(names)}")
    return with_more(rows, checked(rows, guess(rows, names, prompt, answer), source))


def with_more(rows: list[dict[str, Any]], found: Columns) -> Columns:
    """The same columns, with those that a prompt cannot be answered without. A prompt of chat messages gets none."""
    if not found.prompt or not all(isinstance(row[found.prompt], str | None) for row in rows):
        return found
    names = {name.strip().lower(): name for name in rows[0] if name not in (found.prompt, found.answer)}
    return replace(found, more=tuple(names[name] for name in BELONGING if name in names))


def separated(name: str) -> str:
    """What to say of a table whose first line uses another separator than the comma; empty if it uses none."""
    for mark, word in ((";", "semicolons"), ("\t", "tabs")):
        if mark in name:
            return f" (its fields are separated by {word}: save it with commas)"
    return ""


def guess(rows: list[dict[str, Any]], names: list[str], prompt: str | None, answer: str | None) -> Columns:
    """A guess by name. Of two columns: the other one, the one with clearly longer texts, or the first. Else none."""
    why_prompt = why_answer = "named"
    if prompt is None:
        prompt, why_prompt = by_name(PROMPTS, [name for name in names if name != answer])
    if answer is None and names == [prompt]:
        return Columns(prompt, None, why_prompt, "none: there is no other column")
    if answer is None:
        answer, why_answer = by_name(ANSWERS, [name for name in names if name != prompt])
    names = [name for name in names if name in (prompt, answer) or name.strip().lower() not in NUMBERING]
    if len(names) == 2 and not (prompt and answer):
        if not prompt and not answer:
            prompt, why_prompt = longer_or_first(rows, names)
        first, second = names
        if not answer:
            answer, why_answer = second if prompt == first else first, "guessed: the other one of two columns"
        else:
            prompt, why_prompt = second if answer == first else first, "guessed: the other one of two columns"
    return Columns(prompt, answer, why_prompt, why_answer)


def longer_or_first(rows: list[dict[str, Any]], names: list[str]) -> tuple[str, str]:
    """Of two columns, the one with clearly longer texts, else the first; and how it was found."""
    longer, shorter = sorted(names, key=lambda name: letters(rows, name), reverse=True)
    if letters(rows, longer) > CLEARLY * letters(rows, shorter):
        return longer, "guessed: its texts are longer"
    return names[0], "guessed: the first of two columns"


def by_name(usual: tuple[str, ...], names: list[str]) -> tuple[str, str]:
    """The column with the most usual name, or the only one whose name contains such a word; and how it was found. Empty
    texts if there is none."""
    lower = {name.strip().lower(): name for name in reversed(names)}
    found = next((lower[name] for name in usual if name in lower), "")
    if not found and len(part := [name for name in names if set(re.findall(r"[a-z]+", name.lower())) & {*usual}]) == 1:
        found = part[0]
    return found, "guessed from its name" if found else ""


def letters(rows: list[dict[str, Any]], name: str) -> int:
    """The number of characters in a column's texts."""
    return sum(len(row[name]) if isinstance(row[name], str) else 0 for row in rows)


def checked(rows: list[dict[str, Any]], found: Columns, source: str) -> Columns:
    """The same columns. ValueError if one is empty in every row, or if no column has texts for prompts."""
    for name in (found.prompt, found.answer):
        if name and all(row[name] in (None, "", []) for row in rows):
            raise ValueError(f"the column {name!r} of {source} is empty in all of the first {len(rows)} rows; name "
                             "another one with --prompt-column or --answer-column")
    asked = [found.prompt] if found.prompt else list(rows[0])
    if not any(isinstance(row[name], str | list) for row in rows for name in asked):
        raise ValueError(f"{source} has no texts in {listed(asked)}: prompts are texts, or lists of chat messages; "
                         "name their column with --prompt-column")
    return found
