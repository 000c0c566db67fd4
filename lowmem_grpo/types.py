"""The nouns of a run. P prompts, G completions of a prompt, T packed tokens, S packed sequences.

The alignment rule, stated once: index t of every (T,) field describes the prediction of `targets[t]`, the token that
follows `input_ids[t]` in its sequence. A sequence of L tokens therefore takes L - 1 places, and its last token is a
target only.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass
class Rollout:
    """One sampled completion of C tokens (the end token included, where it was sampled)."""

    completion_ids: list[int]  # (C,)
    rollout_logprobs: list[float]  # (C,) the sampler's own
    finish_reason: Literal["stop", "length"]
    text: str = ""  # decoded, special tokens left out
    policy_version: int = 0
    rewards: dict[str, float | None] = field(default_factory=dict)  # of each reward function
    reward: float | None = None  # their weighted sum
    advantage: float = 0.0
    extras: dict[str, Any] = field(default_factory=dict)  # what reward functions gave to `log_extra`
    old_logprobs: Tensor | None = None  # (C,) at the start of the update; None where the data is on-policy
    ref_logprobs: Tensor | None = None  # (C,) under the base model; None without a KL term


@dataclass
class RolloutGroup:
    """The G completions of one prompt."""

    row: dict[str, Any]  # the dataset row
    prompt_ids: list[int]
    rollouts: list[Rollout]


@dataclass
class MicroBatch:
    """S whole sequences packed without padding into T places; see the alignment rule above.

    Sequences of one prompt share the places of its tokens but the last. Laid side by side in width W = max_seqlen, the
    sequences' tokens come from `sources`, and results go back to the packed places through `places`.
    """

    input_ids: Tensor  # (T,) int64
    position_ids: Tensor  # (T,) int64, from 0 in each sequence
    targets: Tensor  # (T,) int64
    cu_seqlens: Tensor  # (S + 1,) int32, summed lengths of the sequences, each with its prompt
    max_seqlen: int
    sources: Tensor  # (S * W,) int64, index into T
    places: Tensor  # (T,) int64, index into S * W; of a shared place, that in the first sequence
    loss_mask: Tensor  # (T,) bool, completion tokens
    sequence_ids: Tensor  # (T,) int64, 0 .. S - 1; of a shared place, the first sequence
    advantages: Tensor  # (T,) float32
    rollout_logprobs: Tensor  # (T,) float32
    old_logprobs: Tensor | None = None  # (T,) float32
    ref_logprobs: Tensor | None = None  # (T,) float32
    rollouts: tuple[Rollout, ...] = ()  # the S packed completions, in order

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same batch with every tensor on `device`."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {name: value.to(device, non_blocking=True) for name, value in tensors.items() if torch.is_tensor(value)}
        changes: dict[str, Any] = moved
        return replace(self, **changes)


@dataclass
class LossOutput:
    """The scalar to call backward on, and detached scalars to log (means over this call's tokens, or min and max)."""

    loss: Tensor
    metrics: dict[str, Tensor]
