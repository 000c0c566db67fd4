"""How a gathering of rollouts goes: its bar, its means, and how many rollouts may fail."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import isfinite
from typing import Any, TypeVar
from uuid import uuid4

from tqdm import auto

from lowmem_grpo.agents.attempts import check
from lowmem_grpo.parallel.place import this_place
from lowmem_grpo.rules import COUNT, POSITIVE, ZERO_OR_MORE
from lowmem_grpo.service.rollouts import SESSION

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

SAID = 3  # kinds of failures that the log names
CLOSING = 5.0  # seconds in which rollouts that are cancelled may close what they have open
CURRENT: ContextVar["Progress"] = ContextVar("lowmem_grpo_gathering")


class Progress:
    """One gathering. Rollouts find it in CURRENT."""

    def __init__(
        self, max_exceptions: float = 0, max_metrics: int | None = None, timeout: float | None = None, total: int = 0
    ) -> None:
        """`max_exceptions`: how many rollouts may fail; below 1 it is a share of all. `timeout`: seconds for each
        rollout. Raises ValueError for settings that make no sense."""
        check("max_exceptions", max_exceptions, ZERO_OR_MORE, "a number of rollouts, or below 1 a share of them")
        for name, value, rule in (("max_metrics", max_metrics, COUNT), ("timeout", timeout, POSITIVE)):
            if value is not None:
                check(name, value, rule, "or None")
        self.max_exceptions, self.max_metrics, self.timeout = max_exceptions, max_metrics, timeout
        self.total = total
        self.bar: Any = None
        self.sums: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self.counted: dict[int, Any] = {}  # trajectories by id; a group may be told of twice

    @contextmanager
    def shown(self, title: str | None) -> Iterator[None]:
        """The time of the gathering, in which the bar is shown and CURRENT is this."""
        token = CURRENT.set(self)
        self.bar = auto.tqdm(desc=title, total=self.total, disable=not this_place().leads)
        try:
            yield
        finally:
            CURRENT.reset(token)
            self.bar.close()
            self.say()

    def done(self, trajectory: Any) -> None:
        """A rollout has ended."""
        if id(trajectory) in self.counted:
            return
        self.counted[id(trajectory)] = trajectory
        for name, value in {"reward": trajectory.reward, **trajectory.metrics}.items():
            self.sums[name] += value
            self.counts[name] += 1
        self.move()

    def failed(self, error: BaseException) -> None:
        """A rollout has failed. Raises its error if too many have."""
        if any(error is one for one in self.failures):  # it has passed here before, on its way out
            raise error
        self.failures.append(error)
        self.move()
        allowed = self.max_exceptions * (self.total if 0 < self.max_exceptions < 1 else 1)
        if len(self.failures) > allowed:
            error.add_note(f"{len(self.failures)} of {self.total} rollouts failed, and max_exceptions="
                           f"{self.max_exceptions:g} allows no more; the others were cancelled")
            raise error

    def move(self) -> None:
        if self.bar is not None:
            self.bar.update(1)
            means = {name: self.sums[name] / self.counts[name] for name in self.counts if isfinite(self.sums[name])}
            shown = dict(list(means.items())[: self.max_metrics])
            self.bar.set_postfix(shown | ({"exceptions": len(self.failures)} if self.failures else {}))

    def say(self) -> None:
        """Log how many rollouts failed, and the most frequent reasons."""
        if self.failures:
            kinds = Counter(f"{type(error).__name__}: {error}" for error in self.failures)
            reasons = "; ".join(f"{count} x {words}" for words, count in kinds.most_common(SAID))
            logger.warning("%d of %d rollouts failed: %s", len(self.failures), self.total, reasons)

    async def watch(self, rollout: Awaitable[Any], kinds: tuple[type, ...], noun: str) -> Any:
        """What a rollout returns, or the error with which it failed; that is told only here. `kinds` are what it may
        return, `noun` says so."""
        SESSION.set(uuid4().hex)  # of this task only
        limit = asyncio.timeout(self.timeout)
        try:
            async with limit:
                found = await rollout
            if isinstance(found, kinds):
                return found
            raise TypeError(f"a rollout returned {described(found)}; it must return {noun}: end it with `return "
                            "trajectory`")
        except Exception as raised:  # noqa: BLE001, of the user's code
            late = TimeoutError(f"the rollout did not end within {self.timeout} s and was cancelled")
            error = late if limit.expired() else raised
            self.failed(error)
            return error


def current(total: int) -> Progress:
    """The gathering that goes on here; outside of one, a silent one that allows no failure."""
    return CURRENT.get(None) or Progress(total=total)


async def together(coroutines: Iterable[Awaitable[Result]]) -> list[Result]:
    """The results of all, in order. If one raises, or this is cancelled, the others are cancelled and have ended."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        left = [task for task in tasks if task.cancel()]
        if left:
            _, open_ones = await asyncio.wait(left, timeout=CLOSING)
            if open_ones:
                logger.warning("%d rollouts go on although they were cancelled: they catch CancelledError",
                               len(open_ones))


def described(found: object) -> str:
    return "None" if found is None else f"a {type(found).__name__}"
