"""Datasets from a user's files or from the hub."""

import codecs
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars, enable_progress_bars, is_progress_bar_enabled, load_dataset
from datasets.exceptions import DatasetsError

from lowmem_grpo.data.kinds import KINDS, is_file_name, refuse_missing
from lowmem_grpo.hub import find_dataset

NAMED = 12  # columns that a message lists
CHUNK = 1 << 20  # bytes of a file that are read at a time


def read_dataset(source: str, split: str = "test", prompt_column: str = "prompt") -> Any:
    """A dataset with a column `prompt` from a jsonl, json, csv or parquet file (all its rows), or a split of a dataset
    on the hub. OSError if it is not there, ValueError for a missing column."""
    rows = read_rows(source, split)
    if prompt_column not in rows.column_names:
        raise ValueError(f"{source} has no column {prompt_column!r}; it has {listed(rows.column_names)}. Name the "
                         "one with the prompts: --prompt-column NAME")
    return rows if prompt_column == "prompt" else rows.rename_column(prompt_column, "prompt")


def read_rows(source: str, split: str = "train", streaming: bool = False) -> Any:
    """A dataset from a jsonl, json, csv or parquet file (all its rows), or a split of a dataset on the hub, where
    "OWNER/NAME:CONFIG" names one of several configurations. OSError if it is not there or cannot be read, ValueError
    for a dataset that the hub does not have."""
    path = Path(source)
    if is_file_name(source):
        check_file(path)
        if path.suffix.lower() == ".json":
            check_rows(path)
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
    """The first rows of a source; from the hub, only these are loaded. OSError as in `read_rows`; ValueError for a
    dataset that the hub does not have."""
    if is_file_name(source):
        rows = read_rows(source)
        return [dict(rows[index]) for index in range(min(count, len(rows)))]
    rows = read_rows(source, split, streaming=True)
    try:
        with quiet_datasets():
            found = [dict(row) for row in rows.take(count)]
    except (DatasetsError, ValueError) as error:
        raise OSError(f"no rows from {source!r}: {reason(Path(source), error)}") from error
    if not found:
        raise OSError(f"no rows from {source!r}: the split {split!r} is empty")
    return found


def check_rows(path: Path) -> None:
    """OSError for a .json file that is one object with a list of rows inside: the library would read it as one row."""
    with path.open(encoding="utf-8") as file:
        first, second = [*islice((line for line in file if line.strip()), 2), "", ""][:2]
        if not first.lstrip("\ufeff \t").startswith("{") or (second and first.rstrip().endswith("}")):
            return
        file.seek(0)
        try:
            found = json.loads(file.read().lstrip("\ufeff"))
        except ValueError:
            return  # the library says what is wrong with it
    for name, held in found.items():
        if isinstance(held, list) and held and isinstance(held[0], dict) and "role" not in held[0]:
            raise OSError(f"no rows from {str(path)!r}: the file is one object, and its rows are the list in {name!r}; "
                          "expected is the list itself, or a .jsonl file with one object a line")


def check_file(path: Path) -> None:
    """OSError unless this is a file of a known kind and, if it is text, in UTF-8."""
    refuse_missing(path)
    if path.suffix.lower() == ".parquet":
        return
    decoder, place = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while True:
            chunk = file.read(CHUNK)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise OSError(f"no rows from {str(path)!r}: it is not UTF-8 (near byte {place + error.start:,}); save "
                              f"it as UTF-8, for example: iconv -f latin1 -t utf-8 {path.name}") from error
            if not chunk:
                return
            place += len(chunk)


def reason(path: Path, error: BaseException) -> str:
    """Why nothing was read, in one line."""
    if path.suffix.lower() == ".jsonl" and path.is_file() and (line := broken_line(path)):
        return line
    said = str(error.__cause__ or error).splitlines() or ["it is empty"]
    return "it has no rows" if "corresponds to no data" in said[0] else said[0]


def broken_line(path: Path) -> str:
    """The first line that is not a JSON object, and why; empty if all are."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"line {number} is not a JSON object: {line.strip():.60}"
            except ValueError as error:
                return f"line {number} is not JSON: {error}"
    return ""


def cell_text(value: Any) -> str | None:
    """A cell as text, None for an empty one. 5.0 becomes "5": tables turn 5 into 5.0 if other cells are empty."""
    if value is None or value != value:  # NaN is an empty cell
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)).strip() or None


def listed(names: list[str]) -> str:
    """The first few of the columns' names, and how many more there are."""
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Inside, the library shows no bars and no log lines; its errors are raised anyway."""
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
