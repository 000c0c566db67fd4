"""`Client`: chat completions in the process, by an object that is called like `openai.AsyncOpenAI`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import openai
from openai.pagination import AsyncPage
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from lowmem_grpo.service.chat import Chat
from lowmem_grpo.service.errors import ChatError
from lowmem_grpo.service.rollouts import RECORDER, SESSION

ERRORS: dict[int, type[openai.APIStatusError]] = {
    400: openai.BadRequestError, 404: openai.NotFoundError, 429: openai.RateLimitError,
}
TRANSPORT = ("extra_headers", "extra_query", "timeout")  # of a call over HTTP; only the timeout means something here
OPTIONS = ("timeout", "max_retries", "api_key", "base_url", "organization", "project", "default_headers",
           "default_query", "http_client")  # of with_options; likewise
INSTEAD = "the model in training answers chat completions only: client.chat.completions.create(...)"


class NotServedError(AttributeError):
    """A part of OpenAI's client that is not here."""


class Part:
    """A part of the client; what it does not have is refused with advice."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotServedError(f"{type(self).__name__} has no {name}: {INSTEAD}")


class Client(Part):
    """Answers by `Chat`, without a socket; replies and errors are of openai's own types.

    Each `choices[i].turn` names the turn that the choice was made of. A client is cheap: make one for each use.
    """

    def __init__(self, chat: Chat, session: str = "", timeout: float | None = None) -> None:
        """Turns of one `session` belong together; without one it is that of the rollout in whose task a call is made.
        `timeout` is in seconds, for each call."""
        self.served, self.session, self.timeout = chat, session, timeout
        self.chat, self.models = ChatPart(Completions(self)), Models(chat)

    def with_options(self, **options: Any) -> "Client":
        """The same with another timeout. What only HTTP has is accepted and means nothing."""
        if other := sorted(set(options) - set(OPTIONS)):
            raise TypeError(f"with_options got {other[0]}; it takes {', '.join(OPTIONS)}")
        return Client(self.served, self.session, seconds_of(options.get("timeout", self.timeout)))

    copy = with_options

    async def close(self) -> None:
        """Nothing to do: the desk is closed by who opened it."""

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()


class ChatPart(Part):
    """`client.chat`."""

    def __init__(self, completions: "Completions") -> None:
        self.completions = completions


class Models(Part):
    """`client.models`."""

    def __init__(self, chat: Chat) -> None:
        self.served = chat

    async def list(self, **others: Any) -> AsyncPage[Model]:
        """The models that can be asked for."""
        check_transport(others)
        data = [Model(id=name, created=0, object="model", owned_by="lowmem_grpo") for name in self.served.models()]
        return AsyncPage[Model](data=data, object="list")


class Completions(Part):
    """`client.chat.completions`."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def create(self, **given: Any) -> Any:
        """A ChatCompletion, or with stream=True chunks to loop over with `async for`.

        It takes the keywords of OpenAI's method; `extra_body` adds fields. Raises openai's errors.
        """
        session = self.client.session or SESSION.get()
        body, timeout = body_of(given), seconds_of(given.get("timeout", self.client.timeout))
        if body.get("stream"):
            chunks = Chunks(self.client.served.stream(body, session), timeout, partial(self.record_end, body))
            await chunks.begin()
            return chunks
        reply = await within(timeout, self.client.served.create(body, session))
        self.record(body, reply["choices"])
        return ChatCompletion.model_validate(reply)

    def record(self, body: dict[str, Any], choices: list[dict[str, Any]]) -> None:
        """Tell who keeps the calls of this rollout, if anybody does."""
        if (recorder := RECORDER.get()) is not None:
            recorder.record(body, choices, self.client.served.parent)

    def record_end(self, body: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        """The same of the last chunk of a choice, which has its message in the turn that it names."""
        ended = [part for part in parts if part.get("finish_reason") is not None]
        turns = [(part, self.client.served.turn(part["turn"])) for part in ended if "turn" in part]
        self.record(body, [{**{name: value for name, value in part.items() if name != "delta"},
                            "message": turn.message} for part, turn in turns if turn is not None])


class Chunks:
    """The chunks of a reply, as openai's AsyncStream gives them."""

    def __init__(
        self, chunks: AsyncIterator[dict[str, Any]], timeout: float | None,
        told: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        """`told` is called with the choices of each chunk that is read."""
        self.chunks: Any = chunks
        self.timeout, self.told, self.first = timeout, told, None

    async def begin(self) -> None:
        """Wait for the first chunk, so that a request that is refused raises at once."""
        self.first = await within(self.timeout, anext(self.chunks))

    def __aiter__(self) -> "Chunks":
        return self

    async def __anext__(self) -> ChatCompletionChunk:
        chunk, self.first = self.first, None
        if chunk is None:
            chunk = await within(self.timeout, anext(self.chunks))
        self.told(chunk["choices"])
        return ChatCompletionChunk.model_validate(chunk)

    async def __aenter__(self) -> "Chunks":
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()

    async def close(self) -> None:
        """Nobody reads on."""
        await self.chunks.aclose()


async def within(timeout: float | None, work: Any) -> Any:
    """What is awaited, with openai's errors."""
    try:
        return await (work if timeout is None else asyncio.wait_for(work, timeout))
    except ChatError as error:
        raise openai_error(error) from None
    except TimeoutError:
        raise openai.APITimeoutError(request=NOWHERE) from None


NOWHERE: Any = SimpleNamespace(method="POST", url="in this process: /v1/chat/completions", headers={})


def openai_error(error: ChatError) -> openai.APIStatusError:
    """The error that openai's client raises for such a reply."""
    kind = ERRORS.get(error.status, openai.InternalServerError if error.status >= 500 else openai.APIStatusError)
    response: Any = SimpleNamespace(status_code=error.status, headers=dict(error.headers), request=NOWHERE)
    body = error.body()
    return kind(f"Error code: {error.status} - {body}", response=response, body=body["error"])


def body_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON that openai's client would send for these keywords."""
    sent = {name: as_json(value) for name, value in given.items()
            if name not in (*TRANSPORT, "extra_body") and not left_out(value)}
    extra = given.get("extra_body")
    return sent | (as_json(dict(extra)) if extra else {})


def left_out(value: Any) -> bool:
    """Whether a keyword was not given: openai's own marks say so."""
    return isinstance(value, openai.NotGiven | openai.Omit)


def as_json(value: Any) -> Any:
    """Messages may be openai's own objects, as replies have them."""
    if hasattr(value, "model_dump") and not isinstance(value, type):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple) or (hasattr(value, "__iter__") and not isinstance(value, str | bytes)):
        return [as_json(inner) for inner in value]
    return value


def check_transport(others: Mapping[str, Any]) -> None:
    """TypeError for a keyword that is not one of a call over HTTP."""
    if other := sorted(set(others) - {*TRANSPORT, "extra_body"}):
        raise TypeError(f"list() got {other[0]}; it takes {', '.join(TRANSPORT)}")


def seconds_of(timeout: Any) -> float | None:
    """A timeout in seconds, from a number, from httpx's object or from openai's marks."""
    if timeout is None or isinstance(timeout, int | float):
        return timeout
    found = getattr(timeout, "read", None)
    return found if isinstance(found, int | float) else None
