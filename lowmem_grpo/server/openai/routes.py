"""The routes of the OpenAI-compatible API."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from typing import Any

import anyio
from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from lowmem_grpo.server.openai.chat_handler import DONE, ChatHandler, Choice, event, model_entry
from lowmem_grpo.server.openai.request_queue import LIVE
from lowmem_grpo.server.openai.sessions import OpenSessions
from lowmem_grpo.server.requests import CLOSED, NO_RETRY, ChatError, Limits, json_of
from lowmem_grpo.utils import JsonError

CLIENT_LEFT = 499  # nginx's code for it; no client reads it
SINCE = int(time.time())  # start of this program, as `created` of its models
Chats = Callable[[Any], ChatHandler]  # by the key's holder, which the gate looked up
Counted = Callable[[Any], AbstractContextManager[None]]  # by holder; inside, a request counts against its limit


class Completions:
    """The handlers of the routes. A request goes to the ChatHandler of the user whose key it carries."""

    def __init__(
        self, chats: Chats, sessions: OpenSessions, limits: Limits, closing: asyncio.Event,
        counted: Counted | None = None,
    ) -> None:
        """`counted` raises ChatError if a key has reached its limit of open requests. None: keys have no limit."""
        self.chats, self.sessions, self.limits, self.closing = chats, sessions, limits, closing
        self.counted = counted or (lambda holder: nullcontext())
        # by holder: a key that fills its own leaves those of others free
        self.slots: dict[Any, anyio.CapacityLimiter] = defaultdict(lambda: anyio.CapacityLimiter(limits.concurrent))

    async def answer(self, request: Request) -> Response:
        """Answer POST /chat/completions and POST /completions."""
        body, chat = await self.body(request), self.chats(request.scope["holder"])
        session = self.sessions.find(request.path_params.get("session"))
        texts = not request.url.path.endswith("/chat/completions")

        async def record(choices: list[Choice]) -> None:
            """Record replies of the live policy only, not of the base model or a checkpoint."""
            if session is not None and chat.names()[body["model"]] == LIVE:
                await anyio.sleep(0)  # lets the server notice a connection that was just closed
                if await request.is_disconnected():
                    raise client_left()
                session.record(body, choices, chat.parent)

        asked = (body, session.name if session else "", record, texts)
        if body.get("stream") is True:
            return Events(chat.stream(*asked), self.working_for(request))
        async with self.working_for(request):
            return JSONResponse(await chat.create(*asked))

    async def body(self, request: Request) -> dict[str, Any]:
        """Return a request's JSON object. ChatError if it is not one, comes too late, or has too many messages."""
        limits = self.limits
        try:
            async with asyncio.timeout(limits.seconds):
                body = await run_in_threadpool(json_of, await request.body(), True)
        except TimeoutError:
            raise ChatError(408, f"the request's body did not come within {limits.seconds:g} seconds", None,
                            "timeout") from None
        except JsonError as error:
            raise ChatError(400, str(error), error.field or None, "invalid_json") from None
        messages = body.get("messages")
        if isinstance(messages, list) and len(messages) > limits.messages:
            raise ChatError(400, f"messages has {len(messages)} entries; at most {limits.messages} are taken: send "
                                 "fewer, or raise messages of Limits", "messages", "too_many_messages")
        return body

    @asynccontextmanager
    async def working_for(self, request: Request) -> AsyncIterator[None]:
        """Hold a slot for a request. If the client leaves, the endpoint closes or the time limit passes, cancel the
        block and raise ChatError. ChatError at once if too many requests wait for a slot."""
        errors = [ChatError(504, f"the reply took more than {self.limits.seconds:g} seconds; ask for fewer tokens, or "
                                 "raise seconds of Limits", None, "timeout", NO_RETRY)]

        async def cancel_after(end: Awaitable[object], error: ChatError) -> None:
            await end
            errors.append(error)
            scope.cancel()

        slots = self.slots[request.scope["holder"]]
        with anyio.move_on_after(self.limits.seconds) as scope, self.counted(request.scope["holder"]):
            self.check_queue(slots)
            closed = ChatError(CLOSED, "the endpoint was closed, as its run ended; nothing answers here any more", None,
                               "closed")
            ends = {client_left(): departure(request.receive), closed: self.closing.wait()}
            tasks = [asyncio.ensure_future(cancel_after(end, error)) for error, end in ends.items()]
            try:
                async with slots:
                    yield
            finally:
                for task in tasks:
                    task.cancel()
        if scope.cancelled_caught:
            raise errors[-1]

    def check_queue(self, slots: anyio.CapacityLimiter) -> None:
        """Raise ChatError if too many requests of a key wait for a slot."""
        waiting = slots.statistics().tasks_waiting
        if slots.available_tokens < 1 and waiting >= self.limits.queue:
            raise ChatError(429, f"{self.limits.concurrent} requests are being answered and {waiting} wait; come again "
                                 "later, or raise concurrent or queue of Limits", None, "rate_limit_exceeded",
                            {"Retry-After": "1"})

    async def models(self, request: Request) -> dict[str, Any]:
        return {"object": "list", "data": [
            model_entry(name, SINCE) for name in self.chats(request.scope["holder"]).names()]}

    async def model(self, name: str, request: Request) -> dict[str, Any]:
        names = list(self.chats(request.scope["holder"]).names())
        if name not in names:
            raise ChatError(404, f"there is no model {name!r}; there are {', '.join(names)}", "model",
                            "model_not_found")
        return model_entry(name, SINCE)


class Events(Response):
    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[dict[str, Any], None], working: AbstractAsyncContextManager[None],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self.chunks, self.working, self.begun = chunks, working, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks. A ChatError is raised only before the first chunk; a later error is sent as an event."""
        try:
            async with self.working, aclosing(self.chunks) as chunks:
                async for chunk in chunks:
                    await self.send_piece(send, event(chunk))
                await self.send_piece(send, DONE)
        except ChatError as error:
            if not self.begun:
                raise
            await self.send_piece(send, event(error.body()))
        await self.send_piece(send, b"")

    async def send_piece(self, send: Send, piece: bytes) -> None:
        if not self.begun:
            self.begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": piece, "more_body": piece != b""})


def openai_router(completions: Completions, texts: bool = True) -> APIRouter:
    """Return the routes below /v1, with /completions if `texts`."""
    router = APIRouter(redirect_slashes=False)
    router.add_api_route("/chat/completions", completions.answer, methods=["POST"], response_model=None)
    if texts:
        router.add_api_route("/completions", completions.answer, methods=["POST"], response_model=None)
    router.add_api_route("/models", completions.models, response_model=None)
    router.add_api_route("/models/{name:path}", completions.model, response_model=None)
    return router


async def departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def client_left() -> ChatError:
    return ChatError(CLIENT_LEFT, "the client left before its reply")
