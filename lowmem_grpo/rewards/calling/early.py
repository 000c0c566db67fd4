"""Rewards of groups that are finished, while other groups are still sampled.

The thread that samples hands in the groups. All plain functions share one worker thread. Whenever it is free, it takes
all groups that wait and calls one function after the other on them. So no two plain functions run side by side, as when
a whole batch is scored, and functions that share state stay right. This holds within a batch: nothing can stop a
thread, so a call of a batch that failed may still run while the next batch is scored. Async functions are called for
each group at once. Nothing is raised before `wait`, and no call begins after a failure or after `close`.
"""

import copy
import threading
from types import TracebackType
from typing import Any, Self

from lowmem_grpo.rewards.calling.calls import Call, Lists, check, failure, pause, start_thread, stop
from lowmem_grpo.rewards.calling.contract import RewardError, bind, is_async
from lowmem_grpo.rewards.calling.scorer import RewardScorer

LINGER = 0.02  # seconds that the worker waits, so that groups that finish together go into one call


class EarlyCalls:
    """The calls of a batch that begin before all of it is sampled. A context manager: after its end no call begins."""

    def __init__(self, scorer: RewardScorer, arguments: list[str], state: Any) -> None:
        """`arguments` names the lists that calls will get. Raises MissingColumnError if any function, early or not,
        needs something else. Functions see `state` as it is now, because sampling counts tokens in it."""
        for name, func in ({} if scorer.late_columns else scorer.by_name).items():
            bind(name, func, dict.fromkeys([*arguments, "trainer_state", "log_extra", "log_metric"]))
        self.scorer, self.state = scorer, copy.copy(state)
        self.names = scorer.early
        self.plain = [name for name in self.names if not is_async(scorer.by_name[name])]
        self.calls: list[Call] = []
        self.known: set[int] = set()  # groups that were handed in
        self.waiting: list[tuple[int, Lists]] = []  # for the worker
        self.working = self.hurry = self.closed = False
        self.failed: Call | None = None  # the first that failed; it stopped the others
        self.broken: BaseException | None = None  # what ended the worker, other than an error of a function
        self.changed = threading.Condition()  # guards all of the above

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def add(self, group: int, lists: Lists) -> None:
        """A group is finished: have it scored, unless it was handed in before."""
        if not self.names or group in self.known:
            return
        self.known.add(group)
        for name in self.names:
            if name not in self.plain:
                self.start_task(name, group, lists)
        if self.plain:
            self.give_to_worker(group, lists)

    def start_task(self, name: str, group: int, lists: Lists) -> None:
        call = self.scorer.call(name, lists, self.state)
        call.groups = [group]
        with self.changed:
            if self.closed:
                return
            self.calls.append(call)
            call.run_in_loop(self.scorer.loop)
        call.future.add_done_callback(lambda _: self.over(call))

    def give_to_worker(self, group: int, lists: Lists) -> None:
        with self.changed:
            if self.closed:
                return
            self.waiting.append((group, lists))
            free, self.working = not self.working, True
        if free:
            start_thread("early rewards", self.work)

    def over(self, call: Call) -> None:
        """A call has ended: wake whoever waits for it. After the first failure no call begins."""
        with self.changed:
            first = failure(call.future) is not None and not self.closed
            if first:
                self.failed, self.closed = call, True
            self.changed.notify_all()
        if first:
            self.close()

    # The worker

    def work(self) -> None:
        """Call every plain function on what waits, until nothing does."""
        try:
            while calls := self.take():
                for call in calls:
                    self.run(call)
        except BaseException as error:  # noqa: BLE001, whoever waits raises it again
            with self.changed:
                self.broken = error
                self.changed.notify_all()

    def run(self, call: Call) -> None:
        if not self.closed:
            call.run()
            self.over(call)

    def take(self) -> list[Call]:
        """The next calls, on all groups that wait. None if there is nothing to do; the worker then ends."""
        with self.changed:
            self.changed.wait_for(lambda: self.hurry or self.closed, LINGER)
            taken, self.waiting = self.waiting, []
            if not taken or self.closed:
                self.working = False  # under the lock: a group that comes in from now on starts another worker
                self.changed.notify_all()
                return []
            lists = {name: [value for _, lists in taken for value in lists[name]] for name in taken[0][1]}
            calls = [self.scorer.call(name, lists, self.state) for name in self.plain]
            for call in calls:
                call.groups = [group for group, _ in taken]
            self.calls += calls
            return calls

    # The thread that samples, afterwards

    def wait(self) -> float:
        """Wait until every group that was handed in is scored. Returns the seconds in which calls ran before this wait,
        while other groups decoded; calls that ran side by side count once. Raises RewardError if a call failed or
        passed its time limit."""
        with self.changed:
            hidden = covered([call.interval for call in self.calls if call.began])
            self.hurry = True
            self.changed.notify_all()
            while True:
                begun = [call for call in self.calls if call.began]
                check(begun if self.failed is None else [self.failed])
                if self.broken is not None:
                    raise RewardError("reward functions could not be called") from self.broken
                if not self.working and all(call.future.done() for call in begun):
                    return hidden
                self.changed.wait(pause(begun))

    def calls_on(self, group: int) -> list[Call] | None:
        """The calls of all functions that scored a group, in their order; None where one is not done, or failed."""
        with self.changed:
            found = {call.name: call for call in self.calls if group in call.groups and call.future.done()}
        if self.failed is not None or len(found) < len(self.scorer.names):
            return None
        return [found[name] for name in self.scorer.names]

    def close(self) -> None:
        """Begin no further call. Async calls are stopped; nothing can stop a thread."""
        with self.changed:
            self.closed, self.waiting = True, []
            self.changed.notify_all()
        stop([call for call in self.calls if call.began])


def covered(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
