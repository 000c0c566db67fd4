"""Runs many rollouts at the same time, with a bar."""

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from lowmem_grpo.agents.progress import Progress, described, together
from lowmem_grpo.agents.trajectories import PendingGroup, Trajectory, TrajectoryGroup, is_awaitable

logger = logging.getLogger(__name__)

AfterEach = Callable[[TrajectoryGroup], Any]  # gives a group, a list of groups or None; or one of these to be awaited


async def gather_trajectory_groups(
    groups: Iterable[Awaitable[TrajectoryGroup] | TrajectoryGroup], *, pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False, max_exceptions: float = 0, max_metrics: int | None = None,
    after_each: AfterEach | None = None, timeout: float | None = None,
) -> list[TrajectoryGroup]:
    """All groups, in order, when all their rollouts have ended.

    max_exceptions: how many rollouts may fail, or below 1 which share of them. They are kept in `group.exceptions`. Of
    one more the error is raised, and all other rollouts are cancelled. max_metrics: how many means the bar shows.
    after_each: is called with each group as soon as it is whole, for example to score it; its result takes the group's
    place (None drops it). timeout: seconds that each rollout may take; one that takes longer is cancelled and counts as
    failed. A rollout that blocks (time.sleep, a loop without await) cannot be cancelled.

    A group that is made by a function of your own may fail as one rollout may; it is left out.
    """
    say_deprecated(pbar_total_completion_tokens)
    chosen = list(groups)
    for group in chosen:
        if not (is_awaitable(group) or isinstance(group, TrajectoryGroup)):
            raise TypeError(f"gather_trajectory_groups takes groups, and got {described(group)}: write "
                            "TrajectoryGroup(rollout(...) for _ in range(8)) for each task")
    sizes = [len(group) if isinstance(group, PendingGroup | TrajectoryGroup) else 1 for group in chosen]
    progress = Progress(max_exceptions, max_metrics, timeout, sum(sizes))
    with progress.shown(pbar_desc):
        found = await together(whole(group, progress, after_each) for group in chosen)
    return [group for part in found for group in part]


async def whole(group: Any, progress: Progress, after_each: AfterEach | None) -> list[TrajectoryGroup]:
    """A group with what follows it; nothing if it failed."""
    if isinstance(group, PendingGroup):
        group = await group
    elif is_awaitable(group):
        group = await progress.watch(group, (TrajectoryGroup,), "its TrajectoryGroup")
    if isinstance(group, Exception):
        return []
    for trajectory in group:
        progress.done(trajectory)
    if after_each is None:
        return [group]
    after = after_each(group)
    if is_awaitable(after):
        after = await after
    kept = [] if after is None else after if isinstance(after, list) else [after]
    for one in kept:
        if not isinstance(one, TrajectoryGroup):
            raise TypeError(f"after_each returned {described(one)}; it must return the group, a list of groups, or "
                            "None to drop it")
    return kept


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Any]], *, pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False, max_exceptions: float = 0, timeout: float | None = None,
) -> list[Any]:
    """What each rollout returned, in order: a Trajectory, or a list or tuple of them. With `max_exceptions`, the errors
    of those that failed stand in their places. See `gather_trajectory_groups`."""
    say_deprecated(pbar_total_completion_tokens)
    chosen = list(trajectories)
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
