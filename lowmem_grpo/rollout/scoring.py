"""From Scores to rollouts: rewards, their weighted sum, baselines and advantages; and metrics of scored rollouts."""

import logging
import math
from collections.abc import Sequence
from dataclasses import fields
from operator import and_
from statistics import fmean, stdev
from typing import Any

import torch

from lowmem_grpo.config.sampling import EpisodeSettings
from lowmem_grpo.data.prompts import Prompt
from lowmem_grpo.losses.advantages import AdvantageSettings, assign_advantages, combine_rewards, without_metrics_alone
from lowmem_grpo.losses.credit import assign_credit
from lowmem_grpo.rewards.calling.reward_batch import RewardBatch
from lowmem_grpo.rewards.calling.scorer import RewardScorer, Scores
from lowmem_grpo.runs.state import Clock, TrainerState
from lowmem_grpo.runs.trajectory import ENDINGS
from lowmem_grpo.types import Rollout, RolloutGroup, Turn, repeated_share

logger = logging.getLogger(__name__)
REPEATED = 4  # tokens of an n-gram that counts as repeated
OF_TOOLS = ("answer", "parse_error")  # endings that only episodes with tools have


class EnvironmentReward:
    """The reward function of one environment class, named like the class: the sum of the rewards of an episode's turns.
    It gives None for an episode in an environment of another class, or if no turn had a reward."""

    by_group = True  # scores each episode alone, so it may be called while other groups are sampled

    def __init__(self, kind: type) -> None:
        self.kind, self.__name__ = kind, kind.__name__

    def __call__(self, *, turns: list[list[Turn]], environments: list[Any], **kwargs: Any) -> list[float | None]:
        """Return the rewards (N,) of N episodes. TypeError if a reward is not a number, ValueError if not finite."""
        played = zip(turns, environments, strict=True)
        return [self.pay(each) if environment is None or type(environment) is self.kind else None
                for each, environment in played]

    def pay(self, turns: list[Turn]) -> float | None:
        paid = [self.finite(turn.reward) for turn in turns if turn.reward is not None]
        return self.finite(sum(paid)) if paid else None

    def finite(self, value: Any) -> float:
        if not isinstance(value, (int, float)):
            raise TypeError(f"{self.__name__} paid {value!r:.100}, a {type(value).__name__}; it must pay a number")
        if not math.isfinite(value):
            raise ValueError(f"{self.__name__} paid {value}; it must pay a finite number, or None for no reward")
        return float(value)

    def __repr__(self) -> str:
        return f"<reward of the environment {self.__name__}>"


class Scoring:
    """The scoring of a run: it starts the calls of the reward functions, and writes their results into rollouts."""

    def __init__(
        self, scorer: RewardScorer, settings: AdvantageSettings, state: TrainerState, clock: Clock | None = None,
        credit: EpisodeSettings | None = None,
    ) -> None:
        """`credit` is for advantages per turn (None: there are none). Reward functions get `state`."""
        self.credit = credit
        self.scorer, self.settings, self.state, self.clock = scorer, settings, state, clock or Clock()
        self.said_silent = False  # True once the log says that a completion got no reward from any function

    @property
    def names(self) -> list[str]:
        return self.scorer.names

    def start_batch(self, prompts: Sequence[Prompt | RolloutGroup]) -> RewardBatch:
        """Return the reward calls of a batch. Create them before the batch is sampled, and settle them afterwards."""
        return RewardBatch(self.scorer, prompts, self.state, self.clock)

    def apply(self, groups: list[RolloutGroup], scores: Scores) -> dict[str, float]:
        """Set rewards, their weighted sum and the advantage of every rollout; return the logged metrics. A NaN or
        infinite reward becomes None. Unless its function's weight is 0, it is listed in `invalid_rewards`, and the step
        is skipped. A group in which a required function returned None is `unjudged`. Nothing is set without functions.
        """
        if not self.names:
            return {}
        with self.clock.phase("reward"):
            self.set_rewards(groups, scores)
            unjudged = self.mark_unjudged(groups, scores)
            self.assign(groups)
        self.warn(groups, scores)
        return scores.metrics | unjudged | {f"rewards/{name}/invalid": float(n) for name, n in scores.invalid.items()}

    def apply_early(self, group: RolloutGroup, scores: Scores) -> None:
        """Apply the first entries of `scores` to one group while others are sampled; leave warnings to `apply`."""
        self.set_rewards([group], scores)
        self.mark_unjudged([group], scores)
        self.assign([group])

    def set_rewards(self, groups: list[RolloutGroup], scores: Scores) -> None:
        """Write each function's rewards, and the columns that it logged, into the rollouts."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for index, rollout in enumerate(rollouts):
            failed = rollout.failed  # the environment failed, so the rollout gets no reward
            rollout.rewards |= {name: None if failed else values[index] for name, values in scores.rewards.items()}
            rollout.environment = None  # no longer needed once its reward is known
            rollout.extras |= {name: values[index] for name, values in scores.extras.items()}
            returned = {} if failed else {name: scores.returned[name][index] for name in self.paying}
            rollout.invalid_rewards = {n: v for n, v in returned.items() if v is not None and not math.isfinite(v)}

    @property
    def paying(self) -> list[str]:
        return [name for name, weight in zip(self.names, self.scorer.weights, strict=True) if weight]

    def assign(self, groups: list[RolloutGroup]) -> None:
        """Set the advantages of completions, and of the turns of episodes, with `groups` as the batch."""
        if not self.names:
            return
        own = {field.name: getattr(self.settings, field.name) for field in fields(AdvantageSettings)}
        # the user's weights lack those of environment rewards
        settings = AdvantageSettings(**own | {"reward_weights": self.scorer.weights})
        assign_advantages(groups, self.names, settings)
        if self.credit is not None and any(rollout.turns for group in groups for rollout in group.rollouts):
            weights = dict(zip(self.names, self.scorer.weights, strict=True))
            paid = [func.__name__ for func in self.scorer.funcs if isinstance(func, EnvironmentReward)]
            discount, state_weight = self.credit.turn_discount, self.credit.state_weight
            assign_credit(groups, settings, discount, state_weight, weights, paid)

    def warn(self, groups: list[RolloutGroup], scores: Scores) -> None:
        """Warn of functions that returned NaN or infinity, and once if a completion got no reward from any function."""
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
        silent = [pair for pair, values in zip(rollouts, zip(*scores.returned.values(), strict=True), strict=True)
                  if all(value is None for value in values) and not (pair[0].unjudged or pair[1].failed)]
        if silent and not self.said_silent:
            self.said_silent = True
            group, rollout = silent[0]
            logger.warning("All reward functions returned None for the following kwargs: %s. So %d of %d completions "
                           "have no reward and are not learnt from; at least one function is to return a number",
                           group.row | {"completion": rollout.text}, len(silent), len(rollouts))
        for name, count in scores.invalid.items():
            if count:
                logger.warning(
                    'reward %s gave NaN or infinity for %d completions: %s. For "no reward" a function returns None',
                    name, count,
                    "no step is made on their groups" if name in self.paying else "its weight is 0, so they count",
                )

    def mark_unjudged(self, groups: list[RolloutGroup], scores: Scores) -> dict[str, float]:
        """Mark groups in which a required function returned None; return how often each function did so."""
        missing = {name: [value is None for value in scores.returned[name]] for name in self.scorer.required}
        start = 0
        for group in groups:
            end = start + len(group.rollouts)
            counted = [not rollout.failed for rollout in group.rollouts]
            group.unjudged = any(any(map(and_, places[start:end], counted)) for places in missing.values())
            start = end
        return {f"rewards/{name}/unjudged": float(sum(places)) for name, places in missing.items()}

    def set_baselines(self, groups: list[RolloutGroup], greedy: list[RolloutGroup], scores: Scores) -> None:
        """Set each group's baseline to the reward of its prompt's greedy completion (ReMax), the only rollout of a
        group in `greedy`. It stays None if every function, or any required function, returned None."""
        for name, count in scores.invalid.items():
            if count:
                logger.warning("reward %s gave NaN or infinity for %d greedy completions: no baseline of it", name,
                               count)
        columns = [[torch.nan if value is None else value for value in scores.rewards[name]] for name in self.names]
        weights = torch.tensor(self.scorer.weights, dtype=torch.float64)
        table = without_metrics_alone(torch.tensor(columns, dtype=torch.float64).T, weights)  # (P, R)
        sums = combine_rewards(table[:, None], weights)
        self.mark_unjudged(greedy, scores)
        for group, single, reward in zip(groups, greedy, sums.flatten().tolist(), strict=True):
            group.baseline = None if single.unjudged or reward != reward else reward


def rollout_metrics(groups: list[RolloutGroup], names: list[str]) -> dict[str, float]:
    """Return metrics of rewards, if there are any, and completion lengths, under TRL's names. Lengths count the tokens
    that the policy drew."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.num_trained for rollout in rollouts]
    terminated = [r.num_trained for r in rollouts if r.finish_reason == "stop"] or [0]
    with_signal = sum(any(r.has_signal for r in group.rollouts) for group in groups)
    rewards = [{r.reward for r in group.rollouts if r.reward is not None} for group in groups]
    metrics = {"completions/mean_length": fmean(lengths), "completions/min_length": min(lengths),
               "completions/max_length": max(lengths), "completions/mean_terminated_length": fmean(terminated),
               "completions/min_terminated_length": min(terminated),
               "completions/max_terminated_length": max(terminated),
               "completions/clipped_ratio": fmean(r.finish_reason == "length" for r in rollouts),
               "completions/repetition": fmean(repeated_share(r.sampled_ids, REPEATED) for r in rollouts),
               **({"frac_reward_zero_std": fmean(len(each) < 2 for each in rewards), "groups/total": len(groups),
                   "groups/with_signal": with_signal, "groups/signal_share": with_signal / len(groups)}
                  if names or any(rewards) else {})}
    for name in names:
        metrics |= mean_and_std(f"rewards/{name}/mean", f"rewards/{name}/std", [r.rewards.get(name) for r in rollouts])
    if episodes := [rollout for rollout in rollouts if rollout.ending]:
        metrics |= episode_metrics(episodes) | {"groups/lost": sum(group.lost for group in groups)}
    return metrics | mean_and_std("reward", "reward_std", [r.reward for r in rollouts])


def episode_metrics(episodes: list[Rollout]) -> dict[str, float]:
    """Return metrics of turns, endings and tool calls (under TRL's names), and the share of cached prompt tokens."""
    turns = [turn for rollout in episodes for turn in rollout.turns]
    numbers = [len(rollout.turns) for rollout in episodes]
    endings = [rollout.ending for rollout in episodes]
    metrics = {"turns/mean": fmean(numbers), "turns/min": min(numbers), "turns/max": max(numbers),
               "turns/cut_ratio": fmean([turn.finish_reason == "length" for turn in turns] or [0.0])}
    metrics |= {f"episodes/{name}": endings.count(name) / len(endings) for name in {*ENDINGS, *endings}}
    calls, failures = sum(turn.calls for turn in turns), sum(turn.failures for turn in turns)
    if calls or failures or {*OF_TOOLS} & {*endings}:
        metrics |= {"tools/call_frequency": calls / len(episodes),
                    "tools/failure_frequency": failures / max(calls, failures, 1)}
    if heard := sum(rollout.asked for rollout in episodes):
        metrics |= {"other/call_frequency": heard / len(episodes),
                    "other/failure_frequency": sum(rollout.unread for rollout in episodes) / heard}
    if asked := sum(len(turn.prompt_ids) for turn in turns):
        metrics["tokens/cached_share"] = sum(turn.cached_tokens for turn in turns) / asked
    return metrics


def waiting_share(groups: list[RolloutGroup], seconds: float) -> dict[str, float]:
    """Return the share of the sampling `seconds` that an episode waited on average for its tools and environment."""
    waited = [sum(turn.seconds for turn in rollout.turns) for group in groups for rollout in group.rollouts
              if rollout.turns]
    return {"tools/waiting_share": fmean(waited) / seconds} if waited and seconds else {}


def mean_and_std(mean_name: str, std_name: str, values: list[float | None]) -> dict[str, float]:
    """Return mean and unbiased standard deviation of the values that are not None; {} if all values are None."""
    present = [value for value in values if value is not None]
    if not present:
        return {}
    return {mean_name: fmean(present), std_name: stdev(present) if len(present) > 1 else 0.0}
