"""A SQLite database of mails with full-text search (FTS5): written once, and then only read."""

import atexit
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

from lowmem_grpo.recipes.tasks.mailbox import Mail, mailbox

SCHEMA = """
CREATE TABLE mails (id INTEGER PRIMARY KEY, sender TEXT, recipient TEXT, date TEXT, subject TEXT, body TEXT);
CREATE VIRTUAL TABLE mail_words USING fts5 (
    sender, subject, body, content='mails', content_rowid='id', tokenize='porter unicode61'
);
"""
SEARCH = """
SELECT mails.id, mails.sender, mails.date, mails.subject, snippet(mail_words, 2, '', '', '...', ?)
FROM mail_words JOIN mails ON mails.id = mail_words.rowid WHERE mail_words MATCH ? ORDER BY rank, mails.id LIMIT ?
"""
PROBE = "CREATE VIRTUAL TABLE words USING fts5 (word)"
LONGEST = 200  # characters of a search
WORK = 2_000_000  # SQLite instructions allowed per search; in the large mailbox a search takes a few thousand


class SearchError(ValueError):
    """A search that cannot be run. The message says why, for the policy that wrote it."""


@dataclass(frozen=True)
class Hit:
    """A mail that a search found; `snippet` is empty if the search asked for no snippets."""

    id: int
    sender: str
    date: str
    subject: str
    snippet: str


def check_sqlite() -> None:
    """Raise RuntimeError if this Python's SQLite has no full-text search."""
    try:
        with closing(sqlite3.connect(":memory:")) as database:
            database.execute(PROBE)
    except sqlite3.OperationalError as error:
        raise RuntimeError(
            f"the SQLite {sqlite3.sqlite_version} of this Python has no full-text search FTS5 ({error}), which the "
            "recipe inbox needs; use a Python from python.org, uv, conda or your distribution, whose SQLite has it"
        ) from error


def write(mails: Iterable[Mail], path: Path) -> None:
    """Write mails into a new file, with the ids 1, 2, 3, ... Raises FileExistsError if the file exists."""
    check_sqlite()
    if path.exists():
        raise FileExistsError(f"{path} exists already; give another name, or delete it first")
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(SCHEMA)
        database.executemany("INSERT INTO mails VALUES (NULL, ?, ?, ?, ?, ?)", map(astuple, mails))
        database.execute("INSERT INTO mail_words (mail_words) VALUES ('rebuild')")


@cache
def database_of(name: str, seed: int) -> "MailDatabase":
    """Return the database of a generated mailbox, in a file that is deleted when this process exits."""
    folder = Path(tempfile.mkdtemp(prefix="inbox-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / f"{name}-{seed}.db"
    write(mailbox(name, seed).mails, path)
    return MailDatabase(path)


class MailDatabase:
    """A read-only mail database. Each call opens its own connection, so any number of threads may search."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """Open a read-only connection that aborts a query after WORK instructions."""
        with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.set_progress_handler(lambda: 1, WORK)
            yield connection

    def search(self, words: str, most: int, snippet: int = 0) -> list[Hit]:
        """Return the `most` best mails (by BM25) that have all the words, each with `snippet` words of text.
        SearchError if FTS5 cannot read the words."""
        if not words.strip() or len(words) > LONGEST or "\0" in words:
            raise SearchError(f"a search is 1 to {LONGEST} letters long, without a zero byte, and this one has "
                              f"{len(words.strip())} letters")
        try:
            with self.opened() as connection:
                rows = connection.execute(SEARCH, (max(snippet, 1), words, most)).fetchall()
        except (sqlite3.Error, UnicodeError) as error:
            raise SearchError(f"cannot search for {words[:60]!r} ({error}): write words with spaces between them, or "
                              'a "phrase" in quotation marks') from error
        return [Hit(number, sender, date, subject, text.replace("\n", " ") if snippet else "")
                for number, sender, date, subject, text in rows]

    def read(self, number: int) -> Mail | None:
        """Return the mail with this id; None if there is none."""
        with self.opened() as connection:
            try:
                row = connection.execute(
                    "SELECT sender, recipient, date, subject, body FROM mails WHERE id = ?", (number,)).fetchone()
            except OverflowError:  # larger than SQLite's integers
                row = None
        return None if row is None else Mail(*row)
