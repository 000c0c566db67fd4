"""An HTTP client that does not read more than a judge may say. Only `chat_api` imports it, because it needs openai."""

import asyncio
from importlib import import_module
from typing import Any

from openai import DefaultAsyncHttpxClient, OpenAIError

REPLY_BYTES = 4 << 20  # for one answer; the longest thinking with its scores takes a tenth of it
REDIRECTS = 5


class ReplyTooLargeError(OpenAIError):
    """A server's answer that is not read to its end. The client of openai passes it on, and does not ask again."""


class LimitedClient(DefaultAsyncHttpxClient):
    """Reads each answer to its end, up to REPLY_BYTES and for `seconds` in all. It asks for answers that are not packed
    and takes no others: a packed one could become a thousand times as large. Each answer is read as UTF-8, because a
    server could also name a packing as its charset."""

    def __init__(self, seconds: float) -> None:
        super().__init__(headers={"Accept-Encoding": "identity"}, timeout=seconds)
        self.seconds = seconds

    async def send(self, request: Any, **options: Any) -> Any:
        """Return the answer with its body. Raises ReplyTooLargeError if that is too large or packed, and the client's
        ReadTimeout if it is not whole in time, even if some of it comes again and again."""
        try:
            async with asyncio.timeout(self.seconds):
                return await self.send_with_redirects(request, options | {"stream": True, "follow_redirects": False})
        except TimeoutError as error:
            library = import_module(type(request).__module__.partition(".")[0])  # httpx, or its successor
            raise library.ReadTimeout("the answer was not whole in time", request=request) from error

    async def send_with_redirects(self, request: Any, options: dict[str, Any]) -> Any:
        """Return the answer at the end of a few redirects."""
        for _ in range(1 + REDIRECTS):
            response = await super().send(request, **options)
            try:
                body = await body_of(response)
            finally:
                await response.aclose()
            if response.next_request is None:
                break
            request = response.next_request
        headers = response.headers.copy()
        headers["Content-Type"] = headers.get("Content-Type", "").partition(";")[0]
        return type(response)(response.status_code, headers=headers, content=body, request=request,
                              extensions=response.extensions)


async def body_of(response: Any) -> bytes:
    """Return the whole body. Raises ReplyTooLargeError as soon as it is too large."""
    packed = response.headers.get("content-encoding", "identity")
    if packed != "identity":
        raise ReplyTooLargeError(f"its answer is packed ({packed[:20]}), though it was asked not to pack it")
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > REPLY_BYTES:
            raise ReplyTooLargeError(f"its answer has more than {REPLY_BYTES} bytes")
    return bytes(body)
