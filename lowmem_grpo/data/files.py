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
DEEPEST = 64  # nesting of a row; the library reads no more
LONGEST, LARGEST = 64 << 20, 16 << 20  # bytes of a line with one row; of a .json file that is checked before it is read
MOST_COLUMNS, MOST_NAMES = 1000, 5000  # of a table, and of all objects in it: the library takes seconds for more
WIDE = "it has {:,} columns; at most {:,} are read: leave out what is not needed, or write it as JSON in one text"
MALFORMED = (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, MemoryError,
             StopIteration)  # raised by libraries for files that are not what they say; the last without rows
ONE_ROW = "{} has one row, and a recipe needs two or more, to train on and to test with; add rows"
EXACT = 1 << 53  # whole numbers from here on are rounded in floats
DIGITS = {"int64": r"\s*[-+]?0[0-9]", "float64": r"\s*[-+]?(?:0[0-9]|[0-9]{16})"}  # a number of this dtype loses some
EMPTY = ["", "NaN", "nan", "NULL", "null", "<NA>"]  # empty cells in columns of texts, where None and NA are words
NO_WORDS: dict[type[BaseException], str] = {
    StopIteration: "it is empty", MemoryError: "its rows do not fit into memory; give a part of them"}
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
            broken_line(path, LOOKED) if kind == ".jsonl" else json_fault(path, LOOKED) if kind == ".json" else
            wide_line(path))
    if why:
        raise OSError(f"no rows from {str(path)!r}: {why}")
    if kind == ".json":
        check_rows(path)


def json_fault(path: Path, most: int | None = None) -> str:
    """Return why a .json file is neither a list of rows nor JSON lines; "" if it is, or if that is not seen here, as
    of a large one. `most` limits the rows that are looked at."""
    names: set[tuple[str, ...]] = set()
    try:
        held = json.loads(path.read_text("utf-8-sig")) if path.stat().st_size < LARGEST else None
        rows = islice(enumerate(held, 1), most) if isinstance(held, list) else ()
        return next((f"row {number} of its list {why}" for number, row in rows if (why := row_fault(row, names))), "")
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        return broken_line(path, most) and f"it is not JSON: {error}"


def row_fault(row: Any, names: set[tuple[str, ...]]) -> str:
    """Return what is wrong with a row after those whose columns, and names within them, are `names`; "" for a good
    one. The message is meant to follow "line N" or the like."""
    if not isinstance(row, dict):
        return f"is not a JSON object: {json.dumps(row, ensure_ascii=False):.60}"
    try:
        names.update(named_in(row))
    except ValueError as error:
        return f"cannot be read: {error}"
    columns = sum(len(name) == 1 for name in names) if len(names) > MOST_COLUMNS else 0
    if columns > MOST_COLUMNS:
        return f"brings the file to more than {MOST_COLUMNS:,} columns; write what varies as JSON in one text"
    return "" if len(names) <= MOST_NAMES else (
        f"brings the objects in its columns to more than {MOST_NAMES:,} names; write what varies as JSON in a text")


def named_in(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the place of each name in nested objects and lists of them. ValueError for more than DEEPEST levels."""
    if len(place) >= DEEPEST:
        raise ValueError(f"{'.'.join(filter(None, place[:4])):.80} is nested more than {DEEPEST} levels deep")
    for name, inner in value.items() if isinstance(value, dict) else (("", item) for item in value):
        if name or isinstance(value, dict):
            yield (*place, name)
        if isinstance(inner, dict | list):
            yield from named_in(inner, (*place, name))


def wide_line(path: Path) -> str:
    """Return a message on the first lines of a .csv file if they have too many columns; else ""."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            widest = max(map(len, islice(csv.reader(file), 3)), default=0)
        except csv.Error:  # such as a cell that is too long for this reader, and not for the library
            return ""
    return WIDE.format(widest, MOST_COLUMNS) if widest > MOST_COLUMNS else ""


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
    """Raise OSError unless a text file is UTF-8, without a hole, as of a broken copy, or a line longer than any row. It
    is read in chunks, since a line may be as long as the file."""
    decoder, place, length = codecs.getincrementaldecoder("utf-8")(), 0, 0
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
            length = length + len(chunk) if b"\n" not in chunk else len(chunk) - chunk.rfind(b"\n")
            if not chunk.strip(b"\0"):
                raise OSError(f"no rows from {str(path)!r}: it has only zeros before byte {place:,}; copy it again")
            if length > LONGEST and path.suffix.lower() != ".json":  # a list of rows may be one line
                raise OSError(f"no rows from {str(path)!r}: it has a line of more than {LONGEST >> 20} MiB before byte "
                              f"{place:,}; a line has one row")


def broken_line(path: Path, most: int | None = None) -> str:
    """Return a message about the first line that is not a JSON object, or "". `most` limits the lines that are read."""
    names: set[tuple[str, ...]] = set()
    with path.open(encoding="utf-8-sig") as file:
        for number, line in islice(enumerate(file, 1), most):
            try:
                if line.strip() and (why := row_fault(json.loads(line), names)):
                    return f"line {number} {why}"
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
            try:
                return next(csv.reader(file), [])
            except csv.Error:  # such as a name that is too long for this reader
                return []
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

    path = Path(source)
    if is_file_name(source):
        refuse_unreadable(path)
        wanted: dict[str, Any] = {"path": KINDS[path.suffix.lower()], "data_files": str(path), "split": "train"}
    else:
        from lowmem_grpo.models.hub import find_dataset

        name, _, part = source.partition(":")
        find_dataset(name)
        wanted = {"path": name, "name": part or None, "split": split, "streaming": streaming}
    with told(source):
        check_width(path)
        rows = load_dataset(**wanted)
    if any(name.startswith("__index_level_") for name in rows.column_names or []) and path.suffix.lower() == ".csv":
        raise OSError(f"no rows from {source!r}: its lines have more fields than its first line names; put texts that "
                      "hold commas into double quotes")
    with told(source):
        return {"json": as_written, "csv": with_words}.get(wanted["path"], lambda _, rows: rows)(path, rows)


def check_width(path: Path) -> None:
    """Raise ValueError for a parquet file with too many columns; only its end is read."""
    if path.suffix.lower() == ".parquet" and path.is_file():
        from pyarrow.parquet import read_metadata

        if (width := read_metadata(path).num_columns) > MOST_NAMES:
            raise ValueError(WIDE.format(width, MOST_NAMES))


@contextmanager
def told(source: str) -> Iterator[None]:
    """Turn what libraries raise in the block for a source into OSError, with a line on the cause. They are quiet."""
    from datasets.exceptions import DatasetsError
    from pyarrow import ArrowException

    try:
        with quiet_datasets():
            yield
    except (*MALFORMED, DatasetsError, ArrowException) as error:
        raise OSError(f"no rows from {source!r}: {reason(Path(source), error)}") from error


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
    rows = read_rows(source, split, streaming=not is_file_name(source))
    with told(source):
        if is_file_name(source):
            return [dict(rows[index]) for index in range(min(count, len(rows)))]
        first = [dict(row) for row in rows.take(count)]
    if not first:
        raise OSError(f"no rows from {source!r}: the split {split!r} is empty")
    return first


def reason(path: Path, error: BaseException) -> str:
    """Return one line on why the library could not read a source, such as the first broken line of a .jsonl file."""
    faults = {".jsonl": broken_line, ".json": json_fault}
    if path.is_file() and (why := faults.get(path.suffix.lower(), lambda _: "")(path)):
        return why
    said = str(error.__cause__ or error).splitlines() or [NO_WORDS.get(type(error), type(error).__name__)]
    if isinstance(error, TypeError | AttributeError | LookupError | RuntimeError):  # from within the library
        return f"it, or its metadata, is not as the library `datasets` writes it ({said[0]:.200}); write it anew"
    return "it has no rows" if "corresponds to no data" in said[0] else f"{said[0]:.300}"


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
