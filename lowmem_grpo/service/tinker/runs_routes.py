"""The routes of a user's models, as the protocol calls them training runs: listed, looked at, unloaded."""

from typing import Any

from fastapi import APIRouter, Request

from lowmem_grpo.service.tinker.asking import Served, checked, owner_of
from lowmem_grpo.service.tinker.calls import json_of, whole
from lowmem_grpo.service.tinker.ledger import UnknownError
from lowmem_grpo.service.tinker.runs import UNLOAD, Run
from lowmem_grpo.service.tinker.saved_routes import listed, moment
from lowmem_grpo.service.tinker.shelf import SAMPLING, TRAINING
from lowmem_grpo.service.tinker.training import Training

MOST = 1000  # entries of a list


def add_runs_routes(router: APIRouter, training: Training, served: Served) -> None:
    """Only of whoever asks."""

    @router.get("/training_runs")
    async def training_runs(request: Request) -> dict[str, Any]:
        owner, query = owner_of(request), dict(request.query_params)
        first, most = await checked(lambda: page_of(query))
        found = await checked(lambda: training.runs.all(owner))
        told = await checked(lambda: [run_told(training, served, run) for run in found[first:first + most]])
        return {"training_runs": told, "cursor": {"offset": first, "limit": most, "total_count": len(found)}}

    @router.get("/training_runs/{model}")
    async def training_run(model: str, request: Request) -> dict[str, Any]:
        owner = owner_of(request)
        return await checked(lambda: run_told(training, served, training.runs.one(model, owner)))

    @router.post("/unload_model")
    async def unload_model(request: Request) -> dict[str, Any]:
        body, owner = await request.body(), owner_of(request)
        return await checked(lambda: unloaded(training, json_of(body).get("model_id"), owner))


def page_of(query: dict[str, str]) -> tuple[int, int]:
    """(offset, limit) of a list. ValueError for what is no number."""
    given = {name: int(value) if value.isascii() and value.isdigit() and len(value) < 10 else value
             for name, value in query.items()}
    first, most = whole({"offset": 0} | given, "offset"), whole({"limit": 20} | given, "limit", 1)
    return first, min(most, MOST)


def run_told(training: Training, served: Served, run: Run) -> dict[str, Any]:
    """A model in a list."""
    saved = training.shelf.all(run.model.owner, run.model.id)
    newest = {kind: next((listed(one) for one in saved if one.kind == kind), None) for kind in (TRAINING, SAMPLING)}
    return {"training_run_id": run.model.id, "base_model": served.name, "model_owner": run.model.owner, "is_lora": True,
            "lora_rank": run.model.settings.rank, "last_request_time": moment(run.asked), "corrupted": False,
            "last_checkpoint": newest[TRAINING], "last_sampler_checkpoint": newest[SAMPLING]}


def unloaded(training: Training, model: Any, owner: str) -> dict[str, Any]:
    """The promise that a model is gone, kept already. It may be asked for again."""
    try:
        training.unload(training.ledger.model(model, owner))
    except UnknownError:
        training.runs.gone(str(model), owner)
    return {"request_id": f"{model}:{UNLOAD}", "model_id": model, "type": UNLOAD}
