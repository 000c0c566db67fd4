"""A served model: the worker that owns it, the routes of the Tinker protocol, and OpenAI's routes."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from lowmem_grpo.loader import FastLanguageModel
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.stored_model import public_name
from lowmem_grpo.server.openai.chat_handler import ChatHandler
from lowmem_grpo.server.openai.conversation_cache import ConversationCache
from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.server.openai.routes import Completions, openai_router
from lowmem_grpo.server.openai.sessions import OpenSessions
from lowmem_grpo.server.requests import ChatError, Limits
from lowmem_grpo.server.server_dir import Database
from lowmem_grpo.server.tinker.adapters import Adapters
from lowmem_grpo.server.tinker.checkpoint_store import SAMPLING, TRAINING, CheckpointStore
from lowmem_grpo.server.tinker.datum import ModelBounds
from lowmem_grpo.server.tinker.request_store import RequestStore, UnknownError
from lowmem_grpo.server.tinker.route_utils import Served, client_errors
from lowmem_grpo.server.tinker.routes import tinker_router
from lowmem_grpo.server.tinker.sampling import SampleService
from lowmem_grpo.server.tinker.training import Training
from lowmem_grpo.server.tinker.usage import Usage
from lowmem_grpo.server.users import Allowances, User

SCHEME = "tinker://"
MICRO_BATCH = 8192  # the most tokens of a micro-batch
TURN = 32  # completions of one user that are decoded before another user has a turn
AT_A_TIME = 2048  # concurrent requests over OpenAI's routes; the worker decodes them together


class SavedModels(Mapping[str, Path | str | None]):
    """The models of a user by name: the base model, and weights saved for sampling as RUN@NAME or
    tinker://RUN/sampler_weights/NAME. Each look-up reads the checkpoint store."""

    def __init__(self, base: str, checkpoints: CheckpointStore, owner: str) -> None:
        self.base, self.checkpoints, self.owner = base, checkpoints, owner

    def __getitem__(self, name: str) -> Path | None:
        """Return the folder of an adapter; None is the base model. ChatError for weights saved for training."""
        if name == self.base:
            return None
        run, _, short = name.rpartition("@")
        paths = [f"{SCHEME}{run}/{kind}/{short}" for kind in (SAMPLING, TRAINING)]
        for path in [name] if name.startswith(SCHEME) else paths:
            with suppress(UnknownError):
                saved = self.checkpoints.find(path, self.owner)
                if saved.kind == TRAINING:
                    raise ChatError(400, f"{name} was saved to train on; save_weights_for_sampler saves what to sample "
                                         "with", "model")
                return self.checkpoints.folder / saved.file
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield self.base
        for saved in self.checkpoints.all(self.owner):
            if saved.kind == SAMPLING:
                yield f"{saved.model}@{saved.path.rpartition('/')[2]}"

    def __len__(self) -> int:
        return sum(1 for _ in self)


def chats_over(worker: EngineWorker, checkpoints: CheckpointStore, base: str) -> Callable[[User], ChatHandler]:
    """Return a ChatHandler for each user, over one worker: users share no cached conversations."""
    keys = itertools.count()  # one for each conversation in the engine

    @cache
    def chat_of(user: User) -> ChatHandler:
        return ChatHandler(worker, lambda: SavedModels(base, checkpoints, user.name),
                           ConversationCache(worker.tokenizer, keys=keys), user.name)

    return chat_of


@dataclass
class ServedModel:
    worker: EngineWorker
    training: Training
    router: APIRouter
    completions: Completions

    def routers(self) -> dict[str, APIRouter]:
        return {"/api/v1": self.router, "/v1": openai_router(self.completions)}

    def close(self) -> None:
        """Finish the request in progress, and start no more; the next server runs the rest."""
        self.training.close()
        self.worker.close()


def serve_model(
    name: str, database: Database, folder: Path, allowances: Allowances | None = None, alone: bool = False,
    heads: int = 0, **loading: Any,
) -> ServedModel:
    """Load a model, and resume its clients' models from `folder`. If there is only one user (`alone`), no completions
    of others are waited for, and all of the user's are decoded together. At most `heads` models with a trained output
    head are in memory. `loading` goes to `from_pretrained`."""
    model, _ = FastLanguageModel.from_pretrained(name, **loading)
    lora = FastLanguageModel.get_peft_model(model, r=1)  # the active adapter while no client's is
    policy = Policy(lora.inner)
    worker = EngineWorker(lora, policy=policy)
    worker.waiting.turn = None if alone else TURN
    adapters = Adapters(policy, worker.memory.train, MICRO_BATCH, lora.loaded.offload, heads)
    config = policy.base.config
    bounds = ModelBounds(policy.head.weight.shape[0], lora.loaded.max_seq_length)
    training = Training(worker, adapters, RequestStore(database), folder, bounds, allowances)
    served = Served(public_name(name), name, lora.loaded.tokenizer.name_or_path, config.model_type, bounds.context)
    router = tinker_router(training, SampleService(worker, bounds, training.usage), served)
    limits = Limits(concurrent=AT_A_TIME)
    completions = Completions(chats_over(worker, training.checkpoints, name), OpenSessions(limits), limits,
                              asyncio.Event(), partial(counted, training.usage))
    return ServedModel(worker, training, router, completions)


@contextmanager
def counted(usage: Usage, user: User) -> Iterator[None]:
    """Count a request over OpenAI's routes towards its user's limit. ChatError (429) if the limit is reached."""
    with client_errors():
        usage.begin_sample(user.name)
    try:
        yield
    finally:
        usage.end_sample(user.name)
