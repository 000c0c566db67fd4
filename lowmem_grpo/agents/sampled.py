"""Makes training groups from trajectories. A choice's `turn` names the turn that the policy sampled; in a trajectory
without choices, messages are matched with cached turns. All other text is context, and never trained on."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from statistics import fmean, stdev
from typing import Any

from openai.types.chat.chat_completion import Choice

from lowmem_grpo.agents.trajectories import History, Trajectory, TrajectoryGroup, as_number
from lowmem_grpo.rollout.rollout_func import group_of
from lowmem_grpo.server.openai.conversation_cache import ConversationCache
from lowmem_grpo.server.openai.request import plain, tools_of
from lowmem_grpo.server.requests import ChatError
from lowmem_grpo.types import Message, RolloutGroup, Turn

logger = logging.getLogger(__name__)

SAID = 3  # trajectories of a step that the log names
LEAST = 2  # the fewest trajectories of a group that can be compared


class UnexplainedError(ValueError):
    """A trajectory names a turn that is not cached, or has no turn of the policy at all."""


@dataclass
class Sampled:
    """Makes the training groups of one step, and counts what is left out."""

    held: ConversationCache
    models: Collection[str] = ()  # names under which clients requested the policy
    found: set[str] = field(default_factory=set)  # turns that were found by their text
    lost: list[str] = field(default_factory=list)  # why trajectories were left out
    left_out: int = 0  # number of groups left out

    def groups(self, gathered: Iterable[TrajectoryGroup]) -> list[RolloutGroup]:
        """Return the groups that can be trained on; what is left out is logged and counted."""
        made = [self.group(number, group) for number, group in enumerate(gathered)]
        for words in self.lost[:SAID]:
            logger.warning("left out of training: %s", words)
        if len(self.lost) > SAID:
            logger.warning("%d trajectories were left out of training in this step", len(self.lost))
        return [group for group in made if group is not None]

    def group(self, number: int, group: TrajectoryGroup) -> RolloutGroup | None:
        """Return the group of trainable trajectories; None if fewer than two are left to compare."""
        members: list[Member] = []
        for place, trajectory in enumerate(group.trajectories):
            try:
                members.append(Member(self, trajectory))
            except UnexplainedError as error:
                self.lost.append(f"trajectory {place} of group {number}: {error}")
        if len(members) < LEAST:
            self.left_out += 1
            logger.warning("group %d is left out of training: %d of its rollouts can be trained on (%d failed), and a "
                           "reward means something only beside another", number, len(members), len(group.exceptions))
            return None
        made = group_of([member.histories for member in members])
        made.row = dict(group.metadata)
        for rollout, member in zip(made.rollouts, members, strict=True):
            rollout.reward = as_number("reward", member.trajectory.reward)
            rollout.extras = dict(member.trajectory.metadata)
            rollout.opening = member.opening
        return made

    def tally(self, gathered: Iterable[TrajectoryGroup], groups: list[RolloutGroup]) -> "Tally":
        """Return the counts of trained, left-out and failed trajectories, and the caller's metrics."""
        gathered = list(gathered)
        tally = Tally({
            "trajectories/total": sum(map(len, gathered)),
            "trajectories/trained": sum(len(group.rollouts) for group in groups),
            "trajectories/unexplained": len(self.lost), "groups/left_out": self.left_out,
            "trajectories/exceptions": sum(len(group.exceptions) for group in gathered),
        })
        tally.measure("metrics/", (trajectory.metrics for group in gathered for trajectory in group.trajectories))
        return tally.measure("group_metrics/", (group.metrics for group in gathered))


class Member:
    """The turns of a trajectory, each with the replies to it."""

    def __init__(self, of: Sampled, trajectory: Trajectory) -> None:
        """Raise UnexplainedError, with the message's place, if a turn is missing, or if there is no turn at all."""
        self.of, self.held, self.trajectory = of, of.held, trajectory
        self.turns: dict[str, Turn] = {}  # each turn once, so that histories share it
        self.opening: list[Message] = []  # before the first turn
        chosen = any(isinstance(entry, Choice) for each in trajectory.histories for entry in each.messages_and_choices)
        self.histories = [self.read(number, history, chosen) for number, history in enumerate(trajectory.histories)]
        if not self.turns:
            raise UnexplainedError(
                "the policy is not known to have said anything in it. Put the choices of its replies into the messages "
                "(reply.choices[0]), as a client of model.openai_client() or of model.serve() returns them")

    def read(self, number: int, history: History, chosen: bool) -> list[Turn]:
        """Return the turns of a conversation. Messages before a turn that was added earlier are not added again."""
        entries = history.messages_and_choices  # messages, and choices of other models, have no turn id
        names = [getattr(entry, "turn", None) or None for entry in entries] if chosen else self.find(history)
        before = "" if number == 0 else f"additional_histories[{number - 1}]."
        turns: list[Turn] = []
        said: list[Message] = []  # since the last turn
        for place, (message, name) in enumerate(zip(history.messages(), names, strict=True)):
            known = name in self.turns
            turn = None if name is None else self.turn(name, message, f"{before}messages_and_choices[{place}]")
            if turn is None:
                said.append(message)
                continue
            if not known:
                self.show(said, turn)
            said = []
            turns.append(turn)
        self.show(said, None)
        return turns

    def find(self, history: History) -> list[str | None]:
        """Return the cached turn that each plain message matches, or None; all None if they are no valid request."""
        try:
            messages, tools = plain(history.messages()), tools_of(history.tools)
        except ChatError:
            return [None] * len(history.messages_and_choices)
        names = self.held.find(messages, tools, self.of.models, self.of.found)
        self.of.found |= {name for name in names if name is not None}
        return names

    def show(self, said: list[Message], turn: Turn | None) -> None:
        """Append messages to the replies of the turn before `turn` (None: of the last turn), or else to the opening."""
        shown = [*self.turns.values()]
        earlier = shown if turn is None else shown[:-1]
        (earlier[-1].replies if earlier else self.opening).extend(said)

    def turn(self, name: str, message: Message, place: str) -> Turn | None:
        """Return the turn of this name; None if the base model, not the policy, sampled it."""
        if name not in self.turns:
            held = self.held.turn(name)
            if held is None:
                raise UnexplainedError(
                    f"{place} ({message['content'][:60]!r}) says that it is {name}, which is not held: it was drawn "
                    "before a restart or by another process, or so much was drawn since that it had to go"
                )
            if held.policy_version < 0:
                return None
            calls = held.calls or len(message.get("tool_calls") or [])
            self.turns[name] = replace(held, message=message, replies=[], calls=calls)
        return self.turns[name]


@dataclass
class Tally:
    """Sums, and values that are averaged, by name. Tallies of several processes can be added up."""

    counts: dict[str, float] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)  # the mean of an empty list is 0

    def measure(self, prefix: str, measured: Iterable[Mapping[str, Any]]) -> "Tally":
        """Add the numbers of each mapping, under their names with the prefix; returns self."""
        for numbers in measured:
            for name, value in numbers.items():
                self.values.setdefault(prefix + name, []).append(as_number(name, value))
        return self

    @classmethod
    def total(cls, tallies: Iterable["Tally"]) -> "Tally":
        total = cls()
        for tally in tallies:
            for name, count in tally.counts.items():
                total.counts[name] = total.counts.get(name, 0) + count
            for name, values in tally.values.items():
                total.values.setdefault(name, []).extend(values)
        return total

    def metrics(self) -> dict[str, float]:
        return self.counts | {name: fmean(values) if values else 0.0 for name, values in sorted(self.values.items())}

    def of_split(self, split: str) -> dict[str, float]:
        """Return the line of a split: the metrics as `split/NAME`."""
        return {name if name.startswith(f"{split}/") else f"{split}/{name}": value
                for name, value in self.metrics().items()}


def tally_of(groups: Sequence[TrajectoryGroup], metrics: Mapping[str, float]) -> Tally:
    """Return the metrics of trajectories that are not trained on, under ART's names, and the caller's metrics."""
    trajectories = [trajectory for group in groups for trajectory in group]
    failed = sum(len(group.exceptions) for group in groups)
    tally = Tally().measure("group_", (group.metrics for group in groups))
    tally.measure("", (trajectory.metrics for trajectory in trajectories))
    if trajectories:
        rewards = [[as_number("reward", member.reward) for member in group] for group in groups]
        spreads = [stdev(each) if isfinite(sum(each)) else nan for each in rewards if len(each) > 1]
        tally.values |= {"reward": [reward for each in rewards for reward in each], "reward_std_dev": spreads}
    if trajectories or failed:
        tally.values["exception_rate"] = [0.0] * len(trajectories) + [1.0] * failed
    tally.values |= {name: [as_number(name, value)] for name, value in metrics.items()}
    return tally
