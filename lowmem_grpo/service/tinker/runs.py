"""`Runs`: how a user's models end, by their user's word or to make room; `Gaps`: requests of theirs that never came."""

import threading
import time

from lowmem_grpo.service.database import Database
from lowmem_grpo.service.tinker.ledger import Ledger, PromiseReply, StoredModel, UnknownError

TABLE = "CREATE TABLE IF NOT EXISTS tinker_gone (id TEXT PRIMARY KEY, owner TEXT NOT NULL)"
UNLOAD = "unload_model"
GONE = 3600.0  # seconds without a sign of a client, after which its models may make room for others
GAP = 60.0  # seconds in which a request may come after later ones
SOON = 2.0  # the same where its user was refused a body that could not be read: it was that request, most likely


class Runs:
    """Any thread may use it."""

    def __init__(self, database: Database, ledger: Ledger) -> None:
        database.add([TABLE])
        self.database, self.ledger = database, ledger
        self.began, self.beats = time.time(), dict[str, float]()  # by session: its last sign of life

    def beat(self, session: str) -> None:
        self.beats[session] = time.time()

    def touch(self, model: str) -> None:
        self.database.change("INSERT OR REPLACE INTO tinker_times VALUES (?, ?)", (model, time.time()), waits=False)

    def left(self, owner: str) -> list[StoredModel]:
        """This user's models whose client ended its session, or gave no sign for an hour; the oldest first."""
        ended = {row["id"] for row in self.database.rows("SELECT id FROM tinker_sessions WHERE finished IS NOT NULL")}
        now, left = time.time(), []
        for model in self.ledger.models(owner):
            session = model.id.partition(":")[0]
            seen = max(self.beats.get(session, self.began), model.asked)
            if session in ended or now - seen > GONE:
                left.append(model)
        return left

    def remove(self, model: StoredModel) -> None:
        """Forget a model, with what was asked of it and its snapshots. What was saved of it under a name stays."""
        between = (f"{model.id}:sample:", f"{model.id}:sample;")  # the ids of its snapshots
        with self.database.write() as connection:
            connection.execute("INSERT OR IGNORE INTO tinker_gone VALUES (?, ?)", (model.id, model.owner))
            connection.execute("DELETE FROM tinker_samplers WHERE id >= ? AND id < ?", between)
            for table, column in (("tinker_promises", "model"), ("tinker_times", "model"), ("tinker_models", "id")):
                connection.execute(f"DELETE FROM {table} WHERE {column} = ?", (model.id,))

    def gone(self, model: str, owner: str) -> PromiseReply:
        """The answer to whom asked for a model to be unloaded. UnknownError where it was none of theirs."""
        row = self.database.row("SELECT owner FROM tinker_gone WHERE id = ?", (model,))
        if row is None or row["owner"] != owner:
            raise UnknownError(f"model_id is {model!r}; there is no such model of yours")
        return PromiseReply.from_json({"type": UNLOAD, "model_id": model})

    def older_snapshots(self, model: str, kept: int) -> list[str]:
        """Forget the snapshots of a model but so many newest ones; their folders."""
        rows = self.database.rows(
            "SELECT id, snapshot FROM tinker_samplers WHERE id >= ? AND id < ? ORDER BY rowid DESC",
            (f"{model}:sample:", f"{model}:sample;"))[kept:]
        if rows:
            with self.database.write() as connection:
                connection.executemany("DELETE FROM tinker_samplers WHERE id = ?", [(row["id"],) for row in rows])
        return [row["snapshot"] for row in rows]


class Gaps:
    """Numbers of requests that never came, while later ones wait for them. Any thread may use it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.since: dict[str, tuple[int, float]] = {}  # by model: the request that is missing, and since when it is
        self.refused: dict[str, float] = {}  # by user: when a request was refused that is not known to be whose

    def refuse(self, owner: str) -> None:
        """A body of this user could not be read, so that its model and number are not known."""
        self.refused[owner] = time.monotonic()

    def is_over(self, model: str, owner: str, missing: int | None) -> bool:
        """Return whether a missing request had its time to come; None is missing where all that should be there is."""
        now = time.monotonic()
        with self.lock:
            if missing is None:
                self.since.pop(model, None)
                return False
            seq, since = self.since.get(model, (missing, now))
            self.since[model] = (missing, now) if seq != missing else (seq, since)
            recent = self.refused.get(owner, -GAP) > since - GAP
            if seq != missing or now - since < (min(SOON, GAP) if recent else GAP):
                return False
            del self.since[model]
            return True
