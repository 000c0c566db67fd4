"""`Usage`: each user's requests, models and storage against the limits of their key; `Runs`: unloading of models."""

import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

from lowmem_grpo.server.server_dir import Database
from lowmem_grpo.server.tinker.checkpoint_store import CheckpointStore, size_of
from lowmem_grpo.server.tinker.request_store import (
    PASS,
    REFUSED,
    ModelReply,
    ModelRequest,
    RequestStore,
    StoredModel,
    UnknownError,
)
from lowmem_grpo.server.users import Allowance, Allowances
from lowmem_grpo.utils import MIB, size_text

SMALL = 16 * 1024  # bytes of a step or a save, accepted even at the limit of bodies, because it may free them
TABLE = "CREATE TABLE IF NOT EXISTS tinker_gone (id TEXT PRIMARY KEY, owner TEXT NOT NULL)"
UNLOAD = "unload_model"
MOST_GONE = 4096  # unloaded models of a user that are known: the newest
ANSWERS = 64 * MIB  # bytes of answers that are kept whatever the limit of storage
GONE = 3600.0  # seconds without a heartbeat or request, after which a client's models may be unloaded
GAP = 60.0  # seconds without a request of a model, after which one that is missing is given up
SOON = 2.0  # the same if the user just sent an unreadable body: most likely it was the missing request


class BusyError(Exception):
    """Too many requests are unanswered; the same request may be accepted later."""


class Usage:
    """Checks each user's requests, models and storage against their allowance. Thread-safe."""

    def __init__(
        self, allowances: Allowances | None, store: RequestStore, checkpoints: CheckpointStore, folder: Path
    ) -> None:
        """`folder` holds the models' states, and the snapshots that samplers name."""
        self.store, self.checkpoints, self.folder = store, checkpoints, folder
        self.allowances = defaultdict(Allowance) if allowances is None else allowances
        self.lock, self.sampling_requests = threading.Lock(), Counter[str]()

    def taken(self, asked: ModelRequest, model: StoredModel) -> ModelRequest:
        """Return the request. If it exceeds a limit of its user, return a request of kind REFUSED in its place, which
        fails when its turn comes. BusyError if the answer to an earlier request will soon make room."""
        (requests, bodies, is_next), may = self.store.open_of(model.owner), self.allowances[model.owner]
        requests += self.sampling_requests[model.owner]
        if requests >= may.requests and asked.seq > model.done + 1:
            told = too_many(requests, may.requests)
        elif bodies + len(asked.body) > may.bodies and (asked.kind == PASS or len(asked.body) > SMALL):
            told = (f"bodies: {size_text(bodies)} of this key's requests are kept, and this one has "
                    f"{size_text(len(asked.body))}; at most {size_text(may.bodies)} are: call optim_step, which frees "
                    "them, or send fewer or shorter sequences for a step")
        elif asked.kind == PASS and (kept := self.store.answers_of(model.owner)) > max(may.storage, ANSWERS):
            told = (f"storage: {size_text(kept)} of answers are kept for this key, and {size_text(may.storage)} is the "
                    "most: unload models that are done")
            is_next = False  # no answer makes room
        else:
            return asked
        if is_next:
            raise BusyError(told)
        return ModelRequest(asked.model, asked.seq, REFUSED, told.encode())

    def begin_sample(self, owner: str) -> None:
        """Count a sample as waiting until `end_sample`. BusyError if the user's limit is reached."""
        may = self.allowances[owner].requests
        with self.lock:
            requests = self.store.open_of(owner)[0] + self.sampling_requests[owner]
            if requests >= may:
                raise BusyError(too_many(requests, may))
            self.sampling_requests[owner] += 1

    def end_sample(self, owner: str) -> None:
        with self.lock:
            self.sampling_requests[owner] -= 1

    def check_model(self, model: str, owner: str) -> None:
        """Raise ValueError if this is a new model and its user has reached the limit of models."""
        have, may = {each.id for each in self.store.models(owner)}, self.allowances[owner].models
        if model not in have and len(have) >= may:
            raise ValueError(f"models: this key has {len(have)}, and may have {may}: unload those that are done "
                             "(list_training_runs names them, and POST unload_model unloads one), or close their "
                             "clients, and they make room by themselves")

    def check_storage(self, owner: str, more: int) -> None:
        """Raise ValueError if `more` bytes on the disk would exceed the user's storage."""
        have, may = self.stored(owner), self.allowances[owner].storage
        if have + more > may:
            raise ValueError(f"storage: this key has {size_text(have)} on the disk, this takes {size_text(more)} more, "
                             f"and {size_text(may)} is the most: delete saved weights (list_user_checkpoints names "
                             "them), or unload models that are done")

    def stored(self, owner: str) -> int:
        models, saved = self.store.models(owner), self.checkpoints.all(owner)
        states = [self.folder / model.state for model in models if model.state is not None]
        snapshots = [self.folder / name for name in self.store.snapshots(owner)]
        files = {*states, *snapshots, *(self.checkpoints.folder / entry.file for entry in saved)}
        notes = [each.settings.notes_size for each in models] + [each.settings.notes_size for each in saved]
        return sum(map(size_of, files)) + sum(notes)


def too_many(requests: int, most: int) -> str:
    return (f"requests: {requests} of this key are not answered, and at most {most} may be: wait for some of them "
            "before you send more")


class Runs:
    """Records signs of life of clients, and unloads models. Thread-safe."""

    def __init__(self, database: Database, store: RequestStore) -> None:
        database.add([TABLE])
        self.database, self.store = database, store
        self.began, self.beats = time.time(), dict[str, float]()  # the last heartbeat of each session
        self.refused: dict[str, float] = {}  # by user: the time of the last body that could not be read

    def beat(self, session: str) -> None:
        self.beats[session] = time.time()

    def touch(self, model: str) -> None:
        self.database.change("INSERT OR REPLACE INTO tinker_times VALUES (?, ?)", (model, time.time()), waits=False)

    def refuse(self, owner: str) -> None:
        self.refused[owner] = time.time()

    def gives_up(self, model: StoredModel) -> bool:
        """Return whether a missing request is given up: after GAP or SOON seconds without a request of the model."""
        now = time.time()
        patience = SOON if now - self.refused.get(model.owner, -GAP) < GAP else GAP
        return now - max(model.asked, self.began) >= patience

    def check_rows(self, kind: str, owner: str, most: int) -> None:
        """Raise ValueError if a user has `most` "sessions" or "samplers" after those of clients that left are deleted.
        """
        query = f"SELECT COUNT(*) AS have FROM tinker_{kind} WHERE owner = ?"
        if self.database.rows(query, (owner,))[0]["have"] >= most:
            self.forget_sessions(owner)
        if (have := self.database.rows(query, (owner,))[0]["have"]) >= most:
            raise ValueError(f"{kind}: this key has {have}, and may have {most}: close ServiceClients that are done. "
                             "Their sessions expire then, or after an hour without a sign of life, once their models "
                             "are unloaded (POST unload_model)")

    def forget_sessions(self, owner: str) -> None:
        """Delete sessions without models that were ended, or silent for GONE seconds, and their samplers."""
        used = {model.id.partition(":")[0] for model in self.store.models(owner)}
        rows = self.database.rows("SELECT id, finished FROM tinker_sessions WHERE owner = ?", (owner,))
        gone = [row["id"] for row in rows if row["id"] not in used and (
            row["finished"] or time.time() - self.beats.get(row["id"], self.began) > GONE)]
        with self.database.write() as connection:
            for session in gone:
                self.beats.pop(session, None)
                connection.execute("DELETE FROM tinker_sessions WHERE id = ?", (session,))
                connection.execute("DELETE FROM tinker_samplers WHERE id >= ? AND id < ?",
                                   (f"{session}:", f"{session};"))

    def left(self, owner: str) -> list[StoredModel]:
        """Return this user's models whose session ended, or was silent for GONE seconds; the oldest first."""
        ended = {row["id"] for row in self.database.rows("SELECT id FROM tinker_sessions WHERE finished IS NOT NULL")}
        now, left = time.time(), []
        for model in self.store.models(owner):
            session = model.id.partition(":")[0]
            seen = max(self.beats.get(session, self.began), model.asked)
            if session in ended or now - seen > GONE:
                left.append(model)
        return left

    def remove(self, model: StoredModel) -> None:
        """Delete a model from the database, with its requests and snapshots. Its named weights stay."""
        between = (f"{model.id}:sample:", f"{model.id}:sample;")  # the ids of its snapshots
        with self.database.write() as connection:
            connection.execute("INSERT OR IGNORE INTO tinker_gone VALUES (?, ?)", (model.id, model.owner))
            connection.execute("DELETE FROM tinker_gone WHERE rowid IN (SELECT rowid FROM tinker_gone WHERE owner = ? "
                               "ORDER BY rowid DESC LIMIT -1 OFFSET ?)", (model.owner, MOST_GONE))
            connection.execute("DELETE FROM tinker_samplers WHERE id >= ? AND id < ?", between)
            for table, column in (("tinker_promises", "model"), ("tinker_times", "model"),
                                  ("tinker_starts", "model"), ("tinker_models", "id")):
                connection.execute(f"DELETE FROM {table} WHERE {column} = ?", (model.id,))

    def gone(self, model: str, owner: str) -> ModelReply:
        """Return the reply for a model that was unloaded. UnknownError if it was not this user's."""
        row = self.database.row("SELECT owner FROM tinker_gone WHERE id = ?", (model,))
        if row is None or row["owner"] != owner:
            raise UnknownError(f"model_id is {model!r}; there is no such model of yours")
        return ModelReply.from_json({"type": UNLOAD, "model_id": model})

    def older_snapshots(self, model: str, kept: int, used: set[str]) -> list[str]:
        """Delete all snapshots of a model but the `kept` newest, and those in use, from the database, and return their
        folders."""
        rows = [row for row in self.database.rows(
            "SELECT id, snapshot FROM tinker_samplers WHERE id >= ? AND id < ? ORDER BY rowid DESC",
            (f"{model}:sample:", f"{model}:sample;"))[kept:] if row["snapshot"] not in used]
        if rows:
            with self.database.write() as connection:
                connection.executemany("DELETE FROM tinker_samplers WHERE id = ?", [(row["id"],) for row in rows])
        return [row["snapshot"] for row in rows]
