"""A model in a server: loaded, with a desk that owns it, the routes of the Tinker protocol, and OpenAI's."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from lowmem_grpo.loader import FastLanguageModel
from lowmem_grpo.memory.cutting import Limits as Cut
from lowmem_grpo.models.named import public_name
from lowmem_grpo.models.packer import Packer
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.service.database import Database
from lowmem_grpo.service.desk import Desk
from lowmem_grpo.service.errors import Limits
from lowmem_grpo.service.routes import Completions, openai_router
from lowmem_grpo.service.sessions import Sessions
from lowmem_grpo.service.tinker.adapters import Adapters
from lowmem_grpo.service.tinker.chats import Chats
from lowmem_grpo.service.tinker.datum import Bounds
from lowmem_grpo.service.tinker.ledger import Ledger
from lowmem_grpo.service.tinker.route_utils import Served, client_errors
from lowmem_grpo.service.tinker.routes import tinker_router
from lowmem_grpo.service.tinker.sampling import Sampling
from lowmem_grpo.service.tinker.training import Training
from lowmem_grpo.service.tinker.usage import Usage
from lowmem_grpo.service.users import Allowances, User

MICRO_BATCH = 8192  # tokens that are computed at a time, of several sequences
AT_A_TIME = 2048  # requests over OpenAI's routes that are answered at a time; the desk decodes them together


@dataclass
class ServedModel:
    """A model with all that answers for it."""

    desk: Desk
    training: Training
    router: APIRouter
    completions: Completions

    def routers(self) -> dict[str, APIRouter]:
        return {"/api/v1": self.router, "/v1": openai_router(self.completions)}

    def close(self) -> None:
        """Finish what is being done, and begin no more; the next server goes on."""
        self.training.close()
        self.desk.close()


def serve_model(
    name: str, database: Database, folder: Path, allowances: Allowances | None = None, **loading: Any
) -> ServedModel:
    """Load a model by its name, and take up what clients had trained. `folder` is for its clients' states; `allowances`
    are what each may have; `loading` are options of FastLanguageModel.from_pretrained."""
    model, _ = FastLanguageModel.from_pretrained(name, **loading)
    lora = FastLanguageModel.get_peft_model(model, r=1)  # holds the place of an adapter while no client's computes
    policy = Policy(lora.inner)
    desk = Desk(lora, policy=policy)
    cut = Cut(MICRO_BATCH)
    adapters = Adapters(policy, Packer(policy.device, desk.memory.train), cut, lora.loaded.offload)
    config = policy.base.config
    bounds = Bounds(policy.head.weight.shape[0], lora.loaded.max_seq_length)
    training = Training(desk, adapters, Ledger(database), folder, bounds, allowances)
    served = Served(public_name(name), name, lora.loaded.tokenizer.name_or_path, config.model_type, bounds.context)
    router = tinker_router(training, Sampling(desk, bounds, training.usage), served)
    limits = Limits(concurrent=AT_A_TIME)
    completions = Completions(Chats(desk, training.shelf, name), Sessions(limits), limits, asyncio.Event(),
                              partial(counted, training.usage))
    return ServedModel(desk, training, router, completions)


@contextmanager
def counted(usage: Usage, user: User) -> Iterator[None]:
    """Inside, a request over OpenAI's routes is among those of its user. ChatError (429) where no more may wait."""
    with client_errors():
        usage.begin_sample(user.name)
    try:
        yield
    finally:
        usage.end_sample(user.name)
