"""An openai client whose requests a ChatHandler answers in this process, without a socket."""

import asyncio
import json
from importlib import import_module
from typing import Any

import openai

from lowmem_grpo.server.openai.chat_handler import DONE, ChatHandler, event, model_entry
from lowmem_grpo.server.openai.sessions import RECORDER, SESSION
from lowmem_grpo.server.requests import ChatError

# the HTTP library under openai's client: httpx, or its successor httpx2
httpx: Any = import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])


def client_of(chat: ChatHandler, timeout: float | None = None) -> openai.AsyncOpenAI:
    """Return a client whose `chat.completions` come from the model (`choices[i].turn` names the turn), and which lists
    models; other routes answer 404. A call in a rollout's task belongs to that rollout. `timeout`: seconds per call."""
    return openai.AsyncOpenAI(base_url="http://in-this-process/v1", api_key="none", max_retries=0, timeout=timeout,
                              http_client=OpenClient(transport=ChatTransport(chat), trust_env=False))


class OpenClient(openai.DefaultAsyncHttpxClient):
    """An HTTP client that stays open when one of the openai clients that share it is closed."""

    async def aclose(self) -> None:
        """Do nothing: there is no socket to close."""


class ChatTransport(httpx.AsyncBaseTransport):
    """An httpx transport that passes requests to a ChatHandler."""

    def __init__(self, chat: ChatHandler) -> None:
        self.chat = chat

    async def handle_async_request(self, request: Any) -> Any:
        seconds = request.extensions.get("timeout", {}).get("read")
        try:
            return await asyncio.wait_for(self.answer(request), seconds)
        except TimeoutError:
            raise httpx.ReadTimeout(f"no answer within {seconds:g} seconds") from None
        except ChatError as error:
            return as_json(error.body(), error.status)

    async def answer(self, request: Any) -> Any:
        """Return the list of models, or the model's reply (a stream as a whole). ChatError for any other route."""
        place = f"{request.method} {request.url.path}"
        if place == "GET /v1/models":
            return as_json({"object": "list", "data": list(map(model_entry, self.chat.names()))})
        if place != "POST /v1/chat/completions":
            raise ChatError(404, f"there is no {place}: the model in training answers chat completions only: "
                                 "client.chat.completions.create(...)", None, "unknown_route")
        body, session, recorder = json.loads(request.content), SESSION.get(), RECORDER.get()

        async def record(choices: list[dict[str, Any]]) -> None:
            if recorder is not None:
                recorder.record(body, choices, self.chat.parent)

        if not body.get("stream"):
            return as_json(await self.chat.create(body, session, record))
        chunks = [event(chunk) async for chunk in self.chat.stream(body, session, record)]
        return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=b"".join([*chunks, DONE]))


def as_json(reply: dict[str, Any], status: int = 200) -> Any:
    return httpx.Response(status, content=json.dumps(reply), headers={"Content-Type": "application/json"})
