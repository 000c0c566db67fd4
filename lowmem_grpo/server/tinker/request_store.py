"""`RequestStore`: clients' requests to their models and the answers, in the server's database.

A request is stored before its promise is returned, and an answer, with the model's state after an optimizer step,
before it is sent: a kill of the server loses neither. A power failure may lose requests that were not answered yet."""

import contextlib
import json
import re
import secrets
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lowmem_grpo.server.requests import json_of
from lowmem_grpo.server.server_dir import Database, Row
from lowmem_grpo.server.tinker import wire
from lowmem_grpo.server.tinker.adapters import LoraSettings

TABLES = [
    "CREATE TABLE IF NOT EXISTS tinker_sessions (id TEXT PRIMARY KEY, owner TEXT NOT NULL, finished TEXT)",
    """CREATE TABLE IF NOT EXISTS tinker_models (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, settings TEXT NOT NULL, state TEXT, stepped INTEGER NOT NULL,
    done INTEGER NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS tinker_promises (
    model TEXT NOT NULL REFERENCES tinker_models (id), seq INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB,
    answer BLOB, media TEXT, PRIMARY KEY (model, seq))""",
    "CREATE TABLE IF NOT EXISTS tinker_times (model TEXT PRIMARY KEY, asked REAL NOT NULL)",
    "CREATE TABLE IF NOT EXISTS tinker_samplers (id TEXT PRIMARY KEY, owner TEXT NOT NULL, snapshot TEXT)",
    """CREATE TABLE IF NOT EXISTS tinker_starts (
    model TEXT NOT NULL, seq INTEGER NOT NULL, ends INTEGER NOT NULL, server TEXT NOT NULL,
    PRIMARY KEY (model, seq))""",
    """CREATE INDEX IF NOT EXISTS tinker_open ON tinker_promises (model, answer IS NULL, LENGTH(body))
    WHERE answer IS NULL OR body IS NOT NULL""",
]
MODELS = ("SELECT tinker_models.*, COALESCE((SELECT asked FROM tinker_times WHERE model = id), 0.0) AS asked "
          "FROM tinker_models")
KEPT = 4096  # the newest answers kept for each model; clients fetch them within seconds
MOST_TOLD = 2000  # characters of why a request failed
AHEAD = 4096  # the most requests of a model that may wait
JSON = "application/json"
PASS = "forward_backward"  # the kind of a request that may add gradients
MISSING = "missing"  # the kind of a request that never came
REFUSED = "refused"  # the kind of a request that exceeded a limit; its body says which
Effect = Literal["", "added", "changed"]  # a request added gradients, or changed the model's state
NUMBER = re.compile("0|[1-9][0-9]{0,9}")  # the seq in a promise's id


class UnknownError(LookupError):
    """A session, model, promise or saved weight does not exist, or is another user's."""


class FinishedError(LookupError):
    """A session has ended."""


@dataclass(frozen=True)
class ModelRequest:
    """A request to a model. A model's requests run in the order of `seq`, without a gap; 0 creates the model."""

    model: str
    seq: int
    kind: str
    body: bytes
    owner: str = ""  # the user of the next request

    @property
    def id(self) -> str:
        """The id of the request's promise; a repeated request has the same id."""
        return f"{self.model}:{self.seq}"

    def agrees_with(self, later: "ModelRequest") -> bool:
        """Return whether a later request with the same number repeats this one, as far as its body is still stored."""
        if self.kind in (MISSING, REFUSED):
            return True
        if self.kind != later.kind or not self.body or self.body == later.body:
            return self.kind == later.kind
        if self.kind == PASS:  # a message can be serialized in several ways
            first, second = (wire.parsed(wire.ForwardBackwardRequest, body) for body in (self.body, later.body))
            return bool(first == second)
        return json_of(self.body) == json_of(later.body)


@dataclass(frozen=True)
class ModelReply:
    """The answer that fulfils a promise."""

    body: bytes
    media: str = JSON
    effect: Effect = ""
    also: Callable[[sqlite3.Connection], None] | None = None  # writes more in the same transaction

    @classmethod
    def from_json(cls, value: dict[str, Any], effect: Effect = "") -> "ModelReply":
        return cls(json.dumps(value).encode(), JSON, effect)

    @classmethod
    def failed(cls, message: str, category: str = "user", effect: Effect = "") -> "ModelReply":
        """Return the reply to a failed request; `category` says whose fault it is: "user" or "server". A long message
        is cut: it repeats what was sent, and answers are stored."""
        cut = message if len(message) <= MOST_TOLD else f"{message[:MOST_TOLD]}..."
        return cls.from_json({"error": cut, "category": category}, effect)


@dataclass(frozen=True)
class StoredModel:
    """A model's row in the database."""

    id: str
    owner: str
    settings: LoraSettings
    state: str | None  # the file of its state; None before the first step
    stepped: int  # the seq of the last optimizer step
    done: int  # the seq of the last answered request
    asked: float  # the time of the last request, in seconds since 1970; 0 if there was none


class RequestStore:
    """Stores sessions, models, requests and answers. Thread-safe; a change survives a kill once its method returns."""

    def __init__(self, database: Database) -> None:
        self.database, self.server = database, secrets.token_hex(8)
        database.add(TABLES)

    def open_of(self, owner: str) -> tuple[int, int, bool]:
        """Return the number of a user's unanswered requests, the bytes of the user's stored bodies, and whether one of
        the unanswered requests is the next of its model."""
        totals = self.database.rows(
            "SELECT TOTAL(answer IS NULL) AS requests, TOTAL(LENGTH(body)) AS bodies, "
            "TOTAL(answer IS NULL AND seq = done + 1) AS next FROM tinker_models JOIN tinker_promises ON model = id "
            "WHERE owner = ? AND (answer IS NULL OR body IS NOT NULL)", (owner,))[0]
        return int(totals["requests"]), int(totals["bodies"]), totals["next"] > 0

    def answers_of(self, owner: str) -> int:
        """Return the bytes of the answers that are kept for a user's models."""
        return int(self.database.rows("SELECT TOTAL(LENGTH(answer)) AS bytes FROM tinker_models JOIN tinker_promises "
                                      "ON model = id WHERE owner = ?", (owner,))[0]["bytes"])

    def asked(self, model: str, seq: int) -> ModelRequest | None:
        """Return the stored request of this number, or None; its body is empty if it was deleted."""
        row = self.database.row("SELECT kind, body FROM tinker_promises WHERE model = ? AND seq = ?", (model, seq))
        return None if row is None else ModelRequest(model, seq, row["kind"], row["body"] or b"")

    def open_session(self, session: str, owner: str) -> None:
        self.database.change("INSERT INTO tinker_sessions (id, owner) VALUES (?, ?)", (session, owner))

    def check_session(self, session: Any, owner: str) -> None:
        """Raise UnknownError if this user has no such session, FinishedError if its client has ended it."""
        row = self.database.row("SELECT owner, finished FROM tinker_sessions WHERE id = ?", (str(session),))
        if row is None or row["owner"] != owner:
            raise UnknownError(f"session_id is {session!r}; there is no such session of yours: make a ServiceClient")
        if row["finished"] is not None:
            raise FinishedError(f"session_id is {session!r}; its client ended it ({row['finished']}): make a new "
                                "ServiceClient")

    def finish_session(self, session: str, owner: str, reason: str) -> None:
        """Mark a session as ended, with the client's reason, once. Its models and weights stay."""
        with contextlib.suppress(FinishedError):
            self.check_session(session, owner)
        self.database.change("UPDATE tinker_sessions SET finished = ? WHERE id = ? AND finished IS NULL",
                             (reason, session))

    def add_model(self, model: str, owner: str, settings: LoraSettings, kind: str, body: bytes | None) -> None:
        """Add a model with its first request. A model that exists stays as it is."""
        with self.database.write() as connection:
            connection.execute("INSERT OR IGNORE INTO tinker_models VALUES (?, ?, ?, NULL, 0, -1)",
                               (model, owner, settings.model_dump_json()))
            connection.execute("INSERT OR IGNORE INTO tinker_promises (model, seq, kind, body) VALUES (?, 0, ?, ?)",
                               (model, kind, body))

    def model(self, model: Any, owner: str | None = None) -> StoredModel:
        """Return a model. UnknownError if there is none, or if it is not `owner`'s (None: any user's)."""
        row = self.database.row(f"{MODELS} WHERE id = ?", (str(model),))
        if row is None or (owner is not None and row["owner"] != owner):
            raise UnknownError(f"model_id is {model!r}; there is no such model of yours")
        return StoredModel(**with_settings(row))

    def models(self, owner: str | None = None) -> list[StoredModel]:
        """Return all models, or those of a user, the oldest first."""
        rows = self.database.rows(f"{MODELS} WHERE owner = ? OR ? IS NULL ORDER BY rowid", (owner, owner))
        return [StoredModel(**with_settings(row)) for row in rows]

    def ask(self, asked: ModelRequest) -> ModelRequest | None:
        """Store a request, or return the one stored with its number. ValueError for a number too high or too old."""
        done = self.model(asked.model).done
        if not done - KEPT < asked.seq <= done + AHEAD:
            raise ValueError(f"seq_id is {asked.seq}; the last one that was answered is {done}, and at most {AHEAD} "
                             "requests wait")
        made = self.database.change(
            "INSERT OR IGNORE INTO tinker_promises (model, seq, kind, body) VALUES (?, ?, ?, ?)",
            (asked.model, asked.seq, asked.kind, asked.body), waits=False)
        return None if made else self.asked(asked.model, asked.seq)

    def gap(self, model: str) -> int | None:
        """Return the number of the next request if it is missing although later requests have come; else None."""
        row = self.database.row(
            "SELECT done + 1 AS seq FROM tinker_models WHERE id = ? AND EXISTS (SELECT 1 FROM tinker_promises WHERE "
            "model = id AND seq > done + 1) AND NOT EXISTS (SELECT 1 FROM tinker_promises WHERE model = id AND "
            "seq = done + 1)", (model,))
        return None if row is None else int(row["seq"])

    def step_over(self, model: str, seq: int, answer: ModelReply) -> None:
        """Answer a request that never came, unless it has come in the meantime."""
        with self.database.write() as connection:
            made = connection.execute(
                "INSERT OR IGNORE INTO tinker_promises (model, seq, kind, answer, media) VALUES (?, ?, ?, ?, ?)",
                (model, seq, MISSING, answer.body, answer.media))
            if made.rowcount:
                connection.execute("UPDATE tinker_models SET done = ? WHERE id = ? AND done = ?", (seq, model, seq - 1))

    def next(self, model: str) -> ModelRequest | None:
        """Return the next request to run; None if it has not come."""
        row = self.database.row(
            "SELECT model, seq, kind, COALESCE(body, X'') AS body, owner FROM tinker_promises JOIN tinker_models "
            "ON model = id WHERE model = ? AND seq = done + 1", (model,))
        return None if row is None else ModelRequest(**row)

    def count_start(self, asked: ModelRequest) -> int:
        """Record that a request is about to run, and return how many earlier servers ended while they ran it."""
        key = (asked.model, asked.seq)
        self.database.change(
            "INSERT INTO tinker_starts VALUES (?, ?, 0, ?) ON CONFLICT (model, seq) DO UPDATE SET "
            "ends = ends + (server != excluded.server), server = excluded.server", (*key, self.server), waits=False)
        return int(self.database.rows("SELECT ends FROM tinker_starts WHERE model = ? AND seq = ?", key)[0]["ends"])

    def since_step(self, model: StoredModel) -> list[ModelRequest]:
        """Return the successful requests since the last optimizer step, in order, to recompute their gradients."""
        rows = self.database.rows(
            "SELECT model, seq, kind, body FROM tinker_promises WHERE model = ? AND seq > ? AND seq <= ? "
            "AND body IS NOT NULL AND media != ? ORDER BY seq", (model.id, model.stepped, model.done, JSON))
        return [ModelRequest(**row) for row in rows]

    def keep(self, asked: ModelRequest, answer: ModelReply, state: str | None = None) -> None:
        """Store a request's answer, and the name of a new state file. Keep the request's body if it added gradients."""
        with self.database.write() as connection:
            if answer.also is not None:
                answer.also(connection)
            connection.execute(
                "UPDATE tinker_promises SET answer = ?, media = ?, body = CASE WHEN ? THEN body END "
                "WHERE model = ? AND seq = ?",
                (answer.body, answer.media, answer.effect == "added", asked.model, asked.seq))
            connection.execute("UPDATE tinker_models SET done = ? WHERE id = ?", (asked.seq, asked.model))
            connection.execute("DELETE FROM tinker_starts WHERE model = ?", (asked.model,))
            if state is not None:
                connection.execute("UPDATE tinker_models SET state = ?, stepped = ? WHERE id = ?",
                                   (state, asked.seq, asked.model))
                connection.execute("UPDATE tinker_promises SET body = NULL WHERE model = ? AND seq <= ?",
                                   (asked.model, asked.seq))
            connection.execute("DELETE FROM tinker_promises WHERE model = ? AND seq <= ? AND body IS NULL",
                               (asked.model, asked.seq - KEPT))

    def add_sampler(self, sampler: str, owner: str, snapshot: str | None) -> None:
        """Record a sampler's source: a snapshot's folder, or None for the base model. ValueError if there is such a
        sampler with another source, from which completions may be being sampled."""
        self.database.change("INSERT OR IGNORE INTO tinker_samplers VALUES (?, ?, ?)", (sampler, owner, snapshot))
        if self.snapshot_of(sampler, owner) != snapshot:
            raise ValueError(f"sampling_session_seq_id is {sampler.rpartition(':')[2]}, and {sampler} is a sampling "
                             "session of other weights already; take a number that was not used before")

    def snapshots(self, owner: str) -> list[str]:
        """Return the snapshot folders that this user's samplers use."""
        rows = self.database.rows("SELECT DISTINCT snapshot FROM tinker_samplers WHERE owner = ? AND snapshot IS NOT "
                                   "NULL", (owner,))
        return [row["snapshot"] for row in rows]

    def snapshot_of(self, sampler: Any, owner: str) -> str | None:
        """Return the snapshot folder that a sampler uses (None: the base model). UnknownError for others' samplers."""
        row = self.database.row("SELECT * FROM tinker_samplers WHERE id = ?", (str(sampler),))
        if row is None or row["owner"] != owner:
            raise UnknownError(f"sampling_session_id is {sampler!r}; there is no such sampling session of yours: "
                               "of a model's snapshots without a name the newest are kept; save_weights_for_sampler "
                               "with a name keeps one")
        return None if row["snapshot"] is None else str(row["snapshot"])

    def answer(self, promise: str, owner: str) -> ModelReply | None:
        """Return the answer that fulfils a promise; None if there is none yet. UnknownError for others' promises."""
        model, _, seq = promise.rpartition(":")
        number = int(seq) if NUMBER.fullmatch(seq) else -1
        unknown = UnknownError(f"request_id is {promise!r}; there is no such promise of yours")
        try:
            self.model(model, owner)
        except UnknownError:
            raise unknown from None
        row = self.database.row("SELECT answer, media FROM tinker_promises WHERE model = ? AND seq = ?",
                                (model, number))
        if row is None:
            raise unknown
        return None if row["answer"] is None else ModelReply(row["answer"], row["media"])


def with_settings(row: Row) -> Row:
    return row | {"settings": LoraSettings.model_validate_json(row["settings"])}
