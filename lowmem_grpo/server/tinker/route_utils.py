"""The parts that routes of the Tinker protocol share: requests, errors, and replies."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from lowmem_grpo.server.requests import ChatError, json_of
from lowmem_grpo.server.tinker.request_store import FinishedError, UnknownError
from lowmem_grpo.server.tinker.usage import BusyError

T = TypeVar("T")
Json = dict[str, Any]
SMALL = 64 * 1024  # the most bytes of a body that is parsed in a few milliseconds


@dataclass(frozen=True)
class Served:
    name: str  # the name that clients use, also to load its tokenizer
    loaded_as: str  # the name with which the server was started, also accepted
    tokenizer: str  # a name on the hub, or a folder
    architecture: str
    context: int

    def check_base(self, name: Any) -> None:
        """Raise ValueError for the name of another model."""
        if name not in (self.name, self.loaded_as):
            raise ValueError(f"base_model is {name!r}; this server has {self.loaded_as!r}")


@dataclass(frozen=True)
class ApiRequest:
    """A request whose body has been read."""

    owner: str  # the user of its key
    body: bytes
    headers: Headers
    path: dict[str, str]  # the path's parameters
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
    """Return a route that answers in a thread. `refuse` gets the user of a request that is refused for good."""
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
    """Run a call in a thread, or `here` if it does not block, and return its result. Raises ChatError."""
    with client_errors():
        return call() if here else await run_in_threadpool(call)


@contextmanager
def client_errors() -> Iterator[None]:
    """Turn errors in the block into ChatErrors with 4xx statuses; only 429, for BusyError, asks for a retry."""
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
