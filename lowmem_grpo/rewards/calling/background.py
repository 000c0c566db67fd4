"""Work beside the thread that asks for it: in daemon threads, or in the event loop of one. The threads of an executor
would keep a program from ending before the work.

anyio's BlockingPortal is no such loop: it waits for the loop when it hands over a call, so that a coroutine that blocks
would keep its caller past every time limit, and SystemExit in one call ends it for all.
"""

import asyncio
import contextvars
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class BackgroundLoop:
    """An event loop in a daemon thread, begun when it is first used. It lives as long as this object, so that a client
    which is kept between calls stays usable."""

    def __init__(self, name: str) -> None:
        self.name, self.lock = name, threading.Lock()  # two threads may use it first
        self.loop: asyncio.AbstractEventLoop | None = None

    def submit(self, function: Callable[[], Awaitable[Any]]) -> Future[Any]:
        """Run an async function beside the others, with the caller's context variables, and never wait for them."""
        with self.lock:
            if self.loop is None:
                self.loop = asyncio.new_event_loop()
                self.thread = threading.Thread(target=run_loop, args=(self.loop,), name=self.name, daemon=True)
                self.thread.start()
                weakref.finalize(self, self.loop.call_soon_threadsafe, self.loop.stop)
        return asyncio.run_coroutine_threadsafe(without_exit(function), self.loop)


async def without_exit(function: Callable[[], Awaitable[Any]]) -> Any:
    """Await the call. SystemExit would end the event loop for all, so it becomes a RuntimeError."""
    try:
        return await function()
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Serve `loop` until it is stopped, and let its tasks end then: they may have things to close."""
    loop.run_forever()
    if tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks))
    loop.close()


def start_thread(name: str, work: Callable[[], None]) -> threading.Thread:
    """Run `work` in a daemon thread, with the caller's context variables."""
    thread = threading.Thread(target=partial(contextvars.copy_context().run, work), name=name, daemon=True)
    thread.start()
    return thread


def run_side_by_side(run: Callable[[Item], Result], items: Sequence[Item], workers: int) -> list[Result]:
    """Return `run` of each of N items, in the order of the items, with `workers` at a time. After an error or an
    interrupt no further item begins; the first error is raised when those that have begun end."""
    waiting = list(enumerate(items))[::-1]
    results: dict[int, Result] = {}
    faults: list[BaseException] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                at, item = waiting.pop()
            try:
                results[at] = run(item)
            except BaseException as error:  # noqa: BLE001, raised again below
                faults.append(error)
                waiting.clear()

    threads = []
    try:
        for number in range(min(workers, len(items))):
            threads.append(start_thread(f"side by side {number}", work))
        for thread in threads:
            thread.join()
    finally:
        waiting.clear()
    if faults:
        raise faults[0]
    return [results[at] for at in range(len(items))]
