"""Concurrent rollouts with a progress bar, and decorators that retry calls or limit their concurrency."""

import asyncio
import functools
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import tenacity

from lowmem_grpo.agents.progress import Progress, described, together
from lowmem_grpo.agents.trajectories import PendingGroup, Trajectory, TrajectoryGroup, is_awaitable, members_of
from lowmem_grpo.utils import COUNT, NOT_NEGATIVE, require

logger = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])

AfterEach = Callable[[TrajectoryGroup], Any]  # returns a group, a list of groups or None, or an awaitable of one


async def gather_trajectory_groups(
    groups: Iterable[Awaitable[TrajectoryGroup] | TrajectoryGroup], *, pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False, max_exceptions: float = 0, max_metrics: int | None = None,
    after_each: AfterEach | None = None, timeout: float | None = None,
) -> list[TrajectoryGroup]:
    """Return all groups, in order, once all their rollouts have ended.

    max_exceptions: the number of rollouts that may fail (inf: all of them), or, below 1, the share of them. Their
    errors are kept in `group.exceptions`. If one more rollout fails, its error is raised, and all others are cancelled.
    after_each: is called with each complete group, for example to score it. Its result replaces the group; None drops
    the group. timeout: seconds for each rollout. A rollout that takes longer fails and is cancelled, but a blocking one
    (time.sleep, a loop without await) cannot be cancelled. max_metrics: the number of means that the bar shows."""
    say_deprecated(pbar_total_completion_tokens)
    chosen = members_of(groups, "gather_trajectory_groups takes a list of groups", "gather_trajectory_groups([group])")
    for group in chosen:
        if not (is_awaitable(group) or isinstance(group, TrajectoryGroup)):
            raise TypeError(f"gather_trajectory_groups takes groups, and got {described(group)}: write "
                            "TrajectoryGroup(rollout(...) for _ in range(8)) for each task")
    sizes = [len(group) if isinstance(group, PendingGroup | TrajectoryGroup) else 1 for group in chosen]
    progress = Progress(max_exceptions, max_metrics, timeout, sum(sizes))
    with progress.shown(pbar_desc):
        parts = await together(whole(group, progress, after_each) for group in chosen)
    return [group for part in parts for group in part]


async def whole(group: Any, progress: Progress, after_each: AfterEach | None) -> list[TrajectoryGroup]:
    """Await one group. Return the groups that `after_each` makes of it, by default itself; [] if it failed."""
    if isinstance(group, PendingGroup):
        group = await group
    elif is_awaitable(group):
        group = await progress.watch(group, (TrajectoryGroup,), "its TrajectoryGroup")
    if isinstance(group, BaseException):
        return []
    for trajectory in group:
        progress.done(trajectory)
    if after_each is None:
        return [group]
    after = after_each(group)
    if is_awaitable(after):
        after = await after
    kept = [] if after is None else after if isinstance(after, list) else [after]
    for item in kept:
        if not isinstance(item, TrajectoryGroup):
            raise TypeError(f"after_each returned {described(item)}; it must return the group, a list of groups, or "
                            "None to drop it")
    return kept


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Any]], *, pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False, max_exceptions: float = 0, timeout: float | None = None,
) -> list[Any]:
    """Return the result of each rollout, in order: a Trajectory, or a list or tuple of them. If `max_exceptions` allows
    failures, the result of a failed rollout is its error. See `gather_trajectory_groups`."""
    say_deprecated(pbar_total_completion_tokens)
    chosen = members_of(trajectories, "gather_trajectories takes a list of rollouts",
                        "gather_trajectories([rollout()])")
    progress = Progress(max_exceptions, None, timeout, len(chosen))

    async def play(rollout: Any) -> Any:
        result = await progress.watch(rollout, (Trajectory, list, tuple), "a Trajectory, or a list of them")
        for member in result if isinstance(result, list | tuple) else [result]:
            if isinstance(member, Trajectory):
                progress.done(member)
            elif member is not result:
                raise TypeError(f"a rollout returned a list with {described(member)}; all must be trajectories")
        return result

    with progress.shown(pbar_desc):
        return await together(map(play, chosen))


def say_deprecated(pbar_total_completion_tokens: bool) -> None:
    if pbar_total_completion_tokens:
        logger.warning("pbar_total_completion_tokens does nothing, here as in ART: the records of the run count tokens")


# Decorators of rollouts


def retry(
    max_attempts: int = 3, delay: float = 0.25, backoff_factor: float = 2.0,
    exceptions: tuple[type[BaseException], ...] = (Exception,),
    on_retry: Callable[[Any, int], None] | None = None,
) -> Callable[[Function], Function]:
    """Return a decorator, for plain and async functions, that repeats a call after one of `exceptions`, up to
    `max_attempts` calls in all. It waits `delay` seconds at first, then each time `backoff_factor` times as long.

    Before each retry `on_retry(error, attempt)` is called, or a warning is logged. The last error is raised. Raises
    ValueError for settings out of range."""
    require("max_attempts", max_attempts, COUNT, ": write @retry() or @retry(max_attempts=3)")
    require("delay", delay, NOT_NEGATIVE)
    require("backoff_factor", backoff_factor, NOT_NEGATIVE)

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


def limit_concurrency(n: int, derive_key: Callable[..., str] | None = None) -> Callable[[Function], Function]:
    """Return a decorator for async functions that lets at most `n` calls run at a time, or `n` for each key that
    `derive_key` returns for a call's arguments."""
    require("n", n, COUNT, ": write @limit_concurrency(8)")
    slots: dict[Any, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(n))

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        async def later(*args: Any, **options: Any) -> Any:
            key = None if derive_key is None else derive_key(*args, **options)
            async with slots[asyncio.get_running_loop(), key]:  # a semaphore belongs to one loop
                return await function(*args, **options)

        return later

    return decorate
