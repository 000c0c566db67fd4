"""What an environment pays, as a reward function beside others."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_grpo.types import Turn  # which needs torch


class EnvironmentReward:
    """The reward function of the environments of one class, under the name of the class: the sum of what an episode's
    turns were paid. None for an episode in an environment of another class, and where nothing was paid."""

    by_group = True  # looks at one episode at a time: may be called while other groups are sampled

    def __init__(self, kind: type) -> None:
        self.kind, self.__name__ = kind, kind.__name__

    def __call__(self, *, turns: "list[list[Turn]]", environments: list[Any], **kwargs: Any) -> list[float | None]:
        """Return the pay (N,) of N episodes. TypeError for what is no number, ValueError for NaN and infinity."""
        played = zip(turns, environments, strict=True)
        return [self.pay(each) if environment is None or type(environment) is self.kind else None
                for each, environment in played]

    def pay(self, turns: "list[Turn]") -> float | None:
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
