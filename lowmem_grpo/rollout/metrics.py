"""Metrics of rollouts: rewards, lengths, groups with signal, and the turns of episodes."""

from statistics import fmean, stdev

from lowmem_grpo.runs.trajectory import ENDINGS
from lowmem_grpo.types import Rollout, RolloutGroup

OF_TOOLS = ("answer", "parse_error")  # endings that only episodes with tools have


def rollout_metrics(groups: list[RolloutGroup], names: list[str]) -> dict[str, float]:
    """Return reward and completion length metrics, under TRL's names. Lengths count the tokens that the policy drew."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.num_trained for rollout in rollouts]
    terminated = [r.num_trained for r in rollouts if r.finish_reason == "stop"] or [0]
    with_signal = sum(any(r.has_signal for r in group.rollouts) for group in groups)
    metrics = {"completions/mean_length": fmean(lengths), "completions/min_length": min(lengths),
               "completions/max_length": max(lengths), "completions/mean_terminated_length": fmean(terminated),
               "completions/min_terminated_length": min(terminated),
               "completions/max_terminated_length": max(terminated),
               "completions/clipped_ratio": fmean(r.finish_reason == "length" for r in rollouts),
               "frac_reward_zero_std": fmean(not spread(group) for group in groups), "groups/total": len(groups),
               "groups/with_signal": with_signal, "groups/signal_share": with_signal / len(groups)}
    for name in names:
        metrics |= mean_and_std(f"rewards/{name}/mean", f"rewards/{name}/std", [r.rewards.get(name) for r in rollouts])
    if episodes := [rollout for rollout in rollouts if rollout.ending]:
        metrics |= episode_metrics(episodes) | {"groups/lost": sum(group.lost for group in groups)}
    return metrics | mean_and_std("reward", "reward_std", [r.reward for r in rollouts])


def episode_metrics(episodes: list[Rollout]) -> dict[str, float]:
    """Return metrics of turns, endings, tool calls (under TRL's names), and the share of prompt tokens cached."""
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
    """Return the mean share of the `seconds` of sampling that an episode waited for its tools and environment."""
    waited = [sum(turn.seconds for turn in rollout.turns) for group in groups for rollout in group.rollouts
              if rollout.turns]
    return {"tools/waiting_share": fmean(waited) / seconds} if waited and seconds else {}


def spread(group: RolloutGroup) -> bool:
    return len({rollout.reward for rollout in group.rollouts if rollout.reward is not None}) > 1


def mean_and_std(mean_name: str, std_name: str, values: list[float | None]) -> dict[str, float]:
    """Return mean and unbiased standard deviation of the values that are not None; empty if there are none."""
    present = [value for value in values if value is not None]
    if not present:
        return {}
    return {mean_name: fmean(present), std_name: stdev(present) if len(present) > 1 else 0.0}
