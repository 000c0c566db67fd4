"""The routes of OpenAI's interface, and the application that has them."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.responses import JSONResponse

from lowmem_grpo.service.attention import Attention, ClientGoneError, Slots
from lowmem_grpo.service.call import LIVE
from lowmem_grpo.service.chat import Chat
from lowmem_grpo.service.error_replies import answer_errors
from lowmem_grpo.service.errors import ChatError
from lowmem_grpo.service.gate import Gate
from lowmem_grpo.service.limits import Limits
from lowmem_grpo.service.sessions import Sessions
from lowmem_grpo.service.streamed import DONE, Events, Gathered, event
from lowmem_grpo.service.text_completions import TextCompletions

ROUTES = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models and GET /health"
Chats = Callable[[Any], Chat]  # by whose key the request has, as the gate found it
Counted = Callable[[Any], AbstractContextManager[None]]  # the same: it is among the requests of a key inside


class Completions:
    """Answers requests by the Chat of whoever asks."""

    def __init__(
        self, chats: Chats, sessions: Sessions, limits: Limits, closing: asyncio.Event, counted: Counted | None = None,
    ) -> None:
        """`counted` raises ChatError where a key has as many requests as it may; None takes any number."""
        self.chats, self.sessions, self.limits, self.closing = chats, sessions, limits, closing
        self.slots, self.counted = Slots(limits), counted or (lambda holder: nullcontext())

    async def chat(self, request: Request) -> Response:
        """The reply to POST /chat/completions."""
        body, chat = await self.body(request), self.chats(request.scope["holder"])
        return await Answering(self, request, body, chat, chat).response()

    async def text(self, request: Request) -> Response:
        """The reply to POST /completions."""
        body, chat = await self.body(request), self.chats(request.scope["holder"])
        return await Answering(self, request, body, chat, TextCompletions(chat)).response()

    async def body(self, request: Request) -> dict[str, Any]:
        """The request's JSON object."""
        try:
            async with asyncio.timeout(self.limits.seconds):
                return body_of(await request.body(), self.limits)
        except TimeoutError:
            raise ChatError(408, f"the request's body did not come within {self.limits.seconds:g} seconds", None,
                            "timeout") from None

    def models(self, request: Request) -> list[dict[str, Any]]:
        """What can be asked for."""
        return [{"id": name, "object": "model", "created": self.since, "owned_by": "lowmem-grpo"}
                for name in self.chats(request.scope["holder"]).models()]

    since = int(time.time())  # this program's start


class Answering:
    """One request that is being answered."""

    def __init__(
        self, completions: Completions, request: Request, body: dict[str, Any], chat: Chat,
        source: Chat | TextCompletions,
    ) -> None:
        """`source` makes the reply. Raises ChatError where the session that the address names is not open."""
        self.slots, self.body, self.chat, self.source = completions.slots, body, chat, source
        self.counted = partial(completions.counted, request.scope["holder"])
        self.session = completions.sessions.find(request.path_params.get("session"))
        self.name = self.session.name if self.session else ""
        self.client = Attention(request.receive, completions.closing, completions.limits.seconds)

    async def response(self) -> Response:
        """The reply, in one piece or in several."""
        if self.body.get("stream") is True:
            events = self.events()
            return Events(after(await anext(events), events))
        return JSONResponse(await self.whole())

    async def whole(self) -> dict[str, Any]:
        """The reply in one piece."""
        async with self.client as client:
            reply = await client.wait_for(self.create())
            await client.still_there()
            self.record(reply["choices"])
            return reply

    async def create(self) -> dict[str, Any]:
        with self.counted():
            async with self.slots.one():
                return await self.source.create(self.body, self.name)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The reply in pieces. Raises ChatError only before the first: a later error is an event of its own."""
        gathered, begun = Gathered(), False
        async with self.client as client, aclosing(self.chunks()) as chunks:
            try:
                while (chunk := await client.wait_for(anext(chunks, None))) is not None:
                    await client.still_there()
                    if self.session is not None:
                        self.record(gathered.finished_by(chunk))
                    begun = True
                    yield event(chunk)
                yield DONE
            except ClientGoneError:
                if not begun:
                    raise
            except ChatError as error:
                if not begun:
                    raise
                yield event(error.body())

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        with self.counted():
            async with self.slots.one():
                async for chunk in self.source.stream(self.body, self.name):
                    yield chunk

    def record(self, choices: list[dict[str, Any]]) -> None:
        """Keep what the policy said: replies of the base model, or of a checkpoint, are not its own."""
        if self.session is not None and self.chat.names()[self.body["model"]] == LIVE:
            self.session.record(self.body, choices, self.chat.histories.parent)


def text_router(completions: Completions) -> APIRouter:
    """The route of plain prompts, which belong to no session."""
    router = APIRouter(redirect_slashes=False)

    @router.post("/completions", response_model=None)
    async def text_completions(request: Request) -> Response:
        return await completions.text(request)

    return router


def chat_router(completions: Completions) -> APIRouter:
    """The other routes below /v1."""
    router = APIRouter(redirect_slashes=False)

    @router.post("/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        return await completions.chat(request)

    @router.get("/models")
    async def models(request: Request) -> dict[str, Any]:
        return {"object": "list", "data": completions.models(request)}

    @router.get("/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        models = completions.models(request)
        for found in models:
            if found["id"] == name:
                return found
        known = ", ".join(found["id"] for found in models)
        raise ChatError(404, f"there is no model {name!r}; there are {known}", "model", "model_not_found")

    return router


def make_app(completions: Completions, holds: Callable[[str], bool]) -> Gate:
    """The application. `holds` says whether a key opens it."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    router = chat_router(completions)
    app.include_router(router, prefix="/v1")
    app.include_router(text_router(completions), prefix="/v1")
    app.include_router(router, prefix="/s/{session}/v1")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    answer_errors(app, ROUTES)
    return Gate(app, holds, completions.limits)


async def after(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The events whose first one was taken already."""
    async with aclosing(events):
        yield first
        async for one in events:
            yield one


def body_of(given: bytes, limits: Limits) -> dict[str, Any]:
    """The JSON object of a request. Raises ChatError where it is none, or has too many messages."""
    try:
        body = json.loads(given)
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else error
        words = f"the request's body is no JSON ({said}); send a JSON object"
        raise ChatError(400, words, None, "invalid_json") from None
    if not isinstance(body, dict):
        raise ChatError(400, f"the request's body is a JSON {type(body).__name__}; it must be an object with model and "
                             "messages", None, "invalid_json")
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) > limits.messages:
        raise ChatError(400, f"messages has {len(messages)} entries; at most {limits.messages} are taken: send fewer, "
                             "or raise messages of Limits", "messages", "too_many_messages")
    return body
