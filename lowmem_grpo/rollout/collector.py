"""The groups of an update: sampled in one process or several, scored, and selected by dynamic sampling and replay."""

import math
from dataclasses import replace
from statistics import fmean
from typing import Any

from lowmem_grpo.config.sampling import Draws, SamplingParams, StrategySettings
from lowmem_grpo.data.prompts import Prompt, PromptSource
from lowmem_grpo.engines.base import Pace
from lowmem_grpo.losses.objective import Objective
from lowmem_grpo.rewards.calling.reward_batch import RewardBatch
from lowmem_grpo.rollout.parity import ParityGate
from lowmem_grpo.rollout.replay import ReplayBuffer, age_of
from lowmem_grpo.rollout.sampler import Overlap, Sampler
from lowmem_grpo.rollout.scoring import Scoring, rollout_metrics, waiting_share
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import RolloutGroup

COUNTS = ("/invalid", "/unjudged")


class Collector:
    """Collects the `draws.count` groups of an update:

    1. It samples and scores `draws.count` prompts.
    2. Dynamic sampling: while some groups have no signal, it samples more prompts, at most `dynamic_sampling_rounds`
       times. New groups with signal replace groups without.
    3. Replay: kept groups of earlier steps replace the groups that still have no signal.
    4. Groups without signal that are not replaced stay, so that every step has the same number of groups.

    A group has signal if one of its rollouts has a nonzero advantage. Failed episodes, and truncated completions that
    the settings mask, do not count as signal. Advantages are computed over all groups of the update, since some
    estimators look at the whole batch.
    """

    def __init__(
        self, strategies: StrategySettings, draws: Draws, source: PromptSource, state: TrainerState,
        objective: Objective, sampler: Sampler, scoring: Scoring, parity: ParityGate, overlap: Overlap | None = None,
    ) -> None:
        self.strategies, self.draws, self.source = strategies, draws, source
        self.state, self.objective = state, objective
        self.sampler, self.scoring, self.parity, self.overlap = sampler, scoring, parity, overlap
        self.replay = ReplayBuffer(strategies.replay_buffer_size, strategies.replay_max_age)
        self.reset_step()

    def reset_step(self) -> None:
        self.sampled: list[RolloutGroup] = []  # all groups sampled in this step, trained on or not
        self.logs: list[dict[str, float]] = []  # metrics logged by the reward functions, one dict per sampling round
        self.watched: dict[str, float] = {}
        self.counts: dict[str, float] = {}
        self.pace = Pace()
        self.tokens = 0  # tokens drawn in this step, greedy completions included

    def collect(self) -> list[RolloutGroup]:
        """Return the groups of the next update, with rewards and advantages."""
        self.reset_step()
        places = self.draw(self.draws.count, 0)
        surplus = self.resample(places)
        if self.strategies.replay_buffer_size:
            self.replay_into(places)
            self.replay.offer([group for group in [*places, *surplus] if self.has_signal(group)])
            self.counts["sampling/replay_size"] = len(self.replay)
        if self.strategies.dynamic_sampling_rounds:
            used = sum(not group.replayed for group in places)
            self.counts["sampling/dropped_groups"] = len(self.sampled) - used
        return places

    def draw(self, count: int, extra_round: int) -> list[RolloutGroup]:
        """Sample and score the next `count` prompts, fewer at the end of an epoch."""
        prompts = self.source.next_batch(count)
        params = self.draws.for_step(self.state.global_step, extra_round)
        groups = self.draw_groups(prompts, params, extra_round)
        self.sampled += groups
        self.source.record(prompts, groups)
        return groups

    def draw_groups(self, prompts: list[Prompt], params: SamplingParams, extra_round: int) -> list[RolloutGroup]:
        with self.scoring.start_batch(prompts) as calls:
            if self.overlap is not None:
                self.overlap.start_step(prompts, calls)
            groups = self.sampler.sample(prompts, params, calls.on_group, self.overlap)
            self.pace.add(self.sampler.pace())
            self.count(groups)
            if not extra_round:
                self.watched = self.parity.watch(groups)
            self.logs.append(self.score(groups, calls))
        return groups

    def score(self, groups: list[RolloutGroup], calls: RewardBatch) -> dict[str, float]:
        """Set rewards, baselines and advantages of sampled groups; return the metrics that reward functions logged."""
        scores = calls.settle(groups)
        if self.scoring.settings.advantage_estimator == "remax":
            self.set_baselines([group for group in groups if group.baseline is None])
        return self.scoring.apply(groups, scores)

    def set_baselines(self, groups: list[RolloutGroup]) -> None:
        """Sample a greedy completion of each group's prompt; its reward becomes the group's baseline (ReMax)."""
        if not groups:
            return
        prompts = [Prompt(group.row, group.prompt_ids, "") for group in groups]
        with self.scoring.start_batch(prompts) as calls:
            greedy = self.sampler.sample(prompts, self.draws.greedy, calls.on_group)
            self.pace.add(self.sampler.pace())
            self.count(greedy)
            self.scoring.set_baselines(groups, greedy, calls.settle(greedy))

    def count(self, groups: list[RolloutGroup]) -> None:
        """Count the sampled tokens; a prompt's tokens count once per completion."""
        completions = [rollout.num_trained for group in groups for rollout in group.rollouts]
        prompts = [len(group.prompt_ids) for group in groups for _ in group.rollouts]
        self.tokens += sum(completions)
        self.state.num_tokens += sum(completions) + sum(prompts)

    def has_signal(self, group: RolloutGroup) -> bool:
        return any(rollout.has_signal for rollout in self.objective.counted(group.rollouts))

    def empty(self, places: list[RolloutGroup]) -> list[int]:
        return [place for place, group in enumerate(places) if not self.has_signal(group)]

    def fill(self, places: list[RolloutGroup], empty: list[int], groups: list[RolloutGroup]) -> None:
        for place, group in zip(empty, groups, strict=False):
            places[place] = group
        self.scoring.assign(places)

    def resample(self, places: list[RolloutGroup]) -> list[RolloutGroup]:
        """Replace groups without signal by newly sampled groups with signal; return those beyond the number needed."""
        rounds = 0
        surplus: list[RolloutGroup] = []
        while rounds < self.strategies.dynamic_sampling_rounds and (empty := self.empty(places)):
            rounds += 1
            with_signal = len(self.sampled) - len(self.empty(self.sampled))
            enough = math.ceil(len(empty) * len(self.sampled) / max(with_signal, 1))  # by the share with signal so far
            fresh = self.draw(min(enough, self.draws.count), rounds)
            self.scoring.assign([*places, *fresh])
            useful = [group for group in fresh if self.has_signal(group)]
            self.fill(places, empty, useful)
            surplus += useful[len(empty):]
        if self.strategies.dynamic_sampling_rounds:
            self.counts |= {"sampling/rounds": rounds, "sampling/surplus_groups": len(surplus),
                            "sampling/resampled_groups": len(self.sampled) - len(places)}
        return surplus

    def replay_into(self, places: list[RolloutGroup]) -> None:
        """Replace groups without signal by groups from the replay buffer."""
        empty = self.empty(places)
        kept = self.replay.take_groups(len(empty), self.state.policy_version)
        ages = [age_of(group, self.state.policy_version) for group in kept]
        self.fill(places, empty, kept)
        self.counts["sampling/replayed_groups"] = len(kept)
        if ages:
            self.counts["sampling/replay_age"] = fmean(ages)

    def metrics(self, groups: list[RolloutGroup], seconds: float) -> dict[str, float]:
        """Return a step's metrics. Those of `groups/`, except `groups/lost`, are about the groups to train on, and all
        other metrics about all sampled groups."""
        trained = {name: value for name, value in rollout_metrics(groups, self.scoring.names).items()
                   if name.startswith("groups/") and name != "groups/lost"}
        pools = {} if self.source.pools is None else self.source.pools.metrics()
        return {**rollout_metrics(self.sampled, self.scoring.names), **trained, **merged(self.logs), **self.watched,
                **self.counts, **pools, **self.pace.metrics(), **waiting_share(self.sampled, seconds),
                "data/skipped_rows": sum(self.source.skipped.values()), "num_tokens": self.state.num_tokens,
                "tokens_per_second": self.tokens / max(seconds, 1e-9)}


class SharedCollector(Collector):
    """A `Collector` of several ranks, which each sample and score a share of the prompts and exchange their groups."""

    def __init__(self, ranks: Any, *parts: Any) -> None:
        """`ranks` is from trainer/distributed.py; `parts` are the arguments of `Collector`."""
        self.ranks = ranks
        super().__init__(*parts)

    def draw_groups(self, prompts: list[Prompt], params: SamplingParams, extra_round: int) -> list[RolloutGroup]:
        share = self.ranks.process.share(len(prompts))
        mine, tokens, seen = [prompts[place] for place in share], self.tokens, self.state.num_tokens
        params = replace(params, part=(share.start, len(prompts)))
        own = super().draw_groups(mine, params, extra_round) if mine else []
        told = own, self.logs[-1:] if mine else [], self.tokens - tokens, self.state.num_tokens - seen, self.watched
        parts = self.ranks.gather("what was sampled", told)
        groups = [group for part in parts for group in part[0]]
        self.logs[len(self.logs) - bool(mine) :] = [merged([log for part in parts for log in part[1]])]
        self.tokens = tokens + sum(part[2] for part in parts)
        self.state.num_tokens = seen + sum(part[3] for part in parts)
        self.watched = parts[0][4]  # ranks check different tokens, but all must decide by the same result
        self.parity.take_in(self.watched)
        self.scoring.assign(groups)
        return groups


def merged(logs: list[dict[str, float]]) -> dict[str, float]:
    """Merge the logs of several sampling rounds: sum the counts (names that end in COUNTS), average other values."""
    names = sorted({name for log in logs for name in log})
    values = {name: [log[name] for log in logs if name in log] for name in names}
    return {name: sum(numbers) if name.endswith(COUNTS) else fmean(numbers) for name, numbers in values.items()}
