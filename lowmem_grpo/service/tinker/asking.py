"""What the routes of the Tinker protocol share: whose request it is, what is wrong with it, its promise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from lowmem_grpo.service.errors import ChatError
from lowmem_grpo.service.tinker.calls import json_of, whole
from lowmem_grpo.service.tinker.ledger import Asked, FinishedError, UnknownError
from lowmem_grpo.service.tinker.training import Training
from lowmem_grpo.service.tinker.usage import BusyError

T = TypeVar("T")
SMALL = 64 * 1024  # bytes of a body that is read in a few milliseconds


@dataclass(frozen=True)
class Served:
    """What the server is asked about its model."""

    name: str  # under which clients ask for it
    tokenizer: str  # a name on the hub, or a folder
    architecture: str
    context: int


def owner_of(request: Request) -> str:
    """Whose request it is."""
    name: str = request.scope["holder"].name
    return name


async def checked(call: Callable[[], T]) -> T:
    """What a call returns, in a thread. What is wrong is the client's, who is not to send it again."""
    with blamed():
        return await run_in_threadpool(call)


async def checked_at_once(call: Callable[[], T], body: bytes) -> T:
    """The same for a call that waits for nothing: where its body is small it is done here, since going to a thread and
    back takes longer while another one computes."""
    with blamed():
        return call() if len(body) <= SMALL else await run_in_threadpool(call)


@contextmanager
def blamed() -> Iterator[None]:
    """Inside, what is wrong is the client's."""
    try:
        yield
    except UnknownError as error:
        raise ChatError(404, str(error), None, "unknown") from None
    except FinishedError as error:
        raise ChatError(410, str(error), None, "finished") from None
    except BusyError as error:
        raise ChatError(429, str(error), None, "rate_limit_exceeded", {"Retry-After": "1"}) from None
    except ValueError as error:
        raise ChatError(422, str(error), None, "invalid") from None


async def promised(training: Training, owner: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The promise that a call returns. Where it is refused, its number may be missed: others wait for it no longer than
    needed."""
    try:
        return await checked(call)
    except ChatError as error:
        if error.status != 429:
            training.gaps.refuse(owner)
        raise


def asked_in_json(training: Training, kind: str, body: bytes, owner: str) -> dict[str, Any]:
    """The promise of a request whose body is JSON."""
    given = json_of(body)
    model = training.ledger.model(given.get("model_id"), owner)
    asked = Asked(model.id, whole(given, "seq_id", 1), kind, body)
    return {"request_id": training.ask(asked), "model_id": model.id}
