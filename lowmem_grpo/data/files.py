"""Datasets from a user's files or from the hub."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars, enable_progress_bars, is_progress_bar_enabled, load_dataset
from datasets.exceptions import DatasetsError

from lowmem_grpo.data.kinds import KINDS, broken_line, check_prompt_column, is_file_name, refuse_unreadable
from lowmem_grpo.models.hub import find_dataset


def read_dataset(source: str, split: str = "test", prompt_column: str = "prompt") -> Any:
    """Return `read_rows`, with the prompts in a column `prompt`. ValueError where their column is missing."""
    rows = read_rows(source, split)
    check_prompt_column(source, rows.column_names, prompt_column)
    return rows if prompt_column == "prompt" else rows.rename_column(prompt_column, "prompt")


def read_rows(source: str, split: str = "train", streaming: bool = False) -> Any:
    """A dataset from a jsonl, json, csv or parquet file (all its rows), or a split of a dataset on the hub, where
    "OWNER/NAME:CONFIG" names one of several configurations. OSError if it is not there or cannot be read, ValueError
    for a dataset that the hub does not have."""
    path = Path(source)
    if is_file_name(source):
        refuse_unreadable(path)
        wanted: dict[str, Any] = {"path": KINDS[path.suffix.lower()], "data_files": str(path), "split": "train"}
    else:
        name, _, part = source.partition(":")
        find_dataset(name)
        wanted = {"path": name, "name": part or None, "split": split, "streaming": streaming}
    try:
        with quiet_datasets():
            rows = load_dataset(**wanted)
    except (OSError, ValueError, DatasetsError, StopIteration) as error:  # the last one for a file without rows
        raise OSError(f"no rows from {source!r}: {reason(path, error)}") from error
    if any(name.startswith("__index_level_") for name in rows.column_names or []) and path.suffix.lower() == ".csv":
        raise OSError(f"no rows from {source!r}: its lines have more fields than its first line names; put texts that "
                      "hold commas into double quotes")
    return rows


def first_rows(source: str, split: str, count: int) -> list[dict[str, Any]]:
    """Return the first rows of a source; from the hub, only these are loaded. Errors are those of `read_rows`."""
    if is_file_name(source):
        rows = read_rows(source)
        return [dict(rows[index]) for index in range(min(count, len(rows)))]
    rows = read_rows(source, split, streaming=True)
    try:
        with quiet_datasets():
            first = [dict(row) for row in rows.take(count)]
    except (DatasetsError, ValueError) as error:
        raise OSError(f"no rows from {source!r}: {reason(Path(source), error)}") from error
    if not first:
        raise OSError(f"no rows from {source!r}: the split {split!r} is empty")
    return first


def reason(path: Path, error: BaseException) -> str:
    if path.suffix.lower() == ".jsonl" and path.is_file() and (line := broken_line(path)):
        return line
    said = str(error.__cause__ or error).splitlines() or ["it is empty"]
    return "it has no rows" if "corresponds to no data" in said[0] else said[0]


def cell_text(value: Any) -> str | None:
    """Return a cell as text, None for an empty one. 5.0 becomes "5": tables turn 5 into 5.0 if others are empty."""
    if value is None or value != value:  # NaN is an empty cell
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)).strip() or None


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Let the library show no bars and no log lines inside; its errors are raised anyway."""
    logger, shown = logging.getLogger("datasets"), is_progress_bar_enabled()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if shown:
            enable_progress_bars()
