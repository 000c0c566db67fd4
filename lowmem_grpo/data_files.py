"""Datasets out of a user's files, or off the hub."""

from pathlib import Path
from typing import Any

from datasets import load_dataset
from datasets.exceptions import DatasetsError

KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def read_dataset(source: str, split: str = "test", prompt_column: str = "prompt") -> Any:
    """A dataset with a column `prompt` from a jsonl, json, csv or parquet file (all its rows), or a split of a dataset
    on the hub. OSError for what is not there, ValueError for a missing column."""
    path = Path(source)
    if path.suffix in KINDS or path.exists():
        if path.suffix not in KINDS or not path.is_file():
            raise OSError(f"no file {source!r} that can be read; allowed are {', '.join(KINDS)}, and names on the hub")
        wanted: dict[str, Any] = {"path": KINDS[path.suffix], "data_files": str(path), "split": "train"}
    else:
        wanted = {"path": source, "split": split}
    try:
        rows = load_dataset(**wanted)
    except (OSError, ValueError, DatasetsError, StopIteration) as error:  # the last one for a file without rows
        why = error.__cause__ or error
        raise OSError(f"no rows from {source!r}: {(str(why).splitlines() or ['it is empty'])[0]}") from error
    if prompt_column not in rows.column_names:
        raise ValueError(f"{source} has no column {prompt_column!r}; it has {', '.join(rows.column_names)}. Name the "
                         "one with the prompts: --prompt-column NAME")
    return rows if prompt_column == "prompt" else rows.rename_column(prompt_column, "prompt")
