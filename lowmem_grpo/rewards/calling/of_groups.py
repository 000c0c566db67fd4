"""The one place that makes Scores: of the groups of a batch, some while others are still sampled, and of rows."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from lowmem_grpo.data.prompts import Prompt, is_chat
from lowmem_grpo.engines.base import OnGroup
from lowmem_grpo.rewards.calling.calls import Lists
from lowmem_grpo.rewards.calling.early import EarlyCalls
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rewards.calling.scores import Scores, put_together
from lowmem_grpo.runs.clock import Clock
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import Message, Rollout, RolloutGroup, Turn


class EarlyScoring(EarlyCalls):
    """The calls of the reward functions on a batch of prompts: made before it is sampled, told of finished groups by
    `on_group` while others decode, and brought to an end by `settle`."""

    def __init__(
        self, scorer: RewardScorer, prompts: Sequence[Prompt | RolloutGroup], state: TrainerState | None,
        clock: Clock | None = None,
    ) -> None:
        """Use only the rows of the prompts. `clock` counts the seconds of the calls. RewardError, before anything is
        sampled, if a function needs a column that no row has."""
        self.rows = [prompt.row for prompt in prompts]
        self.now, self.clock = state, clock or Clock()  # early calls see a copy of the state as it was before sampling
        self.columns, self.sizes = columns_of(self.rows), dict[int, int]()  # completions of the groups handed in
        super().__init__(scorer, list(lists_of(scorer, [], self.columns)), state)

    @property
    def on_group(self) -> OnGroup | None:
        """The function that the engine is to call for each finished group; None if no function is early."""
        return self.take_in if self.names else None

    def take_in(self, index: int, rollouts: list[Rollout]) -> None:
        """Take in the rollouts of a prompt when all of them are there."""
        if self.names and index not in self.known:
            self.sizes[index] = len(rollouts)
            self.add(index, lists_of(self.scorer, [RolloutGroup(self.rows[index], [], rollouts)], self.columns))

    def settle(self, groups: list[RolloutGroup]) -> Scores:
        """Return what all functions say of the groups, once all are sampled. RewardError if one of them failed."""
        with self, self.clock.phase("reward"):
            self.clock.reward_hidden += self.finish(groups)
            return self.scores(groups)

    def scored(self, index: int) -> Scores | None:
        """The scores of a finished group while others are sampled; None where they are not all there. Behind its own,
        the lists have those of groups that were scored in the same calls."""
        calls = self.calls_on(index)
        if calls is None:
            return None
        together = [index, *sorted({group for call in calls for group in call.groups} - {index})]
        ends = list(accumulate(self.sizes[group] for group in together))
        spans = {group: range(end - self.sizes[group], end) for group, end in zip(together, ends, strict=True)}
        return put_together([], calls, self.scorer.names, spans, ends[-1])

    def finish(self, groups: list[RolloutGroup]) -> float:
        """Wait until the early functions have scored all groups. Returns the seconds of their calls in which others
        still decoded. Raises RewardError if one failed."""
        for index, group in enumerate(groups):
            self.take_in(index, group.rollouts)  # those that the engine has not told of
        return self.wait()

    def scores(self, groups: list[RolloutGroup]) -> Scores:
        """The scores of finished groups. Functions that are not early are called now, each once."""
        rest = [name for name in self.scorer.names if name not in self.names]
        whole = self.scorer.call_whole(rest, lists_of(self.scorer, groups, self.columns), self.now)
        sizes = [len(group.rollouts) for group in groups]
        spans = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        return self.scorer.scores(whole, self.calls, spans)


class Later(list[Message]):
    """All messages of an episode that follow its prompt: of the assistant, with its tool calls, of tools and of the
    environment. It is the plain list that TRL gives to reward functions, but for `completion[0]`: functions for one
    answer read the answer there, so it is the last message of the assistant."""

    def __getitem__(self, index: Any) -> Any:
        return self.answer if index == 0 else super().__getitem__(index)

    @property
    def answer(self) -> Message:
        """The last message of the assistant; IndexError without one."""
        return [message for message in self if message.get("role") == "assistant"][-1]


def call(scorer: RewardScorer, groups: list[RolloutGroup], state: TrainerState | None) -> Scores:
    """The scores of each rollout."""
    lists = lists_of(scorer, groups, columns_of([group.row for group in groups]))
    calls = scorer.call_whole(scorer.names, lists, state)
    return scorer.scores(calls, [], [range(sum(len(group.rollouts) for group in groups))])


def score_rows(
    scorer: RewardScorer, rows: list[dict[str, Any]], texts: list[str], ids: list[list[int]],
    state: TrainerState | None,
) -> Scores:
    """The scores of one completion for each row. Functions get it in the form of its prompt: a text or a chat."""
    columns = {name: [row.get(name) for row in rows] for name in columns_of(rows)}
    completions = [in_form(row, text) for row, text in zip(rows, texts, strict=True)]
    return scorer.score([row["prompt"] for row in rows], completions, ids, columns, state)


def lists_of(scorer: RewardScorer, groups: list[RolloutGroup], columns: list[str]) -> Lists:
    """Return the lists that functions get for the rollouts of groups: the columns of their rows, and those that
    rollouts bring, which stand before them. `completion_ids` are all that followed the prompt."""
    pairs = [(group.row, rollout) for group in groups for rollout in group.rollouts]
    names = dict.fromkeys([*columns, *columns_of([rollout.columns for _, rollout in pairs])])
    values = {name: [rollout.columns.get(name, row.get(name)) for row, rollout in pairs] for name in names}
    lists = scorer.lists(
        [prompt_of(row, rollout) for row, rollout in pairs], [completion_of(row, rollout) for row, rollout in pairs],
        [rollout.completion_ids for _, rollout in pairs], values,
    )
    if scorer.episodes:
        lists["environments"] = [rollout.environment for _, rollout in pairs]
        lists["turns"] = [rollout.turns for _, rollout in pairs]
    return lists


def prompt_of(row: dict[str, Any], rollout: Rollout) -> Any:
    """The row's prompt, and of an episode with what the environment added to it, as in TRL."""
    prompt = row.get("prompt")
    if not rollout.opening:
        return prompt
    return rollout.opening[-1]["content"] if isinstance(prompt, str) else rollout.opening


def completion_of(row: dict[str, Any], rollout: Rollout) -> Any:
    """A rollout as functions get it: a text where the prompt is one (of an episode the last turn's), else a chat; that
    of an episode without a turn is an empty answer."""
    if not rollout.ending or isinstance(row.get("prompt"), str):
        return in_form(row, rollout.text)
    turns = rollout.turns or [Turn([], [], [], "stop")]
    return Later(message for turn in turns for message in (said(turn), *turn.replies))


def said(turn: Turn) -> Message:
    """The assistant's message of a turn."""
    return turn.message or {"role": "assistant", "content": turn.text}


def in_form(row: dict[str, Any], text: str) -> Any:
    """A completion as a text, or as a chat if the row's prompt is a chat."""
    return [{"role": "assistant", "content": text}] if is_chat(row["prompt"]) else text


def columns_of(rows: list[dict[str, Any]]) -> list[str]:
    """The dataset columns that functions get; a row without one has None there."""
    return sorted({name for row in rows for name in row} - {"prompt", "completion"})
