"""Rows that come one after another, without a length: a streamed dataset, or a generator.

A run on a stream has a position, the number of rows that it has drawn. To go on from there, the stream is begun again
and passed over up to it, so it must give the same rows in the same order.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from lowmem_grpo.data.difficulty import DifficultyPools
from lowmem_grpo.data.prompts import DataError, Prompt, PromptEncoder, PromptSource

logger = logging.getLogger(__name__)

Row = dict[str, Any]


class Stream:
    """Rows of an iterable, or of a function that begins one. Rows that were only looked at stay to be drawn."""

    def __init__(self, rows: Any, plain: Callable[[Row], Row] = dict) -> None:
        """`plain` makes plain values of a row."""
        self.rows, self.plain = rows, plain
        self.change: Callable[[Row], Row] | None = None  # made to each row
        self.iterator: Iterator[Row] | None = None
        self.ahead: deque[Row] = deque()
        self.drawn = 0  # rows, since the stream was last begun

    def start_round(self, round_number: int = 0) -> None:
        """Begin the stream, or begin it again; DataError for an iterator, which cannot be."""
        if self.iterator is not None and isinstance(self.rows, Iterator):
            raise DataError(f"the rows are a {type(self.rows).__name__}, which can be read only once, and {self.drawn} "
                            "rows were not enough; pass the generator's function (train_dataset=rows, not rows()), or "
                            "lower max_steps")
        if hasattr(self.rows, "set_epoch"):  # a shuffled dataset has another order in each round
            self.rows.set_epoch(round_number)
        self.iterator = self.changed(iter(self.rows() if callable(self.rows) else self.rows))
        self.ahead.clear()
        self.drawn = 0

    def changed(self, rows: Iterable[Any]) -> Iterator[Row]:
        """Yield the rows as they are drawn; DataError for one that is no dict."""
        for row in rows:
            if not isinstance(row, dict) and hasattr(row, "__arrow_c_stream__"):  # a table of one row
                row = (row.to_dict("records") if hasattr(row, "to_dict") else row.to_pylist())[0]
            if not isinstance(row, dict):
                raise DataError(f"the stream gave a {type(row).__name__}; each row must be a dict of columns")
            yield self.read(row)

    def read(self, row: Row) -> Row:
        return self.plain(row) if self.change is None else self.change(self.plain(row))

    def change_each(self, change: Callable[[Row], Row]) -> None:
        self.ahead = deque(map(change, self.ahead))
        self.change = change

    def peek(self, count: int) -> list[Row]:
        """Return the next rows, at most `count`, which stay to be drawn."""
        if self.iterator is None:
            self.start_round()
        assert self.iterator is not None
        self.ahead.extend(islice(self.iterator, max(0, count - len(self.ahead))))
        return list(islice(self.ahead, count))

    def draw(self) -> Row | None:
        if not self.peek(1):
            return None
        self.drawn += 1
        return self.ahead.popleft()

    def put_back(self, rows: list[Row]) -> None:
        self.ahead.extendleft(reversed(rows))
        self.drawn -= len(rows)

    def pass_to(self, drawn: int, round_number: int) -> None:
        """As if so many rows had been drawn in this round."""
        if drawn < self.drawn or round_number:
            self.start_round(round_number)
        while self.drawn < drawn:
            if self.draw() is None:
                raise DataError(f"the stream ended after {self.drawn} rows, and the checkpoint had drawn {drawn}; "
                                "resume with the same dataset")

    @property
    def column_names(self) -> list[str]:
        return list((self.peek(1) or [{}])[0])


class StreamSource(PromptSource):
    """Usable prompts of a stream, in its order, round after round; `epoch` counts the rounds."""

    dataset: Stream

    def __post_init__(self) -> None:
        self.rounds, self.fruitful = 0, 0  # the round that is read, and the last one in which a row could be used
        self.recent: list[Row] = []  # drawn since `state` was asked for
        if self.pools is not None:
            raise DataError("difficulty_pools=True, and the rows are a stream, in which no row comes again at will; "
                            "leave it out, or pass a datasets.Dataset")
        if self.shuffle:
            logger.warning("the rows are a stream and keep its order; to mix them, pass dataset.shuffle(seed=..., "
                           "buffer_size=...)")

    @property
    def epoch(self) -> float:
        return float(self.rounds)

    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` usable prompts. Unusable rows are skipped and counted; DataError if all rows are."""
        prompts: list[Prompt] = []
        while len(prompts) < count:
            row = self.dataset.draw()
            if row is None:
                self.next_round()
                continue
            self.recent.append(row)
            self.position += 1
            encoded = self.encoder.encode(row)
            if isinstance(encoded, Prompt):
                encoded.epoch = self.fruitful = self.rounds
                prompts.append(encoded)
            else:
                self.count_skip(self.position - 1, encoded)
        return prompts

    def next_round(self) -> None:
        """Begin the stream again; DataError if the round had no row, or none that can be used."""
        if not self.dataset.drawn:
            raise DataError("the dataset has no rows")
        if self.fruitful < self.rounds or not self.position - sum(self.skipped.values()):
            raise DataError(f"no row of the dataset can be used: {self.skip_summary()}")
        self.dataset.start_round(self.rounds + 1)
        self.rounds += 1

    end_epoch = next_round

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to go on from here."""
        self.recent = []
        return {"position": self.position, "skipped": dict(self.skipped), "rows": None, "rounds": self.rounds,
                "drawn": self.dataset.drawn}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, which a stream reaches by passing over the rows before it."""
        if state["rows"] is not None:
            raise DataError(f"the checkpoint was made with a dataset of {state['rows']} rows, and this one is a "
                            "stream; resume with the same dataset")
        if (state["position"], state["rounds"]) == (self.position - len(self.recent), self.rounds):
            self.dataset.put_back(self.recent)
        else:
            self.dataset.pass_to(state["drawn"], state["rounds"])
        self.position, self.rounds, self.recent = state["position"], state["rounds"], []
        self.fruitful, self.skipped = self.rounds, type(self.skipped)(state["skipped"])


def source_of(
    dataset: Any, encoder: PromptEncoder, seed: int, shuffle: bool = True, pools: DifficultyPools | None = None
) -> PromptSource:
    kind = StreamSource if isinstance(dataset, Stream) else PromptSource
    return kind(dataset, encoder, seed, shuffle, pools)
