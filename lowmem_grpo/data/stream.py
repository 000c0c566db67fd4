"""Every supported kind of dataset, read either by index or as a stream.

    rows by index   a list of dicts, datasets.Dataset, a map-style torch Dataset, a DataFrame or Arrow table
    a stream        datasets.IterableDataset, a torch IterableDataset, a generator, or the function that makes one
    refused         several splits, the name of a dataset, a dict of columns; the error says what to pass instead

The position of a run on a stream is the number of rows drawn. To resume, the stream is restarted and rows are skipped
up to that position, so the stream must give the same rows in the same order.
"""

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from lowmem_grpo.data.difficulty import DifficultyPools
from lowmem_grpo.data.prompt_inputs import plain_row
from lowmem_grpo.data.prompts import DataError, Prompt, PromptEncoder, PromptSource, check_dataset

logger = logging.getLogger(__name__)

CONVERTED = ("numpy", "torch", "pandas", "polars", "arrow", "tensorflow", "jax")  # formats that only change the types
IMAGES = ("image", "images", "pixel_values")  # columns that TRL trains on
SPLITS = {"train", "test", "validation", "val", "dev", "eval"}
WITH_IMAGES = ("GRPOTrainer reads images with a model of FastVisionModel.from_pretrained, in prompts that are answered "
               "once: without tools, environment_factory and rollout_func (docs/images.md). Where the text says enough")
IMAGE_PARTS = ("image", "image_url", "input_image")  # types of message parts
Row = dict[str, Any]


class Stream:
    """The rows of an iterable, or of a function that returns one. Rows that `peek` has read are still drawn later."""

    def __init__(self, rows: Any, plain: Callable[[Row], Row] = dict) -> None:
        self.rows, self.plain = rows, plain
        self.change: Callable[[Row], Row] | None = None  # applied to each row
        self.iterator: Iterator[Row] | None = None
        self.ahead: deque[Row] = deque()  # read, but not drawn yet
        self.drawn = 0  # rows since the stream was last started

    def start_round(self, round_number: int = 0) -> None:
        """Start the stream, or restart it for pass `round_number`. DataError for an iterator started before."""
        if self.iterator is not None and isinstance(self.rows, Iterator):
            raise DataError(f"the rows are a {type(self.rows).__name__}, which can be read only once, and {self.drawn} "
                            "rows were not enough; pass the generator's function (train_dataset=rows, not rows()), or "
                            "lower max_steps")
        if hasattr(self.rows, "set_epoch"):  # reshuffles a dataset for this round
            self.rows.set_epoch(round_number)
        self.iterator = self.changed(iter(self.rows() if callable(self.rows) else self.rows))
        self.ahead.clear()
        self.drawn = 0

    def changed(self, rows: Iterable[Any]) -> Iterator[Row]:
        """Yield the rows in plain values, changed by `self.change`. DataError for a row that is not a dict."""
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
        """Return up to `count` of the next rows without drawing them."""
        if self.iterator is None:
            self.start_round()
        assert self.iterator is not None
        self.ahead.extend(islice(self.iterator, max(0, count - len(self.ahead))))
        return list(islice(self.ahead, count))

    def draw(self) -> Row | None:
        """Return the next row; None at the end of the stream."""
        if not self.peek(1):
            return None
        self.drawn += 1
        return self.ahead.popleft()

    def put_back(self, rows: list[Row]) -> None:
        """Undo the drawing of `rows`, which must be the last rows drawn."""
        self.ahead.extendleft(reversed(rows))
        self.drawn -= len(rows)

    def pass_to(self, drawn: int, round_number: int) -> None:
        """Move to the position after `drawn` rows of pass `round_number`. DataError if the stream has fewer rows."""
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
    """The usable prompts of a stream, in its order, in pass after pass over it. As in transformers, `epoch` is the
    number of passes before this one, plus the share of the whole run's prompts that this pass has given."""

    dataset: Stream

    def __post_init__(self) -> None:
        self.rounds, self.fruitful = 0, 0  # the current round, and the last one with a usable row
        self.recent: list[Row] = []  # drawn since the last call of `state`
        if self.pools is not None:
            raise DataError("difficulty_pools=True, and the rows are a stream, in which no row comes again at will; "
                            "leave it out, or pass a datasets.Dataset")
        if self.shuffle:
            logger.warning("the rows are a stream and keep its order; to mix them, pass dataset.shuffle(seed=..., "
                           "buffer_size=...)")

    @property
    def epoch(self) -> float:
        return self.rounds + self.share(self.taken)

    @property
    def used(self) -> int:
        return self.horizon or sys.maxsize

    def count_rows(self, read: bool = False) -> None:
        """Return None: a stream has no length."""

    @property
    def round(self) -> int:
        return self.rounds + (self.begins and bool(self.dataset.drawn))

    @property
    def begins(self) -> bool:
        return not self.dataset.drawn or not self.dataset.peek(1)

    def leave_rest(self, whole: int) -> None:
        """Pass over the last rows of this pass if they are fewer than `whole`."""
        if len(rest := self.dataset.peek(whole)) < whole:
            self.recent += rest
            self.position += len(rest)
            for _ in rest:
                self.dataset.draw()

    def take(self, count: int, across: bool = True) -> list[Prompt]:
        """Return the next `count` usable prompts, or without `across` fewer at the end of a pass; skip and count
        unusable rows. DataError if all rows are unusable."""
        prompts: list[Prompt] = []
        before = self.position
        while len(prompts) < count:
            row = self.dataset.draw()
            if row is None:
                if not across and self.position > before:
                    break
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
        """Restart the stream for another pass; DataError if the last pass had no usable row."""
        if not self.dataset.drawn:
            raise DataError("the dataset has no rows")
        if self.fruitful < self.rounds or not self.position - sum(self.skipped.values()):
            raise DataError(f"no row of the dataset can be used: {self.skip_summary()}")
        self.dataset.start_round(self.rounds + 1)
        self.rounds += 1

    end_epoch = next_round

    def state(self) -> dict[str, Any]:
        self.recent = []
        return {"position": self.position, "skipped": dict(self.skipped), "rows": None, "rounds": self.rounds,
                "drawn": self.dataset.drawn, "taken": self.taken}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved position: put back the rows drawn since, or skip the rows of the stream before it."""
        if state["rows"] is not None:
            raise DataError(f"the checkpoint was made with a dataset of {state['rows']} rows, and this one is a "
                            "stream; resume with the same dataset")
        if (state["position"], state["rounds"]) == (self.position - len(self.recent), self.rounds):
            self.dataset.put_back(self.recent)
        else:
            self.dataset.pass_to(state["drawn"], state["rounds"])
        self.position, self.rounds, self.recent = state["position"], state["rounds"], []
        self.taken = state.get("taken", 0)  # older checkpoints have none
        self.reached = self.epoch
        self.fruitful, self.skipped = self.rounds, type(self.skipped)(state["skipped"])


def source_of(
    dataset: Any, encoder: PromptEncoder, seed: int, shuffle: bool = True, pools: DifficultyPools | None = None,
    whole: int | None = None, micro_batch: int = 1, horizon: int = 0,
) -> PromptSource:
    """Return the prompt source of a dataset from `rows_of`: a StreamSource for a Stream, else a PromptSource."""
    kind = StreamSource if isinstance(dataset, Stream) else PromptSource
    return kind(dataset, encoder, seed, shuffle, pools, whole, micro_batch, horizon)


class PlainRows:
    """Rows by index, converted to plain values and changed by `change_each`'s function when they are read."""

    def __init__(self, rows: Any) -> None:
        shape = getattr(rows, "format", None) if comes_from(rows, "datasets", "Dataset") else None
        if shape and shape["type"] in CONVERTED:
            rows = rows.with_format(None, columns=shape["columns"], output_all_columns=shape["output_all_columns"])
        self.rows = rows
        self.change: Callable[[Row], Row] | None = None  # applied to each row

    def change_each(self, change: Callable[[Row], Row]) -> None:
        self.change = change

    @property
    def stored(self) -> bool:
        """True if a reading costs little and gives the same row again: no transform and no class of the user's."""
        rows = self.rows
        plain = comes_from(rows, "datasets", "Dataset") and rows.format["type"] != "custom"
        return plain or isinstance(rows, (list, tuple))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        row = plain_row(row) if isinstance(row, Mapping) else row
        return row if self.change is None else self.change(row)

    @property
    def column_names(self) -> list[str] | None:
        if self.change is not None:
            return list(self[0])
        if isinstance(self.rows, (list, tuple)):
            return list(dict.fromkeys(name for row in self.rows if isinstance(row, Mapping) for name in row))
        names = getattr(self.rows, "column_names", None)  # a datasets.Dataset names those before a transform
        return list(self[0]) if names is not None and len(self) else names


def rows_of(dataset: Any, parameter: str = "train_dataset", images: bool = False) -> Any:
    """Return the dataset as rows by index, or as a Stream; for any other kind, DataError says what to pass instead.
    Images are refused unless the model may read them (`images`)."""
    if dataset is None:
        raise DataError(f"`{parameter}` is required, as there are no rows without it; pass a list of dicts, or a "
                        "datasets.Dataset")
    if isinstance(dataset, str):
        raise DataError(f"{parameter} is {dataset!r}, which is text; pass datasets.load_dataset({dataset!r}, "
                        "split='train')")
    if isinstance(dataset, (PlainRows, Stream)):
        return dataset
    if comes_from(dataset, "pandas", "DataFrame"):
        rows = dataset.astype(object).where(dataset.notna(), None).to_dict("records")  # None for an empty cell
        dataset = [plain_row(row, arrays=True) for row in rows]
    dataset = dataset.to_pylist() if comes_from(dataset, "pyarrow", "Table") else dataset
    if isinstance(dataset, Mapping):
        raise DataError(f"{parameter} is a {type(dataset).__name__}{of_several(dataset, parameter)}")
    if isinstance(dataset, (list, tuple)) and not all(isinstance(wrong := row, Mapping) for row in dataset):
        raise DataError(f"{parameter} is a list of {type(wrong).__name__}; each row must be a dict of columns, "
                        "for example {'prompt': 'What is 2 + 2?', 'answer': '4'}")
    if comes_from(dataset, "datasets", "IterableDataset") or comes_from(dataset, "torch", "IterableDataset"):
        if not images:
            refuse_images(getattr(dataset, "column_names", None) or [], {}, parameter)
        return Stream(dataset, partial(plain_row, arrays=comes_from(dataset, "datasets", "IterableDataset")))
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        rows = PlainRows(dataset)
        first = rows[0] if len(rows) else {}
        if not isinstance(first, Mapping):
            raise DataError(f"{parameter} is a {type(dataset).__name__} with a {type(first).__name__} for a row; each "
                            "row must be a dict of columns, for example {'prompt': 'What is 2 + 2?', 'answer': '4'}")
        names = rows.column_names or []
        if odd := [name for name in names if not isinstance(name, str)]:
            raise DataError(f"{parameter} has the column {odd[0]!r}, and names of columns are texts; rename it")
        if not images:
            refuse_images(names, first, parameter)
        return rows
    if isinstance(dataset, Iterable) or callable(dataset):
        return Stream(dataset, plain_row)
    check_dataset(dataset)
    return dataset


def refuse_images(columns: list[str], row: Mapping[str, Any], parameter: str) -> None:
    """Raise DataError if a column, or a message of the first row, holds images."""
    held = next((name for name in IMAGES if name in columns or name in row), None)
    if held is not None:
        raise DataError(f"{parameter} has the column {held!r}, and images are not supported: only text is trained "
                        f"here. {WITH_IMAGES}, leave it out: dataset.remove_columns([{held!r}])")
    parts = [(name, part.get("type")) for name, value in row.items() if isinstance(value, list) for message in value
             if isinstance(message, Mapping) and isinstance(message.get("content"), list)
             for part in message["content"] if isinstance(part, Mapping)]
    if held := next((name for name, kind in parts if kind in IMAGE_PARTS), None):
        raise DataError(f"{parameter} has images in the messages of {held!r}, and images are not supported: only text "
                        f"is trained here. {WITH_IMAGES}, leave these parts of the messages out")


def comes_from(value: Any, library: str, name: str) -> bool:
    """Return whether a value is an instance of the library's class `name`, without importing the library."""
    return any(cls.__name__ == name and cls.__module__.partition(".")[0] == library for cls in type(value).__mro__)


def of_several(dataset: Mapping[str, Any], parameter: str) -> str:
    """Return the end of an error message: the columns or splits that a mapping holds, and what to pass instead."""
    names = list(dataset)
    if not any(hasattr(value, "column_names") for value in dataset.values()) and not {*names} <= SPLITS:
        return (f" with the columns {', '.join(map(repr, names))}; pass datasets.Dataset.from_dict(...) of it, or "
                "a list of rows")
    wanted = "train" if parameter == "train_dataset" else "test"
    split = next((name for name in (wanted, *names) if name in names), "train")
    return f" with the splits {', '.join(map(repr, names)) or '(none)'}; pass one of them: dataset[{split!r}]"


def columns_of(dataset: Any) -> list[str]:
    named = getattr(dataset, "column_names", None)
    if named is not None:
        return list(named)
    return list(dataset[0]) if len(dataset) else []
