"""The routes of weights under a name: saved, loaded, listed, deleted."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from lowmem_grpo.service.tinker.asking import Served, asked_in_json, checked, owner_of, promised
from lowmem_grpo.service.tinker.calls import json_of, load_of, whole
from lowmem_grpo.service.tinker.shelf import TRAINING, Saved
from lowmem_grpo.service.tinker.training import LOAD, SAVE, Training

TYPES = {True: "training", False: "sampler"}


def add_saved_routes(router: APIRouter, training: Training, served: Served) -> None:
    """Those that promise, and those that answer at once."""

    @router.post("/save_weights")
    async def save_weights(request: Request) -> dict[str, Any]:
        body, owner = await request.body(), owner_of(request)
        return await promised(training, owner, lambda: asked_in_json(training, SAVE, body, owner))

    @router.post("/load_weights")
    async def load_weights(request: Request) -> dict[str, Any]:
        body, owner = await request.body(), owner_of(request)
        return await promised(training, owner, lambda: asked_to_load(training, served, body, owner))

    @router.post("/weights_info")
    async def weights_info(request: Request) -> dict[str, Any]:
        body, owner = await request.body(), owner_of(request)
        return await checked(lambda: told(training.shelf.find(json_of(body).get("tinker_path"), owner), served))

    @router.get("/checkpoints")
    async def checkpoints(request: Request) -> dict[str, Any]:
        owner = owner_of(request)
        found = await checked(lambda: training.shelf.all(owner))
        return {"checkpoints": list(map(listed, found)),
                "cursor": {"offset": 0, "limit": len(found), "total_count": len(found)}}

    @router.get("/training_runs/{model}/checkpoints")
    async def checkpoints_of(model: str, request: Request) -> dict[str, Any]:
        owner = owner_of(request)
        await checked(lambda: training.ledger.model(model, owner))
        return {"checkpoints": list(map(listed, await checked(lambda: training.shelf.all(owner, model))))}

    @router.delete("/training_runs/{model}/checkpoints/{kind}/{name}")
    async def delete(model: str, kind: str, name: str, request: Request) -> Response:
        owner = owner_of(request)
        await checked(lambda: training.shelf.delete(f"tinker://{model}/{kind}/{name}", owner))
        return Response(status_code=204)

    @router.put("/training_runs/{model}/checkpoints/{kind}/{name}/ttl")
    async def keep_for(model: str, kind: str, name: str, request: Request) -> Response:
        body, owner = await request.body(), owner_of(request)
        await checked(lambda: training.shelf.keep_for(f"tinker://{model}/{kind}/{name}", owner,
                                                      ttl_of(json_of(body))))
        return Response(status_code=204)


def asked_to_load(training: Training, served: Served, body: bytes, owner: str) -> dict[str, Any]:
    """The promise of a load into a model that is there, or of a new model of saved weights."""
    given = json_of(body)
    if given.get("session_id") is None:
        return asked_in_json(training, LOAD, body, owner)
    training.ledger.check_session(given["session_id"], owner)
    if given.get("base_model") not in (None, served.name):
        raise ValueError(f"base_model is {given.get('base_model')!r}; this server has {served.name!r}")
    found = training.shelf.find(load_of(given).path, owner, TRAINING)
    model = f"{given['session_id']}:train:{whole(given, 'model_seq_id')}"
    training.make_room(model, owner)
    training.ledger.add_model(model, owner, found.settings, LOAD, body)
    training.pump(model)
    return {"request_id": f"{model}:0", "model_id": model, "type": LOAD}


def ttl_of(given: dict[str, Any]) -> int | None:
    """For how long weights are kept; None is for ever. ValueError for no such thing."""
    if "ttl_seconds" not in given:
        raise ValueError("ttl_seconds is missing; give a number of seconds, or null to keep the weights")
    return None if given["ttl_seconds"] is None else whole(given, "ttl_seconds", 1)


def told(saved: Saved, served: Served) -> dict[str, Any]:
    """What a client must know to train on from weights."""
    return {"base_model": served.name, "is_lora": True, "lora_rank": saved.settings.rank, "train_unembed": False,
            "train_mlp": saved.settings.mlp, "train_attn": saved.settings.attention}


def listed(saved: Saved) -> dict[str, Any]:
    """Weights in a list."""
    return {"checkpoint_id": "/".join(saved.path.split("/")[-2:]), "checkpoint_type": TYPES[saved.kind == TRAINING],
            "time": moment(saved.made), "tinker_path": saved.path, "size_bytes": saved.size, "public": False,
            "expires_at": None if saved.expires is None else moment(saved.expires)}


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
