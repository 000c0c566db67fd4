"""Scoring of a batch's groups, some of them while other groups are still being sampled."""

import copy
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from typing import Any

from lowmem_grpo.data.harmony import ReadMessage
from lowmem_grpo.data.prompts import Prompt, is_chat
from lowmem_grpo.rewards.calling.background import start_thread
from lowmem_grpo.rewards.calling.calls import Lists, RewardCall, check, failure, pause, stop
from lowmem_grpo.rewards.calling.contract import RewardError, bind, is_async
from lowmem_grpo.rewards.calling.scorer import RewardScorer, Scores, put_together
from lowmem_grpo.runs.state import Clock, TrainerState
from lowmem_grpo.types import Message, OnGroup, Rollout, RolloutGroup, Turn

LINGER = 0.02  # seconds that the worker waits, so that groups that finish together share one call


class RewardBatch(AbstractContextManager["RewardBatch"]):
    """The calls of the reward functions on a batch of prompts, some of them during sampling: the engine passes each
    finished group to `on_group`. After sampling, `settle` returns all scores, or raises the first error.

    Plain (not async) functions run one after another in a single thread, so they may share state. Each call gets all
    finished groups that the function has not scored yet. An async function is called once for each group. After a
    failure or `close`, no call begins. A running thread cannot be stopped, so a call may last into the next batch."""

    def __init__(self, scorer: RewardScorer, prompts: Sequence[Prompt | RolloutGroup], state: TrainerState | None,
                 clock: Clock | None = None) -> None:
        """Calls during sampling get a copy of the trainer's `state`, because sampling changes the token counts in it.
        RewardError if a function needs a column that no row has."""
        self.rows = [prompt.row for prompt in prompts]
        self.columns, self.sizes = columns_of(self.rows), dict[int, int]()  # sizes: completions of each submitted group
        available = dict.fromkeys([*lists_of(scorer, [], self.columns), "trainer_state", "log_extra", "log_metric"])
        for name, func in ({} if scorer.late_columns else scorer.by_name).items():
            bind(name, func, available)
        self.scorer, self.now, self.state, self.clock = scorer, state, copy.copy(state), clock or Clock()
        self.names = scorer.early
        self.plain = [name for name in self.names if not is_async(scorer.by_name[name])]
        self.calls: list[RewardCall] = []
        self.waiting: list[tuple[int, Lists]] = []  # for the worker
        self.working = self.hurry = self.closed = False
        self.failed: RewardCall | None = None  # the first call that failed, which stopped the others
        self.broken: BaseException | None = None  # an error in the worker itself
        self.changed = threading.Condition()  # guards all of the above

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def on_group(self) -> OnGroup | None:
        """The callback that the engine calls for each finished group; None if no function is called during sampling."""
        return self.add_group if self.names else None

    def add_group(self, index: int, rollouts: list[Rollout]) -> None:
        """Submit the finished rollouts of a prompt to the functions that are called during sampling."""
        if not self.names or index in self.sizes:
            return
        self.sizes[index] = len(rollouts)
        lists = lists_of(self.scorer, [RolloutGroup(self.rows[index], [], rollouts)], self.columns)
        with self.changed:
            for name in self.names:
                if name not in self.plain and not self.closed:
                    self.calls.append(call := self.scorer.call(name, lists, self.state, [index]))
                    call.run_in_loop(self.scorer.loop)
                    call.future.add_done_callback(partial(self.finish_call, call))
            if self.plain and not self.closed:
                self.waiting.append((index, lists))
                if not self.working:
                    self.working = True
                    start_thread("early rewards", self.work)

    def finish_call(self, call: RewardCall, _: object = None) -> None:
        """Notify waiting threads that a call has ended; close the batch after the first failure."""
        with self.changed:
            first = failure(call.future) is not None and not self.closed
            if first:
                self.failed, self.closed = call, True
            self.changed.notify_all()
        if first:
            self.close()

    def work(self) -> None:
        """Call every plain (not async) function on the waiting groups, until no group waits."""
        try:
            while calls := self.next_calls():
                for call in calls:
                    if not self.closed:
                        call.run()
                        self.finish_call(call)
        except BaseException as error:  # noqa: BLE001, `wait` raises it again
            with self.changed:
                self.broken = error
                self.changed.notify_all()

    def next_calls(self) -> list[RewardCall]:
        """Return calls of all plain functions on the waiting groups. If no group waits, return [] to end the worker."""
        with self.changed:
            self.changed.wait_for(lambda: self.hurry or self.closed, LINGER)
            taken, self.waiting = self.waiting, []
            if not taken or self.closed:
                self.working = False  # under the lock, so that the next group starts another worker
                self.changed.notify_all()
                return []
            lists = {name: [value for _, lists in taken for value in lists[name]] for name in taken[0][1]}
            groups = [group for group, _ in taken]
            calls = [self.scorer.call(name, lists, self.state, groups) for name in self.plain]
            self.calls += calls
            return calls

    def wait(self, groups: list[RolloutGroup]) -> float:
        """Wait until all calls that began during sampling have ended. Return for how many seconds at least one of them
        ran before this wait. RewardError if a call failed or exceeded its time limit."""
        for index, group in enumerate(groups):
            self.add_group(index, group.rollouts)  # groups that the engine has not reported
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

    def close(self) -> None:
        with self.changed:
            self.closed, self.waiting = True, []
            self.changed.notify_all()
        stop([call for call in self.calls if call.began])

    def settle(self, groups: list[RolloutGroup]) -> Scores:
        """Return the scores of all groups after sampling. RewardError if a function failed."""
        with self, self.clock.phase("reward"):
            self.clock.reward_hidden += self.wait(groups)
            return self.scores(groups)

    def scores(self, groups: list[RolloutGroup]) -> Scores:
        """Return the scores of all groups, after calling the functions that were not called during sampling."""
        rest = [name for name in self.scorer.names if name not in self.names]
        whole = self.scorer.call_whole(rest, lists_of(self.scorer, groups, self.columns), self.now)
        sizes = {index: len(group.rollouts) for index, group in enumerate(groups)}
        return self.scorer.scores([*self.calls, *whole], spans_of(sizes))

    def scored(self, index: int) -> Scores | None:
        """Return the scores of group `index` during sampling, followed by those of other groups that the same calls
        scored. None if a score is missing or a call has failed."""
        with self.changed:
            calls = [call for call in self.calls if index in call.groups and call.future.done()]
        if self.failed is not None or len(calls) < len(self.scorer.names):
            return None
        together = [index, *sorted({group for call in calls for group in call.groups} - {index})]
        spans = spans_of({group: self.sizes[group] for group in together})
        return put_together(calls, self.scorer.names, spans)


def spans_of(sizes: dict[int, int]) -> dict[int, range]:
    """Return the range of each group's completions in a concatenated batch, from the group sizes."""
    ends = accumulate(sizes.values())
    return {group: range(end - size, end) for (group, size), end in zip(sizes.items(), ends, strict=True)}


def covered(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


class EpisodeMessages(list[Message]):
    """The messages of an episode after its prompt, as TRL passes them to reward functions. Only index 0 differs: it
    gives the last assistant message, because functions written for single answers read the answer there."""

    def __getitem__(self, index: Any) -> Any:
        return self.answer if index == 0 else super().__getitem__(index)

    @property
    def answer(self) -> Message:
        """The last assistant message; IndexError if there is none."""
        return [message for message in self if message.get("role") == "assistant"][-1]


def score_groups(scorer: RewardScorer, groups: list[RolloutGroup], state: TrainerState | None) -> Scores:
    """Return the scores of sampled groups; each function is called once."""
    return scorer.score_lists(lists_of(scorer, groups, columns_of([group.row for group in groups])), state)


def lists_of(scorer: RewardScorer, groups: list[RolloutGroup], columns: list[str]) -> Lists:
    """Return the lists that functions get for rollouts. A rollout's own columns override those of its row."""
    pairs = [(group.row, rollout) for group in groups for rollout in group.rollouts]
    names = dict.fromkeys([*columns, *columns_of([rollout.columns for _, rollout in pairs])])
    values = {name: [rollout.columns.get(name, row.get(name)) for row, rollout in pairs] for name in names}
    lists = scorer.lists(
        [prompt_of(row, rollout) for row, rollout in pairs],
        [completion_of(row, rollout, scorer.reads) for row, rollout in pairs],
        [rollout.completion_ids for _, rollout in pairs], values,
    )
    if scorer.episodes:
        lists["environments"] = [rollout.environment for _, rollout in pairs]
        lists["turns"] = [rollout.turns for _, rollout in pairs]
    return lists


def prompt_of(row: dict[str, Any], rollout: Rollout) -> Any:
    """Return the row's prompt; for an episode, with the messages that the environment added to it, as in TRL."""
    prompt = row.get("prompt")
    if not rollout.opening:
        return prompt
    return rollout.opening[-1]["content"] if isinstance(prompt, str) else rollout.opening


def completion_of(row: dict[str, Any], rollout: Rollout, reads: ReadMessage | None = None) -> Any:
    """Return a rollout as functions get it. If the prompt is text, that is a text, for an episode that of the last
    turn. Otherwise it is a chat."""
    if not rollout.ending or isinstance(row.get("prompt"), str):
        if not is_chat(row.get("prompt")):
            return rollout.text
        return [reads(rollout.completion_ids) if reads else {"role": "assistant", "content": rollout.text}]
    turns = rollout.turns or [Turn([], [], [], "stop")]
    return EpisodeMessages(message for turn in turns for message in (
        turn.message or {"role": "assistant", "content": turn.text}, *turn.replies))


def columns_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return the names of the dataset columns that are passed to functions. A row that lacks a column passes None."""
    return sorted({name for row in rows for name in row} - {"prompt", "completion"})
