"""Statistics of rollouts: rewards, lengths, and groups with signal."""

from statistics import fmean, stdev

from lowmem_grpo.types import RolloutGroup


def rollout_metrics(groups: list[RolloutGroup], names: list[str]) -> dict[str, float]:
    """Rewards and completion lengths of a generation, under TRL's names."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    terminated = [len(r.completion_ids) for r in rollouts if r.finish_reason == "stop"] or [0]
    with_signal = sum(any(r.advantage for r in group.rollouts) for group in groups)
    metrics = {
        "completions/mean_length": fmean(lengths), "completions/min_length": min(lengths),
        "completions/max_length": max(lengths), "completions/mean_terminated_length": fmean(terminated),
        "completions/min_terminated_length": min(terminated), "completions/max_terminated_length": max(terminated),
        "completions/clipped_ratio": fmean(r.finish_reason == "length" for r in rollouts),
        "frac_reward_zero_std": fmean(not spread(group) for group in groups),
        "groups/total": len(groups),
        "groups/with_signal": with_signal, "groups/signal_share": with_signal / len(groups),
    }
    for name in names:
        metrics |= mean_and_std(f"rewards/{name}/mean", f"rewards/{name}/std", [r.rewards.get(name) for r in rollouts])
    return metrics | mean_and_std("reward", "reward_std", [r.reward for r in rollouts])


def spread(group: RolloutGroup) -> bool:
    """Whether the group's rewards differ."""
    return len({rollout.reward for rollout in group.rollouts if rollout.reward is not None}) > 1


def mean_and_std(mean_name: str, std_name: str, values: list[float | None]) -> dict[str, float]:
    """Mean and unbiased standard deviation of the values that are not None; empty if there are none."""
    present = [value for value in values if value is not None]
    if not present:
        return {}
    return {mean_name: fmean(present), std_name: stdev(present) if len(present) > 1 else 0.0}
