"""What the routes of the Tinker protocol share: a request that was read, what is wrong with it, its reply."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from lowmem_grpo.server.bodies import json_of
from lowmem_grpo.server.errors import ChatError
from lowmem_grpo.server.tinker.request_store import FinishedError, UnknownError
from lowmem_grpo.server.tinker.usage import BusyError

T = TypeVar("T")
Json = dict[str, Any]
SMALL = 64 * 1024  # bytes of a body that is read in a few milliseconds


@dataclass(frozen=True)
class Served:
    """The facts about the served model that clients ask for."""

    name: str  # under which clients ask for it, and find its tokenizer
    loaded_as: str  # the name with which the server was started, which is taken too
    tokenizer: str  # a name on the hub, or a folder
    architecture: str
    context: int

    def check_base(self, name: Any) -> None:
        """Raise ValueError for the name of another model."""
        if name not in (self.name, self.loaded_as):
            raise ValueError(f"base_model is {name!r}; this server has {self.loaded_as!r}")


@dataclass(frozen=True)
class ApiRequest:
    """A request that was read."""

    owner: str  # whose key it has
    body: bytes
    headers: Headers
    path: dict[str, str]  # what its path names
    query: dict[str, str]

    @classmethod
    async def read(cls, request: Request) -> "ApiRequest":
        return cls(request.scope["holder"].name, await request.body(), request.headers, request.path_params,
                   dict(request.query_params))

    @cached_property
    def json(self) -> Json:
        return json_of(self.body)


Answers = Callable[[ApiRequest], Json | None]


def route(answers: Answers, refuse: Callable[[str], None] | None = None) -> Callable[[Request], Any]:
    """Return a route that answers in a thread. `refuse` is told whose request was refused for good: its number may be
    missed, and others wait for it no longer than needed."""
    async def endpoint(request: Request) -> Response:
        asked = await ApiRequest.read(request)
        try:
            reply = await checked(lambda: answers(asked))
        except ChatError as error:
            if refuse is not None and error.status != 429:
                refuse(asked.owner)
            raise
        return Response(status_code=204) if reply is None else JSONResponse(reply)

    return endpoint


async def checked(call: Callable[[], T], here: bool = False) -> T:
    """Return what a call returns, in a thread. With `here` it is done at once, as a call that waits for nothing: going
    to a thread and back takes longer while another one computes. What is wrong is the client's."""
    with client_errors():
        return call() if here else await run_in_threadpool(call)


@contextmanager
def client_errors() -> Iterator[None]:
    """Inside, what is wrong is the client's, who is not to send it again unless it is told to."""
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
