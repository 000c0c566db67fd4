"""The routes of the Tinker protocol below /api/v1, as the client's version 0.38.0 calls them."""

import asyncio
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from lowmem_grpo.server.requests import ChatError, json_of
from lowmem_grpo.server.tinker import calls, wire
from lowmem_grpo.server.tinker.adapters import FROZEN_HEAD, WHOLE_HEAD
from lowmem_grpo.server.tinker.checkpoint_store import SAMPLING, TRAINING, Saved
from lowmem_grpo.server.tinker.request_store import JSON, PASS, ModelReply, ModelRequest, StoredModel, UnknownError
from lowmem_grpo.server.tinker.route_utils import SMALL, Answers, ApiRequest, Json, Served, T, checked, route
from lowmem_grpo.server.tinker.sampling import SampleService
from lowmem_grpo.server.tinker.training import CREATE, LOAD, OPTIM_STEP, SAVE, SNAPSHOT, Training
from lowmem_grpo.server.tinker.usage import SOON, UNLOAD

FEW = 16  # the most parts of a promise whose answer is built without a thread
POLL = 35.0  # seconds that a poll is held open: each further poll costs a request; clients give up after 45
MOST = 1000  # entries of a list
KNOWN = 8192  # sampling sessions that need no look-up in the database
TYPES = {TRAINING: "training", SAMPLING: "sampler"}
REASONS = ("success", "errored", "interrupted")


def tinker_router(training: Training, sampling: SampleService, served: Served) -> APIRouter:
    """Return the routes of Tinker's API."""
    router = APIRouter(redirect_slashes=False)
    models, promises = ModelRoutes(training, served), PromiseRoutes(training, sampling, served)
    answers = models.answers() | {
        "POST /create_sampling_session": promises.create_sampler, "GET /samplers/{sampler}": promises.sampler}
    for place, answer in answers.items():
        method, path = place.split()
        router.add_route(path, route(answer), methods=[method])
    for kind, answer in models.promises().items():
        router.add_route(f"/{kind}", route(answer, training.runs.refuse), methods=["POST"])
    router.add_route("/asample", promises.asample, methods=["POST"])
    router.add_route("/retrieve_future", promises.retrieve_future, methods=["POST"])
    return router


class ModelRoutes:
    """The routes of client sessions, of their models (the protocol's training runs), and of saved weights."""

    def __init__(self, training: Training, served: Served) -> None:
        self.training, self.store = training, training.store
        self.checkpoints, self.served = training.checkpoints, served

    def answers(self) -> dict[str, Answers]:
        capabilities = {"supported_models": [{"model_name": self.served.name, "trainable": True, "sampleable": True,
                                              "max_context_length": self.served.context}]}
        run = "/training_runs/{model}"
        weights = f"{run}/checkpoints/{{kind}}/{{name}}"
        return {
            "GET /healthz": lambda asked: {"status": "ok"},
            "GET /get_server_capabilities": lambda asked: capabilities,
            "POST /client/config": lambda asked: {"proto_compress_fwdbwd": True, "use_pyqwest_transport": False},
            "POST /client/dynamic_config": lambda asked: {},
            "POST /telemetry": lambda asked: {"status": "accepted"},
            "POST /create_session": self.create_session,
            "POST /session_heartbeat": self.heartbeat,
            "POST /sessions/{session}/finish": self.finish_session,
            "POST /create_model": self.create_model,
            "POST /get_info": self.model_info,
            f"POST /{UNLOAD}": self.unload_model,
            "GET /training_runs": self.training_runs,
            f"GET {run}": lambda asked: self.run(self.store.model(asked.path["model"], asked.owner)),
            "POST /weights_info": self.weights_info,
            "GET /checkpoints": self.list_checkpoints,
            f"GET {run}/checkpoints": self.checkpoints_of_run,
            f"DELETE {weights}": lambda asked: self.checkpoints.delete(path_in(asked), asked.owner),
            f"PUT {weights}/ttl": lambda asked: self.checkpoints.keep_for(
                path_in(asked), asked.owner, calls.read(calls.KeepFor, asked.body).ttl_seconds),
        }

    def promises(self) -> dict[str, Answers]:
        """Return the handlers of model requests, which answer with a promise, by kind of request."""
        return {PASS: self.forward_backward, LOAD: self.load_weights, **{
            kind: partial(self.promise, kind) for kind in (OPTIM_STEP, SNAPSHOT, SAVE)}}

    def create_session(self, asked: ApiRequest) -> Json:
        session, runs = secrets.token_hex(16), self.training.runs
        runs.check_rows("sessions", asked.owner, self.training.usage.allowances[asked.owner].sessions)
        self.store.open_session(session, asked.owner)
        runs.beat(session)
        return {"type": "create_session", "session_id": session,
                "info_message": WHOLE_HEAD if self.training.adapters.heads else FROZEN_HEAD}

    def heartbeat(self, asked: ApiRequest) -> Json:
        session = asked.json.get("session_id")
        self.store.check_session(session, asked.owner)
        self.training.runs.beat(str(session))
        self.training.sweep_saved()
        return {"type": "session_heartbeat"}

    def finish_session(self, asked: ApiRequest) -> Json:
        reason = asked.json.get("reason")
        named = reason.get("type") if isinstance(reason, dict) else reason
        if named not in REASONS:
            raise ValueError(f"reason.type is {named!r}; allowed are {', '.join(REASONS)}")
        self.store.finish_session(asked.path["session"], asked.owner, str(named))
        return {"type": "finish_session"}

    def create_model(self, asked: ApiRequest) -> Json:
        session, body = asked.json.get("session_id"), asked.json
        self.store.check_session(session, asked.owner)
        self.served.check_base(body.get("base_model"))
        made = calls.read(calls.CreateModel, asked.body)
        model = f"{session}:train:{made.model_seq_id}"
        settings = made.lora_config.with_metadata(made.user_metadata)
        if not self.training.adapters.heads:  # create_session said so
            settings = settings.model_copy(update={"unembed": False})
        promise = self.training.add_model(model, asked.owner, settings, CREATE)
        return {"request_id": promise, "model_id": model, "type": CREATE}

    def model_info(self, asked: ApiRequest) -> Json:
        model, served = self.store.model(asked.json.get("model_id"), asked.owner), self.served
        data = {"arch": served.architecture, "model_name": served.name, "tokenizer_id": served.tokenizer}
        return {"type": "get_info", "model_data": data, "model_id": model.id, "is_lora": True,
                "lora_rank": model.settings.rank, "model_name": served.name}

    def promise(self, kind: str, asked: ApiRequest) -> Json:
        """Store a model request with a JSON body, and return its promise."""
        call = calls.read(calls.ModelCall, asked.body)
        model = self.store.model(call.model_id, asked.owner)
        promise = self.training.ask(ModelRequest(model.id, call.seq_id, kind, asked.body))
        return {"request_id": promise, "model_id": model.id}

    def forward_backward(self, asked: ApiRequest) -> Json:
        """Store a forward_backward request, and return its promise; errors in its data are in the promise's answer."""
        body = wire.plain(asked.body, asked.headers.get("content-encoding", ""))
        if asked.headers.get("content-type", "").partition(";")[0].strip() == JSON:
            body = calls.request_of(body)
        request = wire.parsed(wire.ForwardBackwardRequest, body)
        model = self.store.model(request.model_id, asked.owner)
        if request.seq_id < 1:
            raise ValueError(f"seq_id is {request.seq_id}; it must be a whole number, at least 1")
        promise = self.training.ask(ModelRequest(model.id, request.seq_id, PASS, body))
        return {"request_id": promise, "model_id": model.id}

    def load_weights(self, asked: ApiRequest) -> Json:
        """Store a request to load weights into an existing model, or into a new one; return its promise."""
        session = asked.json.get("session_id")
        if session is None:
            return self.promise(LOAD, asked)
        self.store.check_session(session, asked.owner)
        load = calls.read(calls.LoadIntoNew, asked.body)
        self.served.check_base(load.base_model or self.served.name)
        saved = self.checkpoints.find(load.path, asked.owner, TRAINING)
        model = f"{session}:train:{load.model_seq_id}"
        settings = saved.settings.with_metadata(load.user_metadata)
        promise = self.training.add_model(model, asked.owner, settings, LOAD, asked.body)
        return {"request_id": promise, "model_id": model, "type": LOAD}

    def weights_info(self, asked: ApiRequest) -> Json:
        settings = self.checkpoints.find(asked.json.get("tinker_path"), asked.owner).settings
        return {"base_model": self.served.name, "is_lora": True, "lora_rank": settings.rank, **settings.parts}

    def list_checkpoints(self, asked: ApiRequest) -> Json:
        return page_of(asked, "checkpoints", self.checkpoints.all(asked.owner), listed, 100)

    def checkpoints_of_run(self, asked: ApiRequest) -> Json:
        model = self.store.model(asked.path["model"], asked.owner)
        return {"checkpoints": list(map(listed, self.checkpoints.all(asked.owner, model.id)))}

    def training_runs(self, asked: ApiRequest) -> Json:
        return page_of(asked, "training_runs", self.store.models(asked.owner)[::-1], self.run, 20)

    def run(self, model: StoredModel) -> Json:
        saved = self.checkpoints.all(model.owner, model.id)
        newest = {kind: next((listed(entry) for entry in saved if entry.kind == kind), None) for kind in TYPES}
        return {"training_run_id": model.id, "base_model": self.served.name, "model_owner": model.owner,
                "is_lora": True, "lora_rank": model.settings.rank, "last_request_time": moment(model.asked),
                "corrupted": False, "last_checkpoint": newest[TRAINING], "last_sampler_checkpoint": newest[SAMPLING],
                "user_metadata": model.settings.user_metadata}

    def unload_model(self, asked: ApiRequest) -> Json:
        """Unload a model, and return a promise that is already fulfilled. A repeated call returns the same promise."""
        model = asked.json.get("model_id")
        try:
            self.training.unload(self.store.model(model, asked.owner))
        except UnknownError:
            self.training.runs.gone(str(model), asked.owner)
        return {"request_id": f"{model}:{UNLOAD}", "model_id": model, "type": UNLOAD}


class PromiseRoutes:
    """The routes of sampling sessions, their samples, and the answers of promises."""

    def __init__(self, training: Training, sampling: SampleService, served: Served) -> None:
        self.training, self.store, self.sampling, self.served = training, training.store, sampling, served
        self.snapshot_of = lru_cache(KNOWN)(training.store.snapshot_of)  # it stays the same until it is deleted

    def create_sampler(self, asked: ApiRequest) -> Json:
        """Create a sampling session of the base model, or of named weights."""
        session, snapshot, training = asked.json.get("session_id"), None, self.training
        self.store.check_session(session, asked.owner)
        made = calls.read(calls.CreateSampler, asked.body)
        if made.base_model is not None or not made.model_path:
            self.served.check_base(made.base_model)
        if made.model_path is not None:
            saved = training.checkpoints.find(made.model_path, asked.owner, SAMPLING)
            snapshot = str((training.checkpoints.folder / saved.file).relative_to(training.folder))
        sampler = f"{session}:sample:{made.sampling_session_seq_id}"
        training.runs.check_rows("samplers", asked.owner, training.usage.allowances[asked.owner].samplers)
        self.store.add_sampler(sampler, asked.owner, snapshot)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def sampler(self, asked: ApiRequest) -> Json:
        snapshot = self.store.snapshot_of(asked.path["sampler"], asked.owner)
        named = {saved.file: saved.path for saved in self.training.checkpoints.all(asked.owner)}
        return {"sampler_id": asked.path["sampler"], "base_model": self.served.name,
                "model_path": named.get(Path(snapshot or "").name)}

    async def asample(self, request: Request) -> Response:
        """Answer with the promise of a sample. Thousands come at once, so small bodies are read without a thread."""
        asked = await ApiRequest.read(request)
        here = len(asked.body) <= SMALL
        sample = await checked(lambda: calls.read(calls.SampleRequest, asked.body), here)
        return JSONResponse(await checked(lambda: self.sampling.ask(
            sample, self.adapter_of(sample.sampling_session_id, asked.owner), asked.owner),
            here and sample.num_samples <= FEW))

    def adapter_of(self, sampler: str, owner: str) -> Path | None:
        """Return the adapter folder of a sampling session; None is the base model. UnknownError if it was deleted."""
        snapshot = self.snapshot_of(sampler, owner)
        folder = None if snapshot is None else self.training.folder / snapshot
        if folder is not None and not folder.is_dir():
            raise UnknownError(f"sampling_session_id is {sampler!r}, and its weights were deleted: make a new sampling "
                               "client")
        return folder

    async def retrieve_future(self, request: Request) -> Response:
        """Answer with a promise's reply, or with try_again if there is none yet."""
        asked = await ApiRequest.read(request)
        promise = str((await checked(lambda: json_of(asked.body), len(asked.body) <= SMALL)).get("request_id"))
        answer = await self.answer(promise, asked.owner)
        if answer is None:
            return JSONResponse({"type": "try_again", "request_id": promise, "queue_state": "active"})
        if calls.wants_json(asked.headers.get("accept", "")):
            done = answer
            answer = await checked(lambda: calls.in_json(done, ":sample:" in promise), len(done.body) <= SMALL)
        return Response(answer.body, media_type=answer.media)

    async def answer(self, promise: str, owner: str) -> ModelReply | None:
        """Return the reply of a promise; None if there is none within POLL seconds."""
        if promise.endswith(f":{UNLOAD}"):
            return await checked(lambda: self.training.runs.gone(promise.rpartition(":")[0], owner))
        if ":sample:" in promise:
            return await self.sampled(promise, owner)
        kept = self.training.kept(promise)
        if (answer := await checked(lambda: self.store.answer(promise, owner))) is not None:
            return answer
        model = await checked(lambda: self.store.model(promise.rpartition(":")[0], owner))
        missing = await checked(lambda: self.training.look_for_gap(model))
        await asyncio.wait({asyncio.wrap_future(kept)}, timeout=min(POLL, SOON) if missing else POLL)
        return await checked(lambda: self.store.answer(promise, owner))

    async def sampled(self, name: str, owner: str) -> ModelReply | None:
        """Return the reply of a sample. ChatError (410) for an earlier server's sample: the client sends it again."""
        try:
            promise = self.sampling.find(name, owner)
        except UnknownError as error:
            raise ChatError(410, str(error), None, "gone") from None
        _, left = await asyncio.wait({asyncio.wrap_future(part) for part in promise.parts}, timeout=POLL)
        if left:
            return None
        return await checked(promise.answer, len(promise.parts) <= FEW)


def path_in(asked: ApiRequest) -> str:
    return "tinker://{model}/{kind}/{name}".format(**asked.path)


def page_of(asked: ApiRequest, name: str, entries: list[T], shown: Callable[[T], Json], usual: int) -> Json:
    """Return the requested entries of a list under the list's `name`; by default the first `usual` entries."""
    page = calls.read(calls.ListPage, asked.query)
    most = min(page.limit or usual, MOST)
    return {name: list(map(shown, entries[page.offset:page.offset + most])),
            "cursor": {"offset": page.offset, "limit": most, "total_count": len(entries)}}


def listed(saved: Saved) -> Json:
    return {"checkpoint_id": "/".join(saved.path.split("/")[-2:]), "checkpoint_type": TYPES[saved.kind],
            "time": moment(saved.made), "tinker_path": saved.path, "size_bytes": saved.size, "public": False,
            "user_metadata": saved.settings.user_metadata,
            "expires_at": None if saved.expires is None else moment(saved.expires)}


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
