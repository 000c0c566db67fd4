"""Read your own rows for a recipe, turn them into prompts and answers, and split them into training and test rows.

A hash of the prompt, without the system prompt, decides whether a row is held out. So training and test rows never
share a prompt, and except in small files, changing some rows moves no other row from one set to the other.
"""

import logging
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import Dataset

from lowmem_grpo.data.files import cell_text, listed, read_rows
from lowmem_grpo.data.layouts import chat_in
from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.options import RecipeOptions

logger = logging.getLogger(__name__)
KNOWS_ARITHMETIC_ALONE = ("The embedded tiny model only knows its own arithmetic: with other data, the run only shows "
                          "that everything works. Choose a model that can learn the task: "
                          "model=Qwen/Qwen2.5-1.5B-Instruct, or any other on the hub")
PARTS = 1 << 16  # number of values of a prompt's hash

MakeRow = Callable[[dict[str, Any]], dict[str, Any]]
"""Maps a row of the data to {"prompt": text or chat, "answer": ..., further columns that the rewards read}."""


@dataclass
class OwnOptions(RecipeOptions):
    """The options of a recipe for your own data, beside the fields of GRPOConfig."""

    check: bool = False
    """Show what the rewards pay for a few samples, and do not train."""
    eval_problems: int = 128
    """Most held-out problems that are answered before and after training."""


@dataclass(frozen=True)
class OwnData:
    """Rows of a jsonl, json, csv or parquet file (its path is relative to the current folder), or of a hub dataset
    ("OWNER/NAME" or "OWNER/NAME:CONFIG")."""

    source: str | Path
    make_row: MakeRow
    split: str = "train"  # split of a hub dataset
    held_out: float = 0.125  # share of the rows that are never trained on
    reads: tuple[str, ...] = field(default=("answer",))  # columns that a usable row needs beside its prompt

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}; it is a share of the rows, above 0 and below 1")

    @cached_property
    def rows(self) -> Dataset:
        """Every usable row, read once."""
        return self.read(self.source, self.split)

    def read(self, source: str | Path, split: str) -> Dataset:
        """Return the usable rows of a source; a warning counts the others. ValueError for a missing column, or for
        fewer than two usable rows."""
        raw = read_rows(str(source), split)
        made = [self.made(row, source) for row in raw]
        wrong = [flaw(row, self.reads) for row in made]
        left_out = Counter(reason for reason in wrong if reason)
        why = ", ".join(f"{reason} ({count})" for reason, count in left_out.items())
        kept = [row for row, reason in zip(made, wrong, strict=True) if not reason]
        if len(kept) < 2:
            raise ValueError(f"{source} has {len(kept)} usable rows of {len(made)}, and a recipe needs two or more, to "
                             f"train on and to test with{': ' + why if why else ''}")
        if why:
            logger.warning("%s: %d of %d rows are left out: %s", source, len(made) - len(kept), len(made), why)
        try:
            return Dataset.from_list(kept)
        except (ValueError, TypeError) as error:  # from pyarrow
            raise ValueError(f"make_row must give one kind of value in each column: {error}") from error

    def made(self, row: dict[str, Any], source: str | Path) -> dict[str, Any]:
        """Return the row that `make_row` makes, with the prompt as chat messages and the answer as text. ValueError if
        a column or the prompt is missing."""
        try:
            made = self.make_row(row)
        except KeyError as error:
            if error.args[0] in row:
                raise
            asked = f"has no column {error.args[0]!r}" if error.args[0] else "is read by a column without a name"
            raise ValueError(f"{source} {asked}; its columns are {listed(list(row))}. Change the recipe's make_row, or "
                             "the names of columns above it") from None
        if missing := [name for name in ("prompt", *self.reads) if name not in made]:
            raise ValueError(f"make_row gave {', '.join(made) or 'nothing'}, and no {missing[0]!r}")
        return {name: chat(value) if name == "prompt" else cell_text(value) if name == "answer" else value
                for name, value in made.items()}

    def train(self) -> Dataset:
        """Return the rows that are not held out."""
        return self.rows.select([index for index in range(len(self.rows)) if index not in self.tested])

    def test(self, size: int) -> Dataset:
        """Return at most `size` held-out rows, always the same ones."""
        if size < 1:
            raise ValueError(f"eval_problems is {size}; it must be at least 1")
        return self.rows.select(list(self.tested)[:size])

    @cached_property
    def tested(self) -> dict[int, None]:
        """Indices of the held-out rows: those with the lowest hashes, at least one prompt and never all prompts."""
        places = [place(row["prompt"]) for row in self.rows]
        bound = max(min(places), min(int(PARTS * self.held_out), max(places)) - 1)
        chosen = sorted((place, index) for index, place in enumerate(places) if place <= bound)
        if len(chosen) == len(places):
            raise ValueError(f"all rows of {self.source} have the same prompt: none is left to test with")
        return dict.fromkeys(index for _, index in chosen)

    def problems(self, size: int, seed: int, source: str | None) -> Dataset:
        """Return at most `size` problems for an exam: rows of another `source`, or by default the held-out rows."""
        if source is None or str(source) == str(self.source) or (
                Path(source).exists() and Path(source).resolve() == Path(self.source).resolve()):
            rows = self.test(len(self.rows))
        else:
            rows = self.read(source, self.split)
        return rows.select(range(min(size, len(rows))))

    def exam(self, right: Callable[..., Any], max_tokens: int, size: int = 256) -> Exam:
        """Return the EXAM for `lowmem-grpo eval --recipe FILE.py`: the held-out rows, or those of --dataset."""
        return Exam(self.problems, right, max_tokens, size, takes_source=True)


def chat(prompt: Any) -> list[dict[str, str]]:
    """Return a prompt as chat messages; a text becomes a user message. Empty messages before the last are dropped."""
    messages = chat_in(prompt) or (prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}])
    if not all(isinstance(message, dict) and {"role", "content"} <= set(message) for message in messages):
        raise ValueError(f"make_row gave the prompt {prompt!r:.80}; it is a text, or a list of "
                         '{"role": ..., "content": ...}')
    said = [{"role": message["role"], "content": cell_text(message["content"]) or ""} for message in messages]
    return [message for message in said[:-1] if message["content"]] + said[-1:]


def flaw(row: dict[str, Any], reads: tuple[str, ...]) -> str:
    """Return the reason why a row cannot be used; "" if it can be used."""
    if not row["prompt"] or not row["prompt"][-1]["content"]:
        return "no prompt"
    if row["prompt"][-1]["role"] == "assistant":
        return "the prompt ends in an answer"
    return next((f"no {name}" for name in reads if row[name] is None), "")


def place(prompt: list[dict[str, str]]) -> int:
    """Return a hash of the prompt from 0 to PARTS - 1; case, spacing and the system message do not change it."""
    said = " ".join(message["content"] for message in prompt if message["role"] != "system")
    return zlib.crc32(" ".join(said.split()).casefold().encode()) % PARTS
