"""The kinds of data files; needs no library, so that a missing file is refused at once."""

from pathlib import Path

KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def refuse_missing(path: Path) -> None:
    """OSError unless this is a file of a known kind."""
    if path.suffix.lower() not in KINDS or not path.is_file():
        raise OSError(f"no file {str(path)!r} that can be read; allowed are {', '.join(KINDS)}, and names on the hub")


def is_file_name(source: str) -> bool:
    """Return whether the source is a file, and not a dataset on the hub."""
    return Path(source).suffix.lower() in KINDS or Path(source).exists()
