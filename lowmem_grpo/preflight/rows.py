"""A bounded sample of a run's rows, each turned into a prompt as the run will do it."""

import sys
import time
from copy import copy
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.data.prompts import Prompt, PromptEncoder
from lowmem_grpo.data.stream import Stream

MOST_ROWS, LEAST_ROWS = 256, 16
OF_A_STREAM = 512  # rows that are read ahead
SECONDS = 1.0  # after LEAST_ROWS, no more rows are read once this time has passed


@dataclass(frozen=True)
class LookedAt:
    """One row, and the prompt that it makes."""

    row: dict[str, Any]
    prompt: Prompt | None = None  # None where the row cannot be used
    reason: str = ""  # why it cannot, as the encoder says
    error: Exception | None = None  # what was raised instead
    index: int = 0  # of the row in its dataset

    @property
    def tokens(self) -> int:
        """Tokens of the prompt; in fine-tuning, with its completion."""
        if self.prompt is None:
            return 0
        return len(self.prompt.ids) + len(getattr(self.prompt, "completion_ids", ()))


@dataclass(frozen=True)
class RowSample:
    """Rows spread evenly over a dataset. Prompts of any length count as usable here."""

    rows: list[LookedAt]
    total: int  # rows of the dataset
    columns: list[str]
    encoder: PromptEncoder  # without a bound on the length
    limit: int  # tokens that a row may have
    dataset: Any = ()  # where they come from

    @property
    def usable(self) -> list[LookedAt]:
        """Rows that make a prompt, however long."""
        return [looked for looked in self.rows if looked.prompt is not None]

    @property
    def fitting(self) -> list[LookedAt]:
        """Rows that will be trained on."""
        return [looked for looked in self.usable if looked.tokens <= self.limit]

    def share(self, count: int) -> str:
        """'3 of 256 sampled rows', or 'all 8 rows'."""
        if len(self.rows) < self.total:
            return f"{count} of {len(self.rows)} sampled rows"
        return f"all {self.total} rows" if count == self.total else f"{count} of {self.total} rows"


def sample_rows(dataset: Any, encoder: PromptEncoder) -> RowSample:
    """At most MOST_ROWS rows, and fewer where rows are slow to read; of a stream, some of the next ones."""
    if isinstance(dataset, Stream):
        dataset = dataset.peek(OF_A_STREAM)
    count = min(len(dataset), MOST_ROWS)
    unbounded = copy(encoder)
    unbounded.max_prompt_length = sys.maxsize
    began, rows = time.monotonic(), []
    for place in spread(count):
        rows.append(look_at(dataset, place * len(dataset) // count, unbounded))
        if len(rows) >= LEAST_ROWS and time.monotonic() - began > SECONDS:
            break
    return RowSample(rows, len(dataset), columns_of(dataset, rows), unbounded, encoder.max_prompt_length, dataset)


def spread(count: int) -> list[int]:
    """0 .. count - 1 in an order whose beginnings are spread evenly too, for when time runs out."""
    width = max(count - 1, 0).bit_length()
    turned = (int(f"{place:0{width}b}"[::-1], 2) if width else place for place in range(1 << width))
    return [place for place in turned if place < count]


def look_at(dataset: Any, index: int, encoder: PromptEncoder) -> LookedAt:
    """One row. A broken row, or a template that refuses it, may raise anything."""
    row: Any = {}
    try:
        row = dataset[index]
        encoded = encoder.encode(row)
    except Exception as error:  # noqa: BLE001 - it is what is reported
        return LookedAt(row if isinstance(row, dict) else {}, error=error, index=index)
    if isinstance(encoded, str):
        return LookedAt(row, reason=encoded, index=index)
    return LookedAt(row, encoded, index=index)


def columns_of(dataset: Any, rows: list[LookedAt]) -> list[str]:
    """The sorted names of the columns; in a plain list, of all its rows."""
    named = getattr(dataset, "column_names", None)
    if named is not None:
        return sorted(named)
    known = dataset if isinstance(dataset, list) else [looked.row for looked in rows]
    return sorted({name for row in known if isinstance(row, dict) for name in row})
