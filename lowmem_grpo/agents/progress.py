"""The progress of a gathering of rollouts: its bar, its means, and the number of rollouts that may fail."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, TypeVar
from uuid import uuid4

from tqdm import auto

from lowmem_grpo.config.launcher import this_process
from lowmem_grpo.server.openai.sessions import SESSION
from lowmem_grpo.utils import COUNT, NOT_NEGATIVE, POSITIVE, check_ranges

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

SAID = 3  # kinds of failures that the log names
CLOSING = 5.0  # seconds that cancelled rollouts get to clean up
CURRENT: ContextVar["Progress"] = ContextVar("lowmem_grpo_gathering")


@dataclass
class Progress:
    """The progress of one gathering, which rollouts find in CURRENT. ValueError for settings out of range."""

    max_exceptions: float = 0  # how many rollouts may fail; below 1, their share
    max_metrics: int | None = None  # the most means that the bar shows; None: all
    timeout: float | None = None  # seconds for each rollout
    total: int = 0
    bar: Any = None
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[BaseException] = field(default_factory=list)
    counted: dict[int, Any] = field(default_factory=dict)  # trajectories by id; a group may be reported twice

    RANGES = {"max_exceptions": NOT_NEGATIVE, "max_metrics": COUNT, "timeout": POSITIVE}

    def __post_init__(self) -> None:
        check_ranges(self)

    @contextmanager
    def shown(self, title: str | None) -> Iterator[None]:
        """Show the bar and set CURRENT; on exit, log the failures."""
        token = CURRENT.set(self)
        try:
            with auto.tqdm(desc=title, total=self.total, disable=not this_process().leads) as self.bar:
                yield
        finally:
            CURRENT.reset(token)
            if self.failures:
                kinds = Counter(f"{type(error).__name__}: {error}" for error in self.failures)
                reasons = "; ".join(f"{count} x {words}" for words, count in kinds.most_common(SAID))
                logger.warning("%d of %d rollouts failed: %s", len(self.failures), self.total, reasons)

    def done(self, trajectory: Any) -> None:
        if id(trajectory) not in self.counted:
            self.counted[id(trajectory)] = trajectory
            trajectory.count_tokens()
            for name, value in trajectory.numbers().items():
                self.sums[name] += value
                self.counts[name] += 1
            self.move()

    def failed(self, error: BaseException) -> None:
        """Count a failed rollout. Raises its error if too many have failed."""
        if any(error is earlier for earlier in self.failures):  # raised here before, in a nested rollout
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

    async def watch(self, rollout: Awaitable[Any], kinds: tuple[type, ...], noun: str) -> Any:
        """Return a rollout's result, or its error, which is counted here. `kinds` are the allowed types of a result;
        `noun` names them. A client's CancelledError is an error too; a cancellation of this task is raised."""
        SESSION.set(uuid4().hex)  # for this task only
        limit = asyncio.timeout(self.timeout)
        try:
            async with limit:
                result = await rollout
            if isinstance(result, kinds):
                if hasattr(result, "numbers"):
                    result.numbers()  # what is no number is this rollout's failure
                return result
            raise TypeError(f"a rollout returned {described(result)}; it must return {noun}: end it with `return "
                            "trajectory`")
        except (Exception, asyncio.CancelledError) as raised:  # from the user's code
            task = asyncio.current_task()
            if isinstance(raised, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            late = TimeoutError(f"the rollout did not end within {self.timeout} s and was cancelled")
            error = late if limit.expired() else raised
            self.failed(error)
            return error


async def together(coroutines: Iterable[Awaitable[Result]]) -> list[Result]:
    """Return the results of all coroutines, in order. After an error or a cancellation, cancel the others, and wait up
    to CLOSING seconds for their end."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        if left := [task for task in tasks if task.cancel()]:
            _, stubborn = await asyncio.wait(left, timeout=CLOSING)
            if stubborn:
                logger.warning("%d rollouts go on although they were cancelled: they catch CancelledError",
                               len(stubborn))


def described(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
