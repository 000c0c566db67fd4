"""The rows of fine-tuning as TRL shows them after its trainer was made: a `datasets.Dataset` of the same columns with
`input_ids` and `labels`, in which rows that are left out of training are missing. Packs have `seq_lengths` too, and no
other columns; of a stream the rows are tokenised when they are drawn."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from datasets import Dataset, concatenate_datasets

from lowmem_grpo.data.examples import Example, Examples, each_of
from lowmem_grpo.data.packing import PackEncoder, encoded
from lowmem_grpo.data.stream import Stream, comes_from
from lowmem_grpo.data.texts import MASKS

Columns = dict[str, list[Any]]


def tokenised(dataset: Any, rows: Any, encoder: Any) -> Any:
    """Return what an encoder makes of `rows`, which were passed as `dataset`; DataError where no row can be used."""
    if isinstance(rows, Stream):
        return tokenised_stream(dataset, rows, encoder)
    results, packs = encoded(rows, encoder), isinstance(encoder, PackEncoder)
    placed = [(index, part) for index, result in enumerate(results) if not isinstance(result, str)
              for part in ([result] if packs else each_of(result))]
    made = [columns_of_row(part) for _, part in placed]
    columns = Dataset.from_dict({name: [row[name] for row in made] for name in made[0]})
    kept = None if len(dataset) != len(results) or packs else own_columns(dataset, [index for index, _ in placed])
    return columns if kept is None else concatenate_datasets([kept, columns], axis=1)


def columns_of_row(example: Example | Examples) -> dict[str, list[int]]:
    """Return the columns that training makes of a row, or of a pack."""
    if isinstance(example, Example):
        return {"input_ids": example.input_ids, "labels": example.labels}
    parts = example.parts
    return {"input_ids": [token for part in parts for token in part.input_ids],
            "labels": [label for part in parts for label in part.labels],
            "seq_lengths": [len(part.input_ids) for part in parts]}


def own_columns(dataset: Any, places: list[int]) -> Dataset | None:
    """Return these rows with their own columns, without those that training makes; None where there are no others.
    Columns of a list that Arrow cannot hold are left out."""
    if comes_from(dataset, "datasets", "Dataset"):
        kept = dataset.with_format(None).select(places)
        kept = kept.remove_columns([name for name in ("input_ids", "labels", *MASKS) if name in kept.column_names])
        return kept if kept.column_names else None
    rows = dataset.to_dict("records") if comes_from(dataset, "pandas", "DataFrame") else dataset
    rows = rows.to_pylist() if comes_from(rows, "pyarrow", "Table") else rows
    chosen = [row for row in (rows[place] for place in places) if isinstance(row, Mapping)]
    columns: Columns = {}
    for name in dict.fromkeys(name for row in chosen for name in row if name not in ("input_ids", "labels", *MASKS)):
        values = [row.get(name) for row in chosen]
        with suppress(Exception):  # values of several types, or of a class that Arrow does not know
            Dataset.from_dict({name: values})
            columns[name] = values
    return Dataset.from_dict(columns) if columns else None


def tokenised_stream(dataset: Any, rows: Stream, encoder: Any) -> Any:
    """Return a stream of the hub's library whose rows are tokenised as they are drawn; another one as it was passed."""
    if not comes_from(dataset, "datasets", "IterableDataset"):
        return dataset

    def read(row: dict[str, Any]) -> dict[str, Any]:
        example = encoder.encode(rows.read(row))
        return columns_of_row(example) if isinstance(example, Example) else {"input_ids": [], "labels": []}

    return dataset.map(read).filter(lambda row: len(row["input_ids"]) > 0)
