"""The activation of gpt-oss's experts, in plain torch; glu.py has its kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

CLAMPED = "clamped"  # how its text begins, and its name in kernels


@dataclass(frozen=True)
class ClampedSwiGLU:
    """h = (clamp(up, -limit, limit) + 1) * c * sigmoid(alpha c) with c = min(gate, limit), as GptOssExperts. Gate has
    the even columns of one matrix, up the odd ones. What is beyond the limits has a gradient of 0. ValueError if the
    limit is not positive."""

    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise ValueError(f"limit is {self.limit!r}; it must be positive")

    @property
    def text(self) -> str:
        """The activation as operations take it."""
        return f"{CLAMPED} {self.alpha} {self.limit}"

    @classmethod
    def from_text(cls, text: str) -> "ClampedSwiGLU":
        _, alpha, limit = text.split()
        return cls(float(alpha), float(limit))

    def parts(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return act(gate), rounded to the dtype, act'(gate) and clamp(up) + 1, in float32 or float64."""
        kind, wide = gate.dtype, torch.promote_types(gate.dtype, torch.float32)
        gate, up = gate.to(wide).clamp(max=self.limit), up.to(wide).clamp(-self.limit, self.limit)
        share = torch.sigmoid(self.alpha * gate)
        return (gate * share).to(kind).to(wide), share * (1 + self.alpha * gate * (1 - share)), up + 1

    def gradients(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (grad_gate, grad_up, h) in float32 or float64."""
        activated, slope, factor = self.parts(gate, up)
        grad_gate, grad_up = grad * factor * slope, grad * activated
        return grad_gate.where(gate <= self.limit, 0), grad_up.where(up.abs() <= self.limit, 0), activated * factor
