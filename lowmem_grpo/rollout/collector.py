"""The groups of an update: sampled, scored, and chosen among those that teach something."""

import math
from collections.abc import Callable
from statistics import fmean
from typing import Protocol

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import Prompt, PromptSource
from lowmem_grpo.engines.base import OnGroup
from lowmem_grpo.losses.advantages import assign_advantages
from lowmem_grpo.losses.objective import Objective
from lowmem_grpo.rewards.calling.of_groups import EarlyScoring
from lowmem_grpo.rollout.metrics import rollout_metrics
from lowmem_grpo.rollout.replay import ReplayBuffer, age_of
from lowmem_grpo.rollout.sampler import greedy
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import RolloutGroup

COUNTS = ("/invalid", "/unjudged")
Watch = Callable[[list[RolloutGroup]], dict[str, float]]
Begin = Callable[[list[Prompt]], EarlyScoring]
Score = Callable[[list[RolloutGroup], EarlyScoring], dict[str, float]]


class Sample(Protocol):
    """Rollouts of prompts; `on_group` gets those of each while others are sampled."""

    def __call__(
        self, prompts: list[Prompt], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[RolloutGroup]: ...


class Collector:
    """Fills the places of an update, `prompts_per_generation` of them, in this order:

    1. As many prompts are sampled and scored.
    2. Dynamic sampling: while places hold groups without signal, at most `dynamic_sampling_rounds` times, further
       prompts are sampled, and those groups of them that have signal take these places.
    3. Replay: kept groups of earlier steps take what places without signal are left.
    4. Where that does not suffice, groups without signal stay, so that every step has the same number of groups.

    A group has signal where a rollout that counts has an advantage other than 0. Advantages are those within the
    places, which matters to estimators that look at the whole batch.
    """

    def __init__(
        self, config: GRPOConfig, source: PromptSource, state: TrainerState, objective: Objective, names: list[str],
        sample: Sample, begin_scoring: Begin, score: Score, watch: Watch,
    ) -> None:
        """`names` are those of the rewards; `begin_scoring` is told of a draw's prompts before they are sampled, and
        `watch` looks at a step's first groups before they are scored."""
        self.config, self.source, self.state, self.objective, self.names = config, source, state, objective, names
        self.sample, self.begin_scoring, self.score, self.watch = sample, begin_scoring, score, watch
        self.replay = ReplayBuffer(config.replay_buffer_size, config.replay_max_age)
        self.begin()

    def begin(self) -> None:
        """Forget what the step before was made of."""
        self.sampled: list[RolloutGroup] = []  # in this step, each group once, whether it is trained on or not
        self.logs: list[dict[str, float]] = []  # what the reward functions logged, of each round
        self.watched: dict[str, float] = {}
        self.counts: dict[str, float] = {}
        self.tokens = 0  # of completions sampled in this step, greedy ones too

    def collect(self) -> list[RolloutGroup]:
        """The groups of the next update, with rewards and advantages."""
        self.begin()
        places = self.draw(self.config.prompts_per_generation, 0)
        surplus = self.resample(places)
        if self.config.replay_buffer_size:
            self.replay_into(places)
            self.replay.offer(filter(self.has_signal, [*places, *surplus]))
            self.counts["sampling/replay_size"] = len(self.replay)
        if self.config.dynamic_sampling_rounds:
            used = sum(not group.replayed for group in places)
            self.counts["sampling/dropped_groups"] = len(self.sampled) - used
        self.state.epoch = self.source.epoch
        return places

    def draw(self, count: int, extra_round: int) -> list[RolloutGroup]:
        """The next `count` prompts, sampled and scored."""
        prompts = self.source.take(count)
        params = self.config.sampling(self.config.rollout_seed(self.state.global_step, extra_round))
        with self.begin_scoring(prompts) as scoring:
            groups = self.sample(prompts, params, scoring.on_group)
            self.count(groups)
            self.sampled += groups
            if not extra_round:
                self.watched = self.watch(groups)
            self.logs.append(self.score(groups, scoring))
        if self.source.pools is not None:
            for prompt, group in zip(prompts, groups, strict=True):
                assert prompt.index is not None  # it is of the source
                self.source.pools.record(prompt.index, prompt.epoch, [rollout.reward for rollout in group.rollouts])
        return groups

    def count(self, groups: list[RolloutGroup]) -> None:
        """Take account of sampled tokens; those of a prompt once for each of its completions."""
        completions = [len(rollout.completion_ids) for group in groups for rollout in group.rollouts]
        prompts = [len(group.prompt_ids) for group in groups for _ in group.rollouts]
        self.tokens += sum(completions)
        self.state.num_tokens += sum(completions) + sum(prompts)

    def greedy(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Of each group that needs a baseline (ReMax) and has none, one with its prompt's greedy completion alone."""
        if self.config.advantage_estimator != "remax":
            return []
        prompts = [Prompt(group.row, group.prompt_ids, "") for group in groups if group.baseline is None]
        found = self.sample(prompts, greedy(self.config.sampling(None))) if prompts else []
        self.count(found)
        return found

    # Groups without signal

    def has_signal(self, group: RolloutGroup) -> bool:
        return any(rollout.advantage for rollout in self.objective.counted(group.rollouts))

    def empty(self, places: list[RolloutGroup]) -> list[int]:
        """Which places hold a group without signal."""
        return [place for place, group in enumerate(places) if not self.has_signal(group)]

    def fill(self, places: list[RolloutGroup], empty: list[int], groups: list[RolloutGroup]) -> None:
        """Put groups into empty places, in order, as far as they go."""
        for place, group in zip(empty, groups, strict=False):
            places[place] = group
        self.assign(places)

    def assign(self, groups: list[RolloutGroup]) -> None:
        """Advantages where these groups are the batch."""
        assign_advantages(groups, self.names, self.config)

    def resample(self, places: list[RolloutGroup]) -> list[RolloutGroup]:
        """Fill places with freshly sampled groups; returns those with signal for which there was none left."""
        rounds = 0
        surplus: list[RolloutGroup] = []
        while rounds < self.config.dynamic_sampling_rounds and (empty := self.empty(places)):
            rounds += 1
            fresh = self.draw(self.enough_for(len(empty)), rounds)
            self.assign([*places, *fresh])
            useful = list(filter(self.has_signal, fresh))
            self.fill(places, empty, useful)
            surplus += useful[len(empty):]
        if self.config.dynamic_sampling_rounds:
            self.counts |= {"sampling/rounds": rounds, "sampling/surplus_groups": len(surplus),
                            "sampling/resampled_groups": len(self.sampled) - len(places)}
        return surplus

    def enough_for(self, missing: int) -> int:
        """Prompts that will give so many groups with signal, going by this step's; a generation's at most."""
        useful = len(self.sampled) - len(self.empty(self.sampled))
        return min(math.ceil(missing * len(self.sampled) / max(useful, 1)), self.config.prompts_per_generation)

    def replay_into(self, places: list[RolloutGroup]) -> None:
        """Fill places with kept groups."""
        empty = self.empty(places)
        kept = self.replay.take(len(empty), self.state.policy_version)
        ages = [age_of(group, self.state.policy_version) for group in kept]
        self.fill(places, empty, kept)
        self.counts["sampling/replayed_groups"] = len(kept)
        if ages:
            self.counts["sampling/replay_age"] = fmean(ages)

    # What is logged

    def metrics(self, groups: list[RolloutGroup], seconds: float) -> dict[str, float]:
        """Of a step on `groups`, with so many seconds of sampling.

        Rewards and lengths are those of all that was sampled in this step: they measure the policy, and what is
        trained on is a selection. Names that begin with `groups/` are of what is trained on.
        """
        trained = {name: value for name, value in rollout_metrics(groups, []).items() if name.startswith("groups/")}
        pools = {} if self.source.pools is None else self.source.pools.metrics()
        return {
            **rollout_metrics(self.sampled, self.names), **trained, **merged(self.logs), **self.watched, **self.counts,
            **pools, "data/skipped_rows": sum(self.source.skipped.values()), "num_tokens": self.state.num_tokens,
            "tokens_per_second": self.tokens / max(seconds, 1e-9),
        }


def merged(logs: list[dict[str, float]]) -> dict[str, float]:
    """What several rounds logged: sums of counts (names that end in COUNTS), means of everything else."""
    names = sorted({name for log in logs for name in log})
    values = {name: [log[name] for log in logs if name in log] for name in names}
    return {name: sum(found) if name.endswith(COUNTS) else fmean(found) for name, found in values.items()}
