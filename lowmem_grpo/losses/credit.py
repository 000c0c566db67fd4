"""Credit assignment in episodes: advantages of turns, given to the tokens that the policy sampled in them.

    r_t  the environment's reward for turn t; the last turn also gets the other rewards of the episode
    G_t = sum_{s >= t} discount^(s - t) r_s                       the discounted reward to go
    A_t = G_t - the mean of the group's G_t at the same turn      with `turn_discount`; else the episode's advantage
        + state_weight (G_t - the mean of G over the group's turns that acted in the same state)

The last line is GiGPO's (arXiv 2505.10978, equations 6 to 8); without `turn_discount`, the discount is 1. Each
difference is divided as `scale_rewards` says. If a turn has no other turn to be compared with, that difference is 0.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from lowmem_grpo.losses.advantages import COMPARING, ESTIMATORS, AdvantageSettings, of_group
from lowmem_grpo.utils import torch

if TYPE_CHECKING:
    from torch import Tensor

    from lowmem_grpo.types import Rollout, RolloutGroup

TurnIndex = tuple[int, int]  # (number of the episode, number of the turn)
Compared = dict[Hashable, dict[TurnIndex, float]]  # sets of returns that are compared with each other


def assign_credit(
    groups: list[RolloutGroup], settings: AdvantageSettings, discount: float | None, state_weight: float,
    weights: Mapping[str, float], paid: Collection[str],
) -> None:
    """Set `token_advantages` of episodes, and `advantage` to their mean, after `assign_advantages`. `weights` maps all
    rewards' names to weights; `paid` names the rewards that are sums of the turns' own rewards. Nothing is set if there
    is neither a discount nor a state to compare."""
    episodes = [(number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts
                if rollout.turns and rollout.reward is not None]
    gamma = 1.0 if discount is None else discount
    turns, states = comparisons([(group, rollout, returns_of(rollout, gamma, weights, paid))
                                 for group, rollout in episodes])
    of_turns = {} if discount is None else advantages_among(turns, settings)
    of_states = advantages_among(states, settings) if state_weight else {}
    if not of_turns and not of_states:
        return
    for episode, (_, rollout) in enumerate(episodes):
        places = [(episode, turn) for turn in range(len(rollout.turns))]
        advantages = [of_turns.get(place, rollout.advantage) + state_weight * of_states.get(place, 0.0)
                      for place in places]
        lengths = [len(turn.completion_ids) for turn in rollout.turns]  # tokens that were sampled in each
        assert sum(lengths) == rollout.num_trained, (lengths, rollout.num_trained)
        each = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(torch.tensor(lengths))
        rollout.token_advantages = rollout.with_context(each.float())
        rollout.advantage = each.mean().item() if len(each) else 0.0


def comparisons(episodes: list[tuple[int, Rollout, list[float]]]) -> tuple[Compared, Compared]:
    """Return the turns' values G_t, grouped by turn number and by state. An episode is (group, rollout, its G_t)."""
    turns: Compared = {}
    states: Compared = {}
    for episode, (group, rollout, returns) in enumerate(episodes):
        for number, value in enumerate(returns):
            turns.setdefault((group, number), {})[episode, number] = value
            if (state := rollout.turns[number].state) is not None:
                states.setdefault((group, state), {})[episode, number] = value
    return turns, states


def returns_of(rollout: Rollout, discount: float, weights: Mapping[str, float], paid: Collection[str]) -> list[float]:
    """Return G_t of each turn. With discount 1, G of the first turn is the episode's reward."""
    values = paid_in_turns(rollout, weights, paid)
    values[-1] += sum(weights[name] * value for name, value in rollout.rewards.items()
                      if value is not None and name in weights and name not in paid)
    returns, to_go = [], 0.0
    for value in reversed(values):
        to_go = value + discount * to_go
        returns.append(to_go)
    return returns[::-1]


def paid_in_turns(rollout: Rollout, weights: Mapping[str, float], paid: Collection[str]) -> list[float]:
    """Return what the environment paid for each turn, times its weight."""
    weight = sum(weights[name] for name, value in rollout.rewards.items()
                 if value is not None and name in weights and name in paid)
    return [weight * (turn.reward or 0.0) for turn in rollout.turns]


def token_rewards(rollout: Rollout, weights: Mapping[str, float], paid: Collection[str]) -> Tensor:
    """Return the rewards (N,) of a rollout's N sampled tokens, in float64: what the environment paid for a turn, at its
    last token, and what else the rollout earned, at the very last."""
    assert rollout.reward is not None and rollout.num_trained
    rewards = torch.zeros(rollout.num_trained, dtype=torch.float64)
    ends = accumulate(len(turn.completion_ids) for turn in rollout.turns)
    for end, value in zip(ends, paid_in_turns(rollout, weights, paid), strict=True):
        if end:
            rewards[end - 1] += value
    rewards[-1] += rollout.reward - rewards.sum()
    return rewards


def advantages_among(compared: Compared, settings: AdvantageSettings) -> dict[TurnIndex, float]:
    """Return the advantage of each turn over the turns that it is compared with."""
    widest = max(map(len, compared.values()), default=0)
    rows = [[*returns.values(), *[math.nan] * (widest - len(returns))] for returns in compared.values()]
    if not rows:
        return {}
    name = settings.advantage_estimator
    function = ESTIMATORS[name].function if name in COMPARING else of_group
    advantages = function(torch.tensor(rows, dtype=torch.float64), settings.scale, None, 0).tolist()
    return {place: value for returns, row in zip(compared.values(), advantages, strict=True)
            for place, value in zip(returns, row, strict=False)}
