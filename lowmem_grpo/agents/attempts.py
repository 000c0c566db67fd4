"""Calls that may fail and are made again, and calls that wait for a place."""

import asyncio
import functools
import inspect
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from lowmem_grpo.rules import COUNT, ZERO_OR_MORE, Rule

logger = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])


def retry(
    max_attempts: int = 3, delay: float = 0.25, backoff_factor: float = 2.0,
    exceptions: tuple[type[BaseException], ...] = (Exception,),
    on_retry: Callable[[Any, int], None] | None = None,
) -> Callable[[Function], Function]:
    """A decorator, for plain and async functions: call again, up to `max_attempts` times in all, after one of
    `exceptions`; first `delay` seconds later, then `backoff_factor` times as long each time.

    Each time `on_retry(error, attempt)` is called, or a warning is logged. The last error is raised. Raises ValueError
    for settings that make no sense.
    """
    check("max_attempts", max_attempts, COUNT, "write @retry() or @retry(max_attempts=3)")
    check("delay", delay, ZERO_OR_MORE)
    check("backoff_factor", backoff_factor, ZERO_OR_MORE)

    def tell(function: Any, error: BaseException, attempt: int) -> None:
        if on_retry is not None:
            on_retry(error, attempt)
        else:
            logger.warning("attempt %d of %d of %s failed (%s: %s); trying again", attempt, max_attempts,
                           getattr(function, "__name__", function), type(error).__name__, error)

    def waits() -> Iterator[tuple[int, float]]:
        for attempt in range(1, max_attempts + 1):
            yield attempt, delay * backoff_factor ** (attempt - 1)

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        async def later(*args: Any, **options: Any) -> Any:
            for attempt, pause in waits():
                try:
                    return await function(*args, **options)
                except exceptions as error:
                    if attempt == max_attempts:
                        raise
                    tell(function, error, attempt)
                await asyncio.sleep(pause)

        @functools.wraps(function)
        def now(*args: Any, **options: Any) -> Any:
            for attempt, pause in waits():
                try:
                    return function(*args, **options)
                except exceptions as error:
                    if attempt == max_attempts:
                        raise
                    tell(function, error, attempt)
                time.sleep(pause)

        return later if inspect.iscoroutinefunction(function) else now

    return decorate


def limit_concurrency(
    n: int, derive_key: Callable[..., str] | None = None
) -> Callable[[Function], Function]:
    """A decorator for async functions: at most `n` calls at a time, or `n` of each key that `derive_key` makes of a
    call's arguments."""
    check("n", n, COUNT, "write @limit_concurrency(8)")
    places: dict[Any, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(n))

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        async def later(*args: Any, **options: Any) -> Any:
            key = None if derive_key is None else derive_key(*args, **options)
            async with places[asyncio.get_running_loop(), key]:  # a semaphore belongs to one loop
                return await function(*args, **options)

        return later

    return decorate


def check(name: str, value: object, rule: Rule, fix: str = "") -> None:
    """Raises ValueError where a value breaks a rule."""
    words, holds = rule
    if not holds(value):
        raise ValueError(f"{name} is {value!r}; it must be {words}" + (f": {fix}" if fix else ""))
