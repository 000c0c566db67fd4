"""Entropy in the loss: which tokens take part (top-entropy masks), and how strong the bonus is (adaptive control)."""

from dataclasses import dataclass

import torch
from torch import Tensor


def top_entropy_mask(entropy: Tensor, share: float) -> Tensor:
    """Return (N,) bool: the `share` of tokens with the highest entropy (N,) over the whole step (arXiv 2506.01939). A
    token takes part if its entropy is at least the (1 - share) quantile, so equal entropies stay together."""
    if entropy.numel() == 0 or share >= 1:
        return torch.ones_like(entropy, dtype=torch.bool)
    values = entropy.float()
    return values >= quantile(values, 1 - share)


def quantile(values: Tensor, share: float) -> Tensor:
    """Return the quantile of `values` (N,), linear between neighbours; torch.quantile takes only 16 million values."""
    ordered = values.sort().values
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)


@dataclass
class EntropyControl:
    """The coefficient of the entropy bonus: fixed, or steered towards a target (Skywork-OR1, arXiv 2505.22312).
    Adaptive control raises it by `delta` after each step whose mean entropy was at or below the target, lowers it after
    other steps, and applies the bonus only after a step of the first kind."""

    coef: float
    adaptive: bool = False
    lowest: float = 0.0
    highest: float = 1.0
    delta: float = 0.005
    target: float = 0.2
    last_entropy: float | None = None  # the previous step's

    @property
    def applied(self) -> float:
        """The coefficient for the next step: 0 if adaptive control leaves the bonus out."""
        low = self.last_entropy is not None and self.last_entropy <= self.target
        return self.coef if low or not self.adaptive else 0.0

    @property
    def enabled(self) -> bool:
        return self.adaptive or self.coef != 0

    def update(self, entropy: float) -> None:
        """Adapt the coefficient to the mean entropy of the step that was made."""
        if self.adaptive:
            step = self.delta if entropy <= self.target else -self.delta
            self.coef = min(max(self.coef + step, self.lowest), self.highest)
            self.last_entropy = entropy

    def state(self) -> dict[str, float | None]:
        return {"coef": self.coef, "last_entropy": self.last_entropy}

    def restore(self, state: dict[str, float | None] | None) -> None:
        """Restore what `state` returned; checkpoints from before there was a bonus have none."""
        if state is not None and state["coef"] is not None:
            self.coef, self.last_entropy = state["coef"], state["last_entropy"]
