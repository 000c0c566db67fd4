"""The rows of fine-tuning as TRL shows them after its trainer was made: a `datasets.Dataset` of the same columns with
`input_ids` and `labels`, in which rows that are left out of training are missing. Packs have `seq_lengths` too, and no
other columns; of a stream the rows are tokenised when they are drawn."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from datasets import Dataset, concatenate_datasets

from lowmem_grpo.data.brought import comes_from
from lowmem_grpo.data.examples import Example, Examples, each_of
from lowmem_grpo.data.packing import PackEncoder, encoded
from lowmem_grpo.data.stream import Stream
from lowmem_grpo.data.texts import MASKS

Columns = dict[str, list[Any]]


def tokenised(given: Any, rows: Any, encoder: Any) -> Any:
    """Return the dataset of what an encoder makes of `rows`, which were passed as `given`; DataError where none of them
    can be used."""
    if isinstance(rows, Stream):
        return of_stream(given, rows, encoder)
    found, packs = encoded(rows, encoder), isinstance(encoder, PackEncoder)
    placed = [(index, part) for index, one in enumerate(found) if not isinstance(one, str)
              for part in ([one] if packs else each_of(one))]
    made = [columns_of_row(part) for _, part in placed]
    columns = Dataset.from_dict({name: [one[name] for one in made] for name in made[0]})
    kept = None if len(given) != len(found) or packs else of_given(given, [index for index, _ in placed])
    return columns if kept is None else concatenate_datasets([kept, columns], axis=1)


def columns_of_row(example: Example | Examples) -> dict[str, list[int]]:
    """Return the columns that training makes of a row, or of a pack."""
    if isinstance(example, Example):
        return {"input_ids": example.input_ids, "labels": example.labels}
    parts = example.parts
    return {"input_ids": [token for one in parts for token in one.input_ids],
            "labels": [label for one in parts for label in one.labels],
            "seq_lengths": [len(one.input_ids) for one in parts]}


def of_given(given: Any, places: list[int]) -> Dataset | None:
    """Return these rows with the columns in which they were passed, without those that training makes; None where there
    are no others. Of a list, columns that Arrow cannot hold are left out."""
    if comes_from(given, "datasets", "Dataset"):
        kept = given.with_format(None).select(places)
        kept = kept.remove_columns([name for name in ("input_ids", "labels", *MASKS) if name in kept.column_names])
        return kept if kept.column_names else None
    rows = given.to_dict("records") if comes_from(given, "pandas", "DataFrame") else given
    rows = rows.to_pylist() if comes_from(rows, "pyarrow", "Table") else rows
    chosen = [row for row in (rows[place] for place in places) if isinstance(row, Mapping)]
    columns: Columns = {}
    for name in dict.fromkeys(name for row in chosen for name in row if name not in ("input_ids", "labels", *MASKS)):
        values = [row.get(name) for row in chosen]
        with suppress(Exception):  # values of several types, or of a class that Arrow does not know
            Dataset.from_dict({name: values})
            columns[name] = values
    return Dataset.from_dict(columns) if columns else None


def of_stream(given: Any, rows: Stream, encoder: Any) -> Any:
    """Return a stream of the hub's library whose rows are tokenised as they are drawn; another one as it was passed."""
    if not comes_from(given, "datasets", "IterableDataset"):
        return given

    def read(row: dict[str, Any]) -> dict[str, Any]:
        example = encoder.encode(rows.read(row))
        return columns_of_row(example) if isinstance(example, Example) else {"input_ids": [], "labels": []}

    return given.map(read).filter(lambda row: len(row["input_ids"]) > 0)
