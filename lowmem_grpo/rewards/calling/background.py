"""Background work in daemon threads, or in an event loop in a daemon thread: an executor's threads would keep the
program from exiting, and anyio's BlockingPortal could be held past every time limit by a coroutine that blocks."""

import asyncio
import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class BackgroundLoop:
    """An event loop in a daemon thread, started on first use, and kept so that later calls can reuse async clients."""

    def __init__(self, name: str) -> None:
        self.name, self.lock = name, threading.Lock()  # two threads may race to the first use
        self.loop: asyncio.AbstractEventLoop | None = None

    def submit(self, function: Callable[[], Awaitable[Any]]) -> Future[Any]:
        """Start an async function in the loop with the caller's context variables, and return its future at once."""
        with self.lock:
            if self.loop is None:
                self.loop = asyncio.new_event_loop()
                self.thread = threading.Thread(target=run_loop, args=(self.loop,), name=self.name, daemon=True)
                self.thread.start()
                weakref.finalize(self, self.loop.call_soon_threadsafe, self.loop.stop)
        return asyncio.run_coroutine_threadsafe(without_exit(function), self.loop)


async def without_exit(function: Callable[[], Awaitable[Any]]) -> Any:
    """Await `function()` and return its result. SystemExit, which would end the event loop, becomes a RuntimeError."""
    try:
        return await function()
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run `loop` until it is stopped, then cancel its tasks and let them clean up."""
    loop.run_forever()
    if tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks))
    loop.close()


def start_thread(name: str, work: Callable[[], None]) -> threading.Thread:
    """Run `work` in a new daemon thread with the caller's context variables; return the thread."""
    thread = threading.Thread(target=partial(contextvars.copy_context().run, work), name=name, daemon=True)
    thread.start()
    return thread


def run_side_by_side(run: Callable[[Item], Result], items: Sequence[Item], workers: int) -> list[Result]:
    """Return [run(item) for item in items], computed in `workers` threads. After an error, no further item is started;
    the error of the first failed item in `items` is raised."""
    futures: list[Future[Result]] = [Future() for _ in items]
    waiting = deque(zip(futures, items, strict=True))

    def work() -> None:
        with suppress(IndexError):  # no item is left
            while True:
                future, item = waiting.popleft()
                try:
                    future.set_result(run(item))
                except BaseException as error:  # noqa: BLE001, raised by the future
                    future.set_exception(error)
                    waiting.clear()

    try:
        for number in range(min(workers, len(items))):
            start_thread(f"side by side {number}", work)
        return [future.result() for future in futures]
    finally:
        waiting.clear()
