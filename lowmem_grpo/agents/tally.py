"""`Tally`: numbers of trajectories, kept so that those of several processes add up."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from lowmem_grpo.agents.trajectories import TrajectoryGroup


@dataclass
class Tally:
    """Sums, and values of which the mean is told, by their names."""

    counts: dict[str, float] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)  # the mean of none is 0

    def measure(self, prefix: str, measured: Iterable[Mapping[str, Any]]) -> "Tally":
        """Take in numbers by name, of those that have them; returns this."""
        for one in measured:
            for name, value in one.items():
                self.values.setdefault(prefix + name, []).append(float(value))
        return self

    @classmethod
    def total(cls, tallies: Iterable["Tally"]) -> "Tally":
        """All of them together."""
        found = cls()
        for tally in tallies:
            for name, count in tally.counts.items():
                found.counts[name] = found.counts.get(name, 0) + count
            for name, values in tally.values.items():
                found.values.setdefault(name, []).extend(values)
        return found

    def metrics(self) -> dict[str, float]:
        """The sums and the means."""
        return self.counts | {name: fmean(values) if values else 0.0 for name, values in sorted(self.values.items())}


def tally_of(groups: Sequence[TrajectoryGroup], metrics: Mapping[str, float]) -> Tally:
    """What is logged of trajectories that are not trained on, under ART's names, and the caller's own numbers."""
    trajectories = [one for group in groups for one in group.trajectories]
    failed = sum(len(group.exceptions) for group in groups)
    found = Tally().measure("group_", (group.metrics for group in groups))
    found.measure("", (one.metrics for one in trajectories))
    if trajectories:
        spreads = [stdev(rewards) for group in groups if len(rewards := [one.reward for one in group.trajectories]) > 1]
        found.values |= {"reward": [one.reward for one in trajectories], "reward_std_dev": spreads}
    if trajectories or failed:
        found.values["exception_rate"] = [0.0] * len(trajectories) + [1.0] * failed
    found.values |= {name: [float(value)] for name, value in metrics.items()}
    return found


def of_split(split: str, tally: Tally) -> dict[str, float]:
    """The line of a split: its numbers as `split/NAME`."""
    return {name if name.startswith(f"{split}/") else f"{split}/{name}": value
            for name, value in tally.metrics().items()}
