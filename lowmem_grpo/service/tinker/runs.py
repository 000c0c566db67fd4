"""`Runs`: the models of a user as a list, and how they go: by their user's word, or to make room."""

import time
from dataclasses import dataclass

from lowmem_grpo.service.database import Database
from lowmem_grpo.service.tinker.ledger import Answer, Ledger, Model, UnknownError

TABLES = [
    "CREATE TABLE IF NOT EXISTS tinker_times (model TEXT PRIMARY KEY, asked REAL NOT NULL)",
    "CREATE TABLE IF NOT EXISTS tinker_gone (id TEXT PRIMARY KEY, owner TEXT NOT NULL)",
]
UNLOAD = "unload_model"
GONE = 3600.0  # seconds without a sign of a client, after which its models may make room for others


@dataclass(frozen=True)
class Run:
    """A model in a list."""

    model: Model
    asked: float  # when something was asked of it last, in seconds since 1970


class Runs:
    """Any thread may use it."""

    def __init__(self, database: Database, ledger: Ledger) -> None:
        database.add(TABLES)
        self.database, self.ledger = database, ledger
        self.began, self.beats = time.time(), dict[str, float]()  # by session: its last sign of life

    def beat(self, session: str) -> None:
        """A client says that it is there."""
        self.beats[session] = time.time()

    def touch(self, model: str) -> None:
        """Something is asked of a model."""
        with self.database.write(waits=False) as connection:
            connection.execute("INSERT OR REPLACE INTO tinker_times VALUES (?, ?)", (model, time.time()))

    def all(self, owner: str) -> list[Run]:
        """This user's models, the newest first."""
        times = {row["model"]: row["asked"] for row in self.database.rows("SELECT * FROM tinker_times")}
        return [Run(model, times.get(model.id, 0.0)) for model in reversed(self.ledger.models(owner))]

    def one(self, model: str, owner: str) -> Run:
        """UnknownError for one that is not this user's."""
        self.ledger.model(model, owner)
        return next(run for run in self.all(owner) if run.model.id == model)

    def left(self, owner: str) -> list[Model]:
        """This user's models whose client ended its session, or gave no sign for an hour; the oldest first."""
        ended = {row["id"] for row in self.database.rows("SELECT id FROM tinker_sessions WHERE finished IS NOT NULL")}
        now, found = time.time(), []
        for run in reversed(self.all(owner)):
            session = run.model.id.partition(":")[0]
            seen = max(self.beats.get(session, self.began), run.asked)
            if session in ended or now - seen > GONE:
                found.append(run.model)
        return found

    def remove(self, model: Model) -> None:
        """Forget a model, with what was asked of it and its snapshots. What was saved of it under a name stays."""
        between = (f"{model.id}:sample:", f"{model.id}:sample;")  # the ids of its snapshots
        with self.database.write() as connection:
            connection.execute("INSERT OR IGNORE INTO tinker_gone VALUES (?, ?)", (model.id, model.owner))
            connection.execute("DELETE FROM tinker_samplers WHERE id >= ? AND id < ?", between)
            for table, column in (("tinker_promises", "model"), ("tinker_times", "model"), ("tinker_models", "id")):
                connection.execute(f"DELETE FROM {table} WHERE {column} = ?", (model.id,))

    def gone(self, model: str, owner: str) -> Answer:
        """The answer to whom asked for a model to be unloaded. UnknownError where it was none of theirs."""
        row = self.database.row("SELECT owner FROM tinker_gone WHERE id = ?", (model,))
        if row is None or row["owner"] != owner:
            raise UnknownError(f"model_id is {model!r}; there is no such model of yours")
        return Answer.of({"type": UNLOAD, "model_id": model})

    def older_snapshots(self, model: str, kept: int) -> list[str]:
        """Forget the snapshots of a model but so many newest ones; their folders."""
        rows = self.database.rows(
            "SELECT id, snapshot FROM tinker_samplers WHERE id >= ? AND id < ? ORDER BY rowid DESC",
            (f"{model}:sample:", f"{model}:sample;"))[kept:]
        if rows:
            with self.database.write() as connection:
                connection.executemany("DELETE FROM tinker_samplers WHERE id = ?", [(row["id"],) for row in rows])
        return [row["snapshot"] for row in rows]
