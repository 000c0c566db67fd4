"""`Usage`: what each user has, against what their key may have; `Runs`: how their models end; `Gaps`: lost requests."""

import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

from lowmem_grpo.server.database import Database
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
from lowmem_grpo.utils import size_text

SMALL = 16 * 1024  # bytes of a step or a save, which is taken where bodies are at their limit: it may make room
TABLE = "CREATE TABLE IF NOT EXISTS tinker_gone (id TEXT PRIMARY KEY, owner TEXT NOT NULL)"
UNLOAD = "unload_model"
GONE = 3600.0  # seconds without a sign of a client, after which its models may make room for others
GAP = 60.0  # seconds in which a request may come after later ones
SOON = 2.0  # the same where its user was refused a body that could not be read: it was that request, most likely


class BusyError(Exception):
    """Too much waits for its answer; the same request is taken later."""


class Usage:
    """Any thread may use it."""

    def __init__(
        self, allowances: Allowances | None, ledger: RequestStore, shelf: CheckpointStore, folder: Path
    ) -> None:
        """`folder` has the models' states, and the snapshots that samplers name."""
        self.ledger, self.shelf, self.folder = ledger, shelf, folder
        self.allowances = defaultdict(Allowance) if allowances is None else allowances
        self.lock, self.samples = threading.Lock(), Counter[str]()

    def taken(self, asked: ModelRequest, model: StoredModel) -> ModelRequest:
        """Return a request as it is kept: above a limit it fails in its turn, or BusyError if room is to come."""
        (requests, bodies, is_next), may = self.ledger.open_of(model.owner), self.allowances[model.owner]
        requests += self.samples[model.owner]
        if requests >= may.requests and asked.seq > model.done + 1:
            told = too_many(requests, may.requests)
        elif bodies + len(asked.body) > may.bodies and (asked.kind == PASS or len(asked.body) > SMALL):
            told = (f"bodies: {size_text(bodies)} of this key's requests are kept, and this one has "
                    f"{size_text(len(asked.body))}; at most {size_text(may.bodies)} are: call optim_step, which frees "
                    "them, or send fewer or shorter sequences for a step")
        else:
            return asked
        if is_next:
            raise BusyError(told)
        return ModelRequest(asked.model, asked.seq, REFUSED, told.encode())

    def begin_sample(self, owner: str) -> None:
        """BusyError where no more may wait. Each is to be ended."""
        may = self.allowances[owner].requests
        with self.lock:
            requests = self.ledger.open_of(owner)[0] + self.samples[owner]
            if requests >= may:
                raise BusyError(too_many(requests, may))
            self.samples[owner] += 1

    def end_sample(self, owner: str) -> None:
        with self.lock:
            self.samples[owner] -= 1

    def check_model(self, model: str, owner: str) -> None:
        """ValueError where a user has as many models as they may, and this is another one."""
        have, may = {each.id for each in self.ledger.models(owner)}, self.allowances[owner].models
        if model not in have and len(have) >= may:
            raise ValueError(f"models: this key has {len(have)}, and may have {may}: unload those that are done "
                             "(list_training_runs names them, and POST unload_model unloads one), or close their "
                             "clients, and they make room by themselves")

    def check_storage(self, owner: str, more: int) -> None:
        """ValueError where so many bytes more are not to be written for a user."""
        have, may = self.stored(owner), self.allowances[owner].storage
        if have + more > may:
            raise ValueError(f"storage: this key has {size_text(have)} on the disk, this takes {size_text(more)} more, "
                             f"and {size_text(may)} is the most: delete saved weights (list_user_checkpoints names "
                             "them), or unload models that are done")

    def stored(self, owner: str) -> int:
        states = [self.folder / model.state for model in self.ledger.models(owner) if model.state is not None]
        snapshots = [self.folder / name for name in self.ledger.snapshots(owner)]
        saved = [self.shelf.folder / entry.file for entry in self.shelf.all(owner)]
        return sum(size_of(path) for path in {*states, *snapshots, *saved})


def too_many(requests: int, most: int) -> str:
    return (f"requests: {requests} of this key are not answered, and at most {most} may be: wait for some of them "
            "before you send more")


class Runs:
    """Any thread may use it."""

    def __init__(self, database: Database, ledger: RequestStore) -> None:
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

    def gone(self, model: str, owner: str) -> ModelReply:
        """The answer to whom asked for a model to be unloaded. UnknownError where it was none of theirs."""
        row = self.database.row("SELECT owner FROM tinker_gone WHERE id = ?", (model,))
        if row is None or row["owner"] != owner:
            raise UnknownError(f"model_id is {model!r}; there is no such model of yours")
        return ModelReply.from_json({"type": UNLOAD, "model_id": model})

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
