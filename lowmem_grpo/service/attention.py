"""A reply is worked on for as long as its client waits for it and the endpoint is open."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.types import Receive

from lowmem_grpo.service.errors import ChatError
from lowmem_grpo.service.gate import CLOSED, NO_RETRY
from lowmem_grpo.service.limits import Limits

T = TypeVar("T")
STEPS = 3  # of the loop, from a lost connection to the end of the task that waits for it


class ClientGoneError(Exception):
    """Nobody waits for the reply any more."""


class Attention:
    """The client of one request. A context manager, entered once the request's body is read."""

    def __init__(self, receive: Receive, closing: asyncio.Event, seconds: float) -> None:
        self.receive, self.closing, self.seconds = receive, closing, seconds

    async def __aenter__(self) -> "Attention":
        self.until = asyncio.get_running_loop().time() + self.seconds
        self.ends = [asyncio.ensure_future(departure(self.receive)), asyncio.ensure_future(self.closing.wait())]
        return self

    async def __aexit__(self, *raised: object) -> None:
        await cancelled(*self.ends)

    async def wait_for(self, work: Awaitable[T]) -> T:
        """What the work returns or raises. It is cancelled, and ClientGoneError or ChatError raised, where the client
        leaves, the endpoint closes, or the time is over."""
        task = asyncio.ensure_future(work)
        try:
            left = self.until - asyncio.get_running_loop().time()
            await asyncio.wait([task, *self.ends], timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED)
            self.check()
            if not task.done():
                raise ChatError(504, f"the reply took more than {self.seconds:g} seconds; ask for fewer tokens, or "
                                     "raise seconds of Limits", None, "timeout", NO_RETRY)
            return task.result()
        finally:
            await cancelled(task)

    def check(self) -> None:
        """Raises ClientGoneError or ChatError where the reply is of no use."""
        gone, closed = self.ends
        if gone.done():
            raise ClientGoneError
        if closed.done():
            raise ChatError(CLOSED, "the endpoint was closed, as its run ended; nothing answers here any more", None,
                            "closed")

    async def still_there(self) -> None:
        """Raises as `check` does, also where the connection was lost just now."""
        for _ in range(STEPS):
            await asyncio.sleep(0)
        self.check()


class Slots:
    """Requests that are answered at a time, and those that wait."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.free, self.waiting = limits, asyncio.Semaphore(limits.concurrent), 0

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Holds a slot. Raises ChatError at once where too many wait for one."""
        if self.free.locked() and self.waiting >= self.limits.queue:
            raise ChatError(429, f"{self.limits.concurrent} requests are being answered and {self.waiting} wait; come "
                                 "again later, or raise concurrent or queue of Limits", None, "rate_limit_exceeded",
                            {"Retry-After": "1"})
        self.waiting += 1
        try:
            await self.free.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self.free.release()


async def departure(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancelled(*tasks: asyncio.Future[T]) -> None:
    """Ends tasks, whose results nobody needs."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
