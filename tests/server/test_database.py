"""The server's database: a whole transaction or nothing, in a file that only its owner reads."""

import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lowmem_grpo.server.server_dir import Database

TABLE = "CREATE TABLE IF NOT EXISTS things (name TEXT PRIMARY KEY, size INTEGER NOT NULL)"


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "state" / "server.sqlite", [TABLE])


def add(database: Database, name: str, size: int | None) -> None:
    with database.write() as connection:
        connection.execute("INSERT INTO things VALUES (?, ?)", (name, size))


def test_others_cannot_read_it_and_an_error_leaves_nothing_of_a_transaction_behind(database: Database) -> None:
    assert database.path.stat().st_mode & 0o077 == 0
    with pytest.raises(sqlite3.IntegrityError), database.write() as connection:
        connection.execute("INSERT INTO things VALUES ('a', 1)")
        connection.execute("INSERT INTO things VALUES ('b', NULL)")
    assert database.rows("SELECT * FROM things") == []
    add(database, "c", 2)
    assert database.row("SELECT name FROM things") == {"name": "c"}


def test_a_killed_process_keeps_what_it_committed(tmp_path: Path) -> None:
    path = tmp_path / "server.sqlite"
    killed = subprocess.run([sys.executable, "-c", f"""
import os, signal
from pathlib import Path
from lowmem_grpo.server.server_dir import Database
database = Database(Path({str(path)!r}), [{TABLE!r}])
with database.write() as connection:
    connection.execute("INSERT INTO things VALUES ('kept', 1)")
database.connection.execute("BEGIN IMMEDIATE")
database.connection.execute("INSERT INTO things VALUES ('lost', 1)")
os.kill(os.getpid(), signal.SIGKILL)
"""], check=False)
    assert killed.returncode == -9
    assert Database(path, [TABLE]).rows("SELECT name FROM things") == [{"name": "kept"}]


def test_threads_do_not_mix_their_transactions(database: Database) -> None:
    def many(prefix: str) -> None:
        for number in range(50):
            add(database, f"{prefix}{number}", number)

    threads = [threading.Thread(target=many, args=(prefix,)) for prefix in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert database.row("SELECT count(*) AS n FROM things") == {"n": 200}


def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "server.sqlite"
    path.write_bytes(b"not a database, but somebody's notes" * 100)
    with pytest.raises(OSError, match="cannot be used as the server's database"):
        Database(path)
    assert path.read_bytes().startswith(b"not a database")


def test_a_full_disk_is_said_and_nothing_is_lost(database: Database) -> None:
    add(database, "a", 1)
    database.connection.execute("PRAGMA max_page_count=1")
    with pytest.raises(OSError, match="was not written"):
        add(database, "b" * 100_000, 1)
    assert database.rows("SELECT name FROM things") == [{"name": "a"}]


def test_a_transaction_that_does_not_wait_outlives_a_kill_and_the_next_one_waits_again(database: Database) -> None:
    for waits, level in ((False, 1), (True, 2)):
        with database.write(waits) as connection:
            connection.execute("INSERT INTO things VALUES (?, 1)", (str(waits),))
        assert database.row("PRAGMA synchronous") == {"synchronous": level}
        assert {"name": str(waits)} in Database(database.path).rows("SELECT name FROM things")
