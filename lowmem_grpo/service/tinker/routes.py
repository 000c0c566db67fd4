"""The routes of the Tinker protocol below /api/v1, as the client's version 0.38.0 asks for them."""

import asyncio
import secrets
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

from lowmem_grpo.service.errors import ChatError
from lowmem_grpo.service.tinker import plain_json, wire
from lowmem_grpo.service.tinker.asking import (
    Served,
    asked_in_json,
    checked,
    checked_at_once,
    owner_of,
    promised,
)
from lowmem_grpo.service.tinker.calls import json_of, lora_of, whole
from lowmem_grpo.service.tinker.gaps import SOON
from lowmem_grpo.service.tinker.ledger import JSON, PASS, Answer, Asked, UnknownError
from lowmem_grpo.service.tinker.runs import UNLOAD
from lowmem_grpo.service.tinker.runs_routes import add_runs_routes
from lowmem_grpo.service.tinker.sampling import Sampling
from lowmem_grpo.service.tinker.saved_routes import add_saved_routes
from lowmem_grpo.service.tinker.shelf import SAMPLING
from lowmem_grpo.service.tinker.training import CREATE, OPTIM_STEP, SNAPSHOT, Training

MISSING = "no such folder"  # below the folder of the models
FEW = 16  # parts of a promise whose answer is put together at once
POLL = 35.0  # seconds that a poll is held open: each one more costs as much as a request; clients give up after 45
REASONS = ("success", "errored", "interrupted")
HEAD = ("train_unembed is on by default, and this server trains no output head: LoRA goes on attention and MLP only. "
        "Pass train_unembed=False to say so yourself.")


def tinker_router(training: Training, sampling: Sampling, served: Served) -> APIRouter:
    """The routes. Those that are not here are answered as unknown, with the list of what there is."""
    router = APIRouter(redirect_slashes=False)
    add_session_routes(router, training, served)
    add_model_routes(router, training, served)
    add_sampling_routes(router, training, sampling, served)
    add_saved_routes(router, training, served)
    add_runs_routes(router, training, served)
    add_promise_route(router, training, sampling)
    return router


def add_session_routes(router: APIRouter, training: Training, served: Served) -> None:
    """What a client asks when it starts, and while it lives."""

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.post("/client/config")
    async def config() -> dict[str, Any]:
        return {"proto_compress_fwdbwd": True, "use_pyqwest_transport": False}

    @router.post("/client/dynamic_config")
    async def dynamic_config() -> dict[str, Any]:
        return {}

    @router.post("/telemetry")
    async def telemetry() -> dict[str, str]:
        return {"status": "accepted"}

    @router.get("/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        return {"supported_models": [{"model_name": served.name, "max_context_length": served.context,
                                      "trainable": True, "sampleable": True}]}

    @router.post("/create_session")
    async def create_session(request: Request) -> dict[str, Any]:
        session, owner = secrets.token_hex(16), owner_of(request)
        await checked(lambda: training.ledger.open_session(session, owner))
        return {"type": "create_session", "session_id": session, "info_message": HEAD}

    @router.post("/session_heartbeat")
    async def heartbeat(request: Request) -> dict[str, Any]:
        body, owner = await request.body(), owner_of(request)
        await checked(lambda: beaten(training, json_of(body).get("session_id"), owner))
        return {"type": "session_heartbeat"}

    @router.post("/sessions/{session}/finish")
    async def finish(session: str, request: Request) -> dict[str, Any]:
        body, owner = await request.body(), owner_of(request)
        await checked(lambda: training.ledger.finish_session(session, owner, reason_of(json_of(body))))
        return {"type": "finish_session"}


def beaten(training: Training, session: Any, owner: str) -> None:
    """A client is there."""
    training.ledger.check_session(session, owner)
    training.runs.beat(session)
    training.sweep_saved()


def reason_of(given: dict[str, Any]) -> str:
    """Why a client ends its session, of {"reason": {"type"}}. ValueError for another one."""
    reason = given.get("reason")
    named = reason.get("type") if isinstance(reason, dict) else reason
    if named not in REASONS:
        raise ValueError(f"reason.type is {named!r}; allowed are {', '.join(REASONS)}")
    return str(named)


def add_model_routes(router: APIRouter, training: Training, served: Served) -> None:
    """Models, and what is asked of them: promises."""

    @router.post("/create_model")
    async def create_model(request: Request) -> dict[str, Any]:
        body, owner = await request.body(), owner_of(request)
        return await checked(lambda: created(training, served, json_of(body), owner))

    @router.post("/get_info")
    async def get_info(request: Request) -> dict[str, Any]:
        body, owner = await request.body(), owner_of(request)
        model = await checked(lambda: training.ledger.model(json_of(body).get("model_id"), owner))
        data = {"arch": served.architecture, "model_name": served.name, "tokenizer_id": served.tokenizer}
        return {"type": "get_info", "model_data": data, "model_id": model.id, "is_lora": True,
                "lora_rank": model.settings.rank, "model_name": served.name}

    @router.post("/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        body, owner = await request.body(), owner_of(request)
        encoding, kind = (request.headers.get(f"content-{name}", "") for name in ("encoding", "type"))
        return await promised(training, owner, lambda: asked_for_pass(
            training, as_protobuf(wire.plain(body, encoding), kind), owner))

    @router.post("/optim_step")
    async def optim_step(request: Request) -> dict[str, Any]:
        body, owner = await request.body(), owner_of(request)
        return await promised(training, owner, lambda: asked_in_json(training, OPTIM_STEP, body, owner))

    @router.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(request: Request) -> dict[str, Any]:
        body, owner = await request.body(), owner_of(request)
        return await promised(training, owner, lambda: asked_in_json(training, SNAPSHOT, body, owner))


def created(training: Training, served: Served, given: dict[str, Any], owner: str) -> dict[str, Any]:
    """The promise of a model."""
    training.ledger.check_session(given.get("session_id"), owner)
    if given.get("base_model") != served.name:
        raise ValueError(f"base_model is {given.get('base_model')!r}; this server has {served.name!r}")
    model = f"{given['session_id']}:train:{whole(given, 'model_seq_id')}"
    settings = lora_of(given)
    training.make_room(model, owner)
    training.ledger.add_model(model, owner, settings)
    training.pump(model)
    return {"request_id": f"{model}:0", "model_id": model, "type": CREATE}


def as_protobuf(body: bytes, kind: str) -> bytes:
    """The body of a forward_backward as the protocol has it."""
    return plain_json.request_of(json_of(body)) if kind.partition(";")[0].strip() == JSON else body


def asked_for_pass(training: Training, body: bytes, owner: str) -> dict[str, Any]:
    """The promise of a forward_backward; what is wrong in its data is told by the promise."""
    request = wire.parsed(wire.ForwardBackwardRequest, body)
    model = training.ledger.model(request.model_id, owner)
    asked = Asked(model.id, whole({"seq_id": request.seq_id}, "seq_id", 1), PASS, body)
    return {"request_id": training.ask(asked), "model_id": model.id}


def add_sampling_routes(router: APIRouter, training: Training, sampling: Sampling, served: Served) -> None:
    """Sampling sessions, and samples of them."""

    @router.post("/create_sampling_session")
    async def create_sampling_session(request: Request) -> dict[str, Any]:
        body, owner = await request.body(), owner_of(request)
        sampler = await checked(lambda: new_sampler(training, served, json_of(body), owner))
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    @router.get("/samplers/{sampler}")
    async def sampler_info(sampler: str, request: Request) -> dict[str, Any]:
        owner = owner_of(request)
        await checked(lambda: training.ledger.snapshot_of(sampler, owner))
        return {"sampler_id": sampler, "base_model": served.name, "model_path": None}

    async def asample(request: Request) -> Response:
        body, owner = await request.body(), owner_of(request)
        given = await checked_at_once(lambda: json_of(body), body)
        sampler = str(given.get("sampling_session_id"))
        adapter = await adapter_of(training, sampling, sampler, owner)
        return JSONResponse(await checked_at_once(lambda: sampling.ask(given, sampler, adapter, owner), body))

    router.add_route("/asample", asample, methods=["POST"])  # thousands come at once, and FastAPI's own take longer


def new_sampler(training: Training, served: Served, given: dict[str, Any], owner: str) -> str:
    """A sampling session of the base model, or of weights under a name."""
    training.ledger.check_session(given.get("session_id"), owner)
    sampler, snapshot = f"{given['session_id']}:sample:{whole(given, 'sampling_session_seq_id')}", None
    if given.get("base_model") not in (served.name, *([None] if given.get("model_path") else [])):
        raise ValueError(f"base_model is {given.get('base_model')!r}; this server has {served.name!r}")
    if given.get("model_path") is not None:
        found = training.shelf.find(given["model_path"], owner, SAMPLING)
        snapshot = str((training.shelf.folder / found.file).relative_to(training.folder))
    training.ledger.add_sampler(sampler, owner, snapshot)
    return sampler


async def adapter_of(training: Training, sampling: Sampling, sampler: str, owner: str) -> Path | None:
    """What a sampling session samples from, which was looked up before in most cases."""
    known = sampling.adapters.get((sampler, owner), training.folder / MISSING)
    if known is None or known.is_dir():
        return known
    return await checked(lambda: sampling.remember(sampler, owner, folder_of(training, sampler, owner)))


def folder_of(training: Training, sampler: str, owner: str) -> Path | None:
    """The folder of a sampling session's weights; None is the base model. UnknownError where it is no more."""
    snapshot = training.ledger.snapshot_of(sampler, owner)
    folder = None if snapshot is None else training.folder / snapshot
    if folder is not None and not folder.is_dir():
        raise UnknownError(f"sampling_session_id is {sampler!r}, and its weights were deleted: make a new sampling "
                           "client")
    return folder


def add_promise_route(router: APIRouter, training: Training, sampling: Sampling) -> None:
    """Where a client waits for what it was promised."""

    async def retrieve(request: Request) -> Response:
        body, owner = await request.body(), owner_of(request)
        promise = str((await checked_at_once(lambda: json_of(body), body)).get("request_id"))
        if promise.endswith(f":{UNLOAD}"):
            answer: Answer | None = await checked(lambda: training.runs.gone(promise.rpartition(":")[0], owner))
        elif ":sample:" in promise:
            answer = await sampled(sampling, promise, owner)
        else:
            answer = await checked(lambda: training.ledger.answer(promise, owner)) or await waited(
                training, promise, owner)
        if answer is None:
            return Response(f'{{"type": "try_again", "request_id": "{promise}", "queue_state": "active"}}',
                            media_type=JSON)
        if plain_json.wants_json(request.headers.get("accept", "")):
            answer = plain_json.in_json(answer, ":sample:" in promise)
        return Response(answer.body, media_type=answer.media)

    router.add_route("/retrieve_future", retrieve, methods=["POST"])


async def waited(training: Training, promise: str, owner: str) -> Answer | None:
    """The answer of a promise that was not kept a moment ago; None where it is not kept in the time of a poll, which is
    short where it waits for a request that has not come."""
    kept = training.kept(promise)
    answer = await checked(lambda: training.ledger.answer(promise, owner))
    if answer is not None:
        training.forget(promise)
        return answer
    model = await checked(lambda: training.ledger.model(promise.rpartition(":")[0], owner))
    missing = await checked(lambda: training.look_for_gap(model))
    await asyncio.wait({asyncio.wrap_future(kept)}, timeout=min(POLL, SOON) if missing else POLL)
    return await checked(lambda: training.ledger.answer(promise, owner))


async def sampled(sampling: Sampling, name: str, owner: str) -> Answer | None:
    """The answer of a sample; None where it is not there in the time of a poll. A client that is told 410 asks for the
    sample again: it was an earlier server's."""
    try:
        promise = sampling.find(name, owner)
    except UnknownError as error:
        raise ChatError(410, str(error), None, "gone") from None
    _, left = await asyncio.wait({asyncio.wrap_future(part) for part in promise.parts}, timeout=POLL)
    if left:
        return None
    return promise.answer() if len(promise.parts) <= FEW else await run_in_threadpool(promise.answer)
