"""Datasets from a user's files or from the hub. The `datasets` library, slow to import, is imported only to read rows,
so that a missing, empty or broken file is refused at once."""

import codecs
import csv
import json
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any

KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
NAMED = 12  # columns that a message lists
LOOKED = 10_000  # lines that are checked before the library reads the file
CHUNK = 1 << 20  # bytes read at a time
ONE_ROW = "{} has one row, and a recipe needs two or more, to train on and to test with; add rows"
EXACT = 1 << 53  # whole numbers from here on are rounded in floats
DIGITS = {"int64": r"\s*[-+]?0[0-9]", "float64": r"\s*[-+]?(?:0[0-9]|[0-9]{16})"}  # a number of this dtype loses some
EMPTY = ["", "NaN", "nan", "NULL", "null", "<NA>"]  # empty cells in columns of texts, where None and NA are words
PARQUET = b"PAR1"  # the first and the last bytes of a parquet file


class DataError(ValueError):
    """The dataset cannot be trained on; the message says why and what to do."""


def is_file_name(source: str) -> bool:
    return Path(source).suffix.lower() in KINDS or Path(source).exists()


def refuse_unreadable(path: Path) -> None:
    """Raise OSError for a file that is missing, empty, broken in its first rows, or of an unsupported kind."""
    kind = path.suffix.lower()
    if kind not in KINDS or not path.is_file():
        raise OSError(f"no file {str(path)!r} that can be read; allowed are {', '.join(KINDS)}, and names on the hub")
    if kind == ".parquet":
        with path.open("rb") as file:
            why = "" if file.read(len(PARQUET)) == PARQUET else "it is not a parquet file"
    else:
        check_encoding(path)
        lines = first_lines(path)
        is_empty = len(lines) < (2 if kind == ".csv" else 1) or (
            kind == ".json" and "".join(lines).split() in (["[]"], ["{}"]))
        why = "it has no rows; each prompt needs one" if is_empty else (
            broken_line(path, LOOKED) if kind == ".jsonl" else json_fault(path) if kind == ".json" else "")
    if why:
        raise OSError(f"no rows from {str(path)!r}: {why}")
    if kind == ".json":
        check_rows(path)


def json_fault(path: Path) -> str:
    """Return why a .json file is neither JSON nor JSON lines; "" if it is, or if that is not seen here, as of a large
    one or a deep one."""
    try:
        if path.stat().st_size < CHUNK:
            json.loads(path.read_text("utf-8-sig"))
    except RecursionError:
        pass
    except ValueError as error:
        return broken_line(path, LOOKED) and f"it is not JSON: {error}"
    return ""


def has_one_row(path: Path) -> bool:
    """Return whether a readable text file has exactly one row; False if only the `datasets` library can tell."""
    kind = path.suffix.lower()
    if kind == ".jsonl":
        return len(first_lines(path, "replace")) == 1
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        try:
            if kind == ".csv":
                return len([*islice((row for row in csv.reader(file) if row), 3)]) == 2  # with the header
            held = json.loads(file.read()) if kind == ".json" and path.stat().st_size < CHUNK else None
        except (ValueError, RecursionError, csv.Error):  # such as a cell that is too long for the reader
            return False
        return isinstance(held, list) and len(held) == 1


def first_lines(path: Path, errors: str = "strict") -> list[str]:
    with path.open(encoding="utf-8-sig", errors=errors) as file:
        return [*islice((line for line in file if line.strip()), 2)]


def check_rows(path: Path) -> None:
    """Raise OSError for a .json file that is one object with a list of rows inside: it would be read as one row."""
    first, second = [*first_lines(path), "", ""][:2]
    if not first.lstrip(" \t").startswith("{") or (second and first.rstrip().endswith("}")):
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise OSError(f"no rows from {str(path)!r}: a row is nested too deeply") from None
    except ValueError:
        return  # the library says what is wrong with it
    for name, held in content.items():
        if isinstance(held, list) and held and isinstance(held[0], dict) and "role" not in held[0]:
            raise OSError(f"no rows from {str(path)!r}: the file is one object, and its rows are the list in {name!r}; "
                          "expected is the list itself, or a .jsonl file with one object a line")
    if content and all(isinstance(held, dict) or (isinstance(held, list) and not isinstance([*held, 0][0], dict))
                       for held in content.values()):  # columns, or rows by name
        raise OSError(f"no rows from {str(path)!r}: the file is one object of {listed([*content])}; expected is a list "
                      "of rows, as pandas writes with to_json(path, orient='records')")


def check_encoding(path: Path) -> None:
    """Raise OSError unless a text file is UTF-8. It is read in chunks, since a line may be as long as the file."""
    decoder, place = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while True:
            chunk = file.read(CHUNK)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                held = "utf-16" if not place and chunk[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "latin1"
                raise OSError(f"no rows from {str(path)!r}: it is not UTF-8 (near byte {place + error.start:,}); save "
                              f"it as UTF-8, for example: iconv -f {held} -t utf-8 {path.name}") from error
            if not chunk:
                return
            place += len(chunk)


def broken_line(path: Path, most: int | None = None) -> str:
    """Return a message about the first line that is not a JSON object, or "". `most` limits the lines that are read."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in islice(enumerate(file, 1), most):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"line {number} is not a JSON object: {line.strip():.60}"
            except RecursionError:
                return f"line {number} is nested too deeply"
            except ValueError as error:
                return f"line {number} is not JSON: {error}"
    return ""


def columns_of(path: Path) -> list[str]:
    """Return the columns of a .csv or .jsonl file, from its first lines; an empty list for other files."""
    kind = path.suffix.lower()
    if kind not in (".jsonl", ".csv"):
        return []
    with path.open(encoding="utf-8-sig") as file:
        if kind == ".csv":
            return next(csv.reader(file), [])
        rows = [json.loads(line) for line in islice(file, LOOKED) if line.strip()]
    return list(dict.fromkeys(name for row in rows for name in row))


def check_columns(source: str, columns: Sequence[str], wanted: Collection[str]) -> None:
    """Raise ValueError if a wanted column is not in `columns`. If `columns` is empty (unknown), check nothing."""
    missing = sorted({*wanted} - {*columns})
    if columns and missing:
        raise ValueError(f"{source} has no column {' and '.join(missing)}; it has {listed(columns)}. Rename one, or "
                         f"let `lowmem-grpo new NAME --data {quote(source)}` write a recipe for these")


def check_prompt_column(source: str, columns: Sequence[str], wanted: str) -> None:
    """Raise ValueError if `wanted`, the prompt column, is not in `columns`. If `columns` is empty, check nothing."""
    if columns and wanted not in columns:
        raise ValueError(f"{source} has no column {wanted!r}; it has {listed(columns)}. Name the one with the prompts: "
                         "--prompt-column NAME")


def listed(names: Sequence[str]) -> str:
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def read_dataset(source: str, split: str = "test", prompt_column: str = "prompt") -> Any:
    """Return the rows of `read_rows` with `prompt_column` renamed to `prompt`. ValueError if the column is missing."""
    rows = read_rows(source, split)
    check_prompt_column(source, rows.column_names, prompt_column)
    return rows if prompt_column == "prompt" else rows.rename_column(prompt_column, "prompt")


def read_rows(source: str, split: str = "train", streaming: bool = False) -> Any:
    """Return all rows of a jsonl, json, csv or parquet file, or of a split of a hub dataset ("OWNER/NAME:CONFIG"
    selects a configuration). OSError if no rows can be read, ValueError if the hub lacks the dataset."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    path = Path(source)
    if is_file_name(source):
        refuse_unreadable(path)
        wanted: dict[str, Any] = {"path": KINDS[path.suffix.lower()], "data_files": str(path), "split": "train"}
    else:
        from lowmem_grpo.models.hub import find_dataset

        name, _, part = source.partition(":")
        find_dataset(name)
        wanted = {"path": name, "name": part or None, "split": split, "streaming": streaming}
    try:
        with quiet_datasets():
            rows = load_dataset(**wanted)
    except (OSError, ValueError, DatasetsError, StopIteration) as error:  # StopIteration for a file without rows
        raise OSError(f"no rows from {source!r}: {reason(path, error)}") from error
    if any(name.startswith("__index_level_") for name in rows.column_names or []) and path.suffix.lower() == ".csv":
        raise OSError(f"no rows from {source!r}: its lines have more fields than its first line names; put texts that "
                      "hold commas into double quotes")
    return {"json": as_written, "csv": with_words}.get(wanted["path"], lambda _, rows: rows)(path, rows)


def as_written(path: Path, rows: Any) -> Any:
    """Return the rows of a JSON file with two errors of `datasets` undone. Texts that it read as dates are texts again.
    A column whose large whole numbers it rounded becomes a column of texts."""
    kinds = {name: str(getattr(kind, "dtype", "")) for name, kind in rows.features.items()}
    changed = [name for name, kind in kinds.items() if kind.startswith("timestamp") or (
        kind == "float64" and any(abs(value or 0) >= EXACT for value in rows[name]))]
    text = path.read_text(encoding="utf-8-sig") if changed else "[]"
    held = json.loads(text) if text.lstrip().startswith("[") else [
        json.loads(line) for line in text.split("\n") if line.strip()]
    names = rows.column_names
    for name in changed:
        values = [row.get(name) for row in held]
        if any(isinstance(value, str) or (isinstance(value, int) and abs(value) >= EXACT) for value in values):
            texts = [None if value is None else str(value) for value in values]
            rows = rows.remove_columns(name).add_column(name, texts)
    return rows.select_columns(names) if changed else rows


def with_words(path: Path, rows: Any) -> Any:
    """Return the rows of a .csv file with two errors of `datasets` undone. A word that it read as an empty cell, such
    as None, is a word again. A column whose numbers lost digits, such as 007, becomes a column of texts."""
    from pandas import read_csv

    names = rows.column_names
    kinds = {name: kind.dtype for name, kind in rows.features.items()
             if kind.dtype in DIGITS or (kind.dtype.endswith("string") and rows.data.column(name).null_count)}
    for name, kind in kinds.items():
        empty: dict[str, Any] = {} if kind in DIGITS else {"keep_default_na": False, "na_values": EMPTY}
        texts = read_csv(path, dtype=str, usecols=[names.index(name)], **empty).iloc[:, 0].astype(object)
        if kind not in DIGITS or texts.str.match(DIGITS[kind], na=False).any():
            rows = rows.remove_columns(name).add_column(name, texts.where(texts.notna(), None).tolist())
    return rows.select_columns(names) if kinds else rows


def first_rows(source: str, split: str, count: int) -> list[dict[str, Any]]:
    """Return the first `count` rows of a source; no others are loaded from the hub. Raises as `read_rows` does."""
    from datasets.exceptions import DatasetsError

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
    """Return one line on why the library could not read a source, such as the first broken line of a .jsonl file."""
    if path.suffix.lower() == ".jsonl" and path.is_file() and (line := broken_line(path)):
        return line
    said = str(error.__cause__ or error).splitlines() or ["it is empty"]
    return "it has no rows" if "corresponds to no data" in said[0] else said[0]


def cell_text(value: Any) -> str | None:
    """Return a cell as text, None if it is empty. 5.0 becomes "5": a column with empty cells holds 5 as 5.0."""
    if value is None or value != value:  # NaN is an empty cell
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT:
        value = int(value)
    written = isinstance(value, bool | dict | list)
    return (json.dumps(value, ensure_ascii=False, default=str) if written else str(value)).strip() or None


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Silence the progress bars and log lines of `datasets` inside the block; its errors are still raised."""
    from datasets import disable_progress_bars, enable_progress_bars, is_progress_bar_enabled

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
