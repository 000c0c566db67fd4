"""Calls that may fail and are made again, and calls that wait for a place."""

import asyncio
import functools
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import tenacity

from lowmem_grpo.rules import COUNT, ZERO_OR_MORE, require

logger = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])


def retry(
    max_attempts: int = 3, delay: float = 0.25, backoff_factor: float = 2.0,
    exceptions: tuple[type[BaseException], ...] = (Exception,),
    on_retry: Callable[[Any, int], None] | None = None,
) -> Callable[[Function], Function]:
    """Return a decorator, for plain and async functions, that calls again, up to `max_attempts` times in all, after one
    of `exceptions`; first `delay` seconds later, then `backoff_factor` times as long each time.

    Each time `on_retry(error, attempt)` is called, or a warning is logged. The last error is raised. Raises ValueError
    for settings that make no sense.
    """
    require("max_attempts", max_attempts, COUNT, ": write @retry() or @retry(max_attempts=3)")
    require("delay", delay, ZERO_OR_MORE)
    require("backoff_factor", backoff_factor, ZERO_OR_MORE)

    def tell(state: tenacity.RetryCallState) -> None:
        error = state.outcome and state.outcome.exception()
        if on_retry is not None:
            on_retry(error, state.attempt_number)
        else:
            logger.warning("attempt %d of %d of %s failed (%s: %s); trying again", state.attempt_number, max_attempts,
                           state.get_fn_name(), type(error).__name__, error)

    decorator: Any = tenacity.retry(
        stop=tenacity.stop_after_attempt(max_attempts), retry=tenacity.retry_if_exception_type(exceptions),
        wait=lambda state: delay * backoff_factor ** (state.attempt_number - 1), before_sleep=tell, reraise=True,
    )
    return decorator


def limit_concurrency(
    n: int, derive_key: Callable[..., str] | None = None
) -> Callable[[Function], Function]:
    """Return a decorator for async functions that lets at most `n` calls run at a time, or `n` of each key that
    `derive_key` makes of a call's arguments."""
    require("n", n, COUNT, ": write @limit_concurrency(8)")
    places: dict[Any, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(n))

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        async def later(*args: Any, **options: Any) -> Any:
            key = None if derive_key is None else derive_key(*args, **options)
            async with places[asyncio.get_running_loop(), key]:  # a semaphore belongs to one loop
                return await function(*args, **options)

        return later

    return decorate
