"""`Training`: runs clients' requests to their models in the thread that owns the base model, and survives a kill."""

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from safetensors.torch import load_file, save_file

from lowmem_grpo.memory.oom import MemoryExhaustedError
from lowmem_grpo.runs.files import flush, remove
from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.server.openai.request_queue import WorkerClosedError
from lowmem_grpo.server.tinker import wire
from lowmem_grpo.server.tinker.adapters import Adapters, DroppedError, LoraSettings
from lowmem_grpo.server.tinker.calls import LoadWeights, OptimStep, SaveWeights, read
from lowmem_grpo.server.tinker.checkpoint_store import SAMPLING, TRAINING, CheckpointStore, Saved, path_of, size_of
from lowmem_grpo.server.tinker.datum import ModelBounds, output_of, pass_of
from lowmem_grpo.server.tinker.request_store import (
    PASS,
    REFUSED,
    ModelReply,
    ModelRequest,
    RequestStore,
    StoredModel,
    UnknownError,
)
from lowmem_grpo.server.tinker.usage import Runs, Usage
from lowmem_grpo.server.users import Allowances

logger = logging.getLogger(__name__)

CREATE, OPTIM_STEP, SNAPSHOT, SAVE, LOAD = (
    "create_model", "optim_step", "save_weights_for_sampler", "save_weights", "load_weights")
SNAPSHOTS = 8  # unnamed snapshots kept for each model, the newest
MOST_ENDS = 2  # servers that may die in one request: the first one may have been killed for another reason
HELD = 16  # models in GPU memory; the least recently used are dropped, and loaded from the disk when needed


class Training:
    """Runs one queue of requests for each model, in order of `seq_id`; models take turns request by request."""

    def __init__(
        self, worker: EngineWorker, adapters: Adapters, store: RequestStore, folder: Path, bounds: ModelBounds,
        allowances: Allowances | None = None,
    ) -> None:
        """`folder` holds models' states; unanswered requests of an earlier server are run. `allowances` limit users."""
        self.worker, self.adapters, self.store, self.folder, self.bounds = worker, adapters, store, folder, bounds
        self.lock, self.clerk = threading.Lock(), ThreadPoolExecutor(1, "lowmem_grpo tinker")
        self.busy: set[str] = set()  # models with a request in the worker
        # by promise, while a client polls for it: a future that is done once the promise is fulfilled
        self.told: WeakValueDictionary[str, Future[None]] = WeakValueDictionary()
        self.snapshots = folder / "snapshots"
        self.snapshots.mkdir(parents=True, exist_ok=True)
        self.checkpoints = CheckpointStore(store.database, folder / "saved")
        self.usage = Usage(allowances, store, self.checkpoints, folder)
        self.runs = Runs(store.database, store)
        for model in store.models():
            self.pump(model.id)

    # Called from any thread

    def ask(self, asked: ModelRequest) -> str:
        """Store a request and return its promise's id. ValueError if another request has its number, BusyError if it
        may be sent again later."""
        earlier = self.store.asked(asked.model, asked.seq)
        if earlier is None:
            self.runs.touch(asked.model)
            earlier = self.store.ask(self.usage.taken(asked, self.store.model(asked.model)))
        if earlier is not None and not earlier.agrees_with(asked):
            raise ValueError(f"seq_id is {asked.seq}, which {asked.model} was sent with another {earlier.kind} before: "
                             "two programs may be using one model; let each create its own")
        self.pump(asked.model)
        return asked.id

    def add_model(self, model: str, owner: str, settings: LoraSettings, kind: str, body: bytes | None = None) -> str:
        """Add a model with its first request; return the promise's id. If the user is at the limit of models, unload a
        model whose client left; ValueError if there is none."""
        try:
            self.usage.check_model(model, owner)
        except ValueError:
            left = self.runs.left(owner)
            if not left:
                raise
            self.unload(left[0])
        if settings.notes_size and self.store.asked(model, 0) is None:
            self.usage.check_storage(owner, settings.notes_size)
        self.runs.touch(model)
        self.store.add_model(model, owner, settings, kind, body)
        self.pump(model)
        return f"{model}:0"

    def unload(self, model: StoredModel) -> None:
        """Delete a model: at once from the database, from memory and disk as soon as the worker is free."""
        self.runs.remove(model)
        self.worker.run(lambda: self.clear(model.id), sleep=False)

    def sweep_saved(self) -> None:
        if self.checkpoints.expired():
            self.worker.run(self.sweep_unused, sleep=False)

    def look_for_gap(self, model: StoredModel) -> bool:
        """Return whether requests wait for a missing one. After a while, answer the missing one with a failure."""
        missing = self.store.gap(model.id)
        if gives_up := missing is not None and self.runs.gives_up(model):
            self.store.step_over(model.id, missing, ModelReply.failed(
                f"seq_id {missing} did not come, or could not be read, while later ones waited: send it anew under a "
                "number of its own"))
            self.pump(model.id)
        return missing is not None and not gives_up

    def pump(self, model: str) -> None:
        with self.lock:
            if model in self.busy or (asked := self.store.next(model)) is None:
                return
            self.busy.add(model)
        self.worker.run(lambda: self.do(asked), user=asked.owner).add_done_callback(lambda done: self.done(asked, done))

    def done(self, asked: ModelRequest, done: "Future[Any]") -> None:
        """Wake the clients that poll for a request that has run, and start the model's next request."""
        with self.lock:
            self.busy.discard(asked.model)
            told = self.told.pop(asked.id, None)
        if told is not None:
            told.set_result(None)
        error = done.exception()
        if error is None:
            self.clerk.submit(self.pump, asked.model)  # not from the worker's own thread
        elif not isinstance(error, WorkerClosedError):
            logger.error("%s was not answered: %s", asked.id, error)

    def kept(self, promise: str) -> "Future[None]":
        """Return a future that is done once a promise is fulfilled. Get it before you look into the request store."""
        with self.lock:
            return self.told.setdefault(promise, Future())

    def close(self) -> None:
        """Start no more requests; those that wait are run by the next server. The worker stays open."""
        self.clerk.shutdown(cancel_futures=True)

    # In the worker's thread

    def do(self, asked: ModelRequest) -> None:
        """Run a request and store its answer. On an OSError store none, and reload the model from the disk."""
        state = None
        try:
            ends = self.store.count_start(asked)
            answer = self.answer(asked) if ends < MOST_ENDS else given_up(asked, ends)
            if answer.effect == "changed":
                state = f"{asked.model}.{asked.seq}.safetensors".replace(":", "_")
                self.write_state(asked.model, self.folder / state)
            self.store.keep(asked, answer, state)
        except OSError:
            self.load(self.store.model(asked.model))
            raise
        if state is not None:
            self.sweep(asked.model, state)
        if answer.also is not None:
            self.sweep_unused()
        if asked.kind == SNAPSHOT:
            for name in self.runs.older_snapshots(asked.model, SNAPSHOTS, self.used(self.folder)):
                remove(self.folder / name)

    def used(self, folder: Path) -> set[str]:
        """Return the paths below a folder of the saved weights with which completions that wait will be sampled."""
        return {str(path.relative_to(folder)) for path in self.worker.waiting.adapters()
                if isinstance(path, Path) and path.is_relative_to(folder)}

    def sweep_unused(self) -> None:
        self.checkpoints.sweep(self.used(self.checkpoints.folder))

    def clear(self, model: str) -> None:
        self.adapters.delete(model)
        self.sweep(model, "")
        for path in self.snapshots.glob(f"{model}:sample:*".replace(":", "_")):
            remove(path)

    def answer(self, asked: ModelRequest) -> ModelReply:
        """Return the reply to a request; a failure names the wrong field, and no details of the server's own errors."""
        try:
            if asked.kind == REFUSED:
                return ModelReply.failed(asked.body.decode())
            self.hold(asked)
            if asked.kind == CREATE:
                self.adapters.create(asked.model, self.store.model(asked.model).settings)
                return ModelReply.from_json({"model_id": asked.model, "type": CREATE})
            kinds = {OPTIM_STEP: self.optim_step, SNAPSHOT: self.save, SAVE: self.save, LOAD: self.load_saved}
            return kinds.get(asked.kind, self.forward_backward)(asked)
        except DroppedError as error:
            return ModelReply.failed(str(error), effect="changed")
        except (ValueError, UnknownError, MemoryExhaustedError) as error:
            return ModelReply.failed(str(error))
        except OSError:
            raise
        except Exception:
            logger.exception("%s failed", asked.id)
            return ModelReply.failed("the request failed in the server, whose log says more", "server")

    def forward_backward(self, asked: ModelRequest) -> ModelReply:
        work = pass_of(wire.parsed(wire.ForwardBackwardRequest, asked.body), self.bounds)
        done = output_of(*self.adapters.run(asked.model, work))
        return ModelReply(done, wire.PROTOBUF, "" if work.forward_only else "added")

    def optim_step(self, asked: ModelRequest) -> ModelReply:
        adam, model = read(OptimStep, asked.body).adam_params, self.store.model(asked.model)
        if model.state is None:
            self.usage.check_storage(model.owner, self.adapters.size(model.id, moments=True))
        return ModelReply.from_json({"metrics": self.adapters.optim_step(asked.model, adam)}, "changed")

    def save(self, asked: ModelRequest) -> ModelReply:
        """Save a copy of a model under a name, or an unnamed snapshot with a sampling session that uses it."""
        call, model = read(SaveWeights, asked.body), self.store.model(asked.model)
        if call.path is None:
            if asked.kind == SAVE or call.sampling_session_seq_id is None:
                raise ValueError("path is missing; give the weights a name, or a snapshot a sampling_session_seq_id")
            return self.save_snapshot(call.sampling_session_seq_id, asked.seq, model)
        kind = SAMPLING if asked.kind == SNAPSHOT else TRAINING
        path = path_of(model.id, kind, call.path)
        self.checkpoints.check_free(path, model.owner, call.overwrite or kind == SAMPLING)
        settings = model.settings.with_metadata(call.user_metadata)
        self.usage.check_storage(model.owner, self.adapters.size(model.id, moments=kind == TRAINING)
                                 + settings.notes_size)
        place, now = self.checkpoints.path_of(model.id, kind, call.path, asked.seq), time.time()
        if kind == SAMPLING:
            self.adapters.snapshot(model.id, place)
        else:
            self.write_state(model.id, place)
        expires = None if call.ttl_seconds is None else now + call.ttl_seconds
        saved = Saved(path, model.owner, model.id, settings, place.name, size_of(place), now, expires)
        answer = ModelReply.from_json({"type": asked.kind, "path": path})
        return replace(answer, also=partial(self.checkpoints.put, saved))

    def save_snapshot(self, number: int, seq: int, model: StoredModel) -> ModelReply:
        """Save an unnamed snapshot of a model, and add sampling session `number`, which uses it. ValueError if an
        earlier request, whose weights completions may be using, has the number."""
        sampler = f"{model.id}:sample:{number}"
        folder = self.snapshots / f"{sampler}.{seq}".replace(":", "_")
        self.usage.check_storage(model.owner, self.adapters.size(model.id))
        self.store.add_sampler(sampler, model.owner, str(folder.relative_to(self.folder)))
        self.adapters.snapshot(model.id, folder)
        return ModelReply.from_json({"type": SNAPSHOT, "sampling_session_id": sampler})

    def load_saved(self, asked: ModelRequest) -> ModelReply:
        """Load saved weights into a model, which is created if this is its first request."""
        call, model = read(LoadWeights, asked.body), self.store.model(asked.model)
        saved = self.checkpoints.find(call.path, model.owner, TRAINING)
        if model.state is None:
            self.usage.check_storage(model.owner, saved.size)
        if asked.seq == 0:
            self.adapters.create(model.id, model.settings)
        state = load_file(self.checkpoints.folder / saved.file)
        kept = {name: value for name, value in state.items() if call.optimizer or "/" not in name}
        self.adapters.restore(model.id, kept)
        return ModelReply.from_json({"type": LOAD, "path": saved.path, "model_id": model.id}, "changed")

    def write_state(self, model: str, path: Path) -> None:
        """Write a model's LoRA factors and moments, flushed to the disk before this returns."""
        save_file(self.adapters.state(model), path)
        flush(path)
        flush(path.parent)

    def sweep(self, model: str, state: str) -> None:
        for path in self.folder.glob(f"{model.replace(':', '_')}.*.safetensors"):
            if path.name != state:
                path.unlink(missing_ok=True)

    def hold(self, asked: ModelRequest) -> None:
        """Bring the model of a request into memory, and keep at most HELD models there."""
        held = self.adapters.held
        if asked.model in held:
            held[asked.model] = held.pop(asked.model)  # now the most recently used
        elif asked.seq > 0:
            self.load(self.store.model(asked.model))
        while len(held) > HELD:
            self.adapters.delete(next(iter(held)))

    def load(self, model: StoredModel) -> None:
        """Rebuild a model from the disk: its state, and its gradients by running the passes since the last step."""
        self.adapters.create(model.id, model.settings)
        if model.state is not None:
            self.adapters.restore(model.id, load_file(self.folder / model.state))
        for asked in self.store.since_step(model):
            if asked.kind == PASS:
                self.answer(asked)


def given_up(asked: ModelRequest, ends: int) -> ModelReply:
    """Return the reply to a request during which the server ended so many times."""
    logger.error("%s is given up: the server ended %d times while it ran", asked.id, ends)
    return ModelReply.failed(f"the server ended {ends} times while it ran this {asked.kind}, which is therefore not "
                             "run again; send another one, such as a smaller one, under the next seq_id")
