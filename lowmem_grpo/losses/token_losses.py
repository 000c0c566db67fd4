"""Losses that are sums over tokens, named as in the Tinker protocol. Advantages or weights do the normalising.

For each token, p is the policy's log-probability, q the sampler's, A the advantage, w the weight, r = exp(p - q).

    cross_entropy        -w p
    importance_sampling  -r A
    ppo                  -min(r A, clip(r) A)
    cispo                -sg(clip(r)) A p
    gspo                 as ppo, with the ratio of the whole sequence: exp of the mean of p - q, weighted by its mask
    dro                  -(A p - beta / 2 (p - q)^2)

sg(x) is x without gradient. The bounds of `clip` are ratios, as in the protocol: 0.8 and 1.2 by default."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem_grpo.losses.loss_types import sequence_sums

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LARGEST = torch.finfo(torch.float32).max
OFF_POLICY = ("logprobs", "advantages")
ELSEWHERE = {
    "stable_reinforce": "its formula is not public; pass loss_fn=\"importance_sampling\", or \"cispo\"",
    "custom": "the server runs no programs of its clients; pass a function to forward_backward_custom, which computes "
              "the loss at the client and sends its gradient as weights",
}


@dataclass(frozen=True)
class LossSpec:
    """The values (T,) that a loss needs for each sequence, and its settings with their defaults."""

    needs: tuple[str, ...]
    settings: Mapping[str, float]


LOSSES = {
    "cross_entropy": LossSpec(("weights",), {}),
    "importance_sampling": LossSpec(OFF_POLICY, {}),
    "ppo": LossSpec(OFF_POLICY, CLIP),
    "cispo": LossSpec(OFF_POLICY, CLIP),
    "gspo": LossSpec((*OFF_POLICY, "sequence_ratio_mask"), CLIP),
    "dro": LossSpec(OFF_POLICY, {"beta": 0.05}),
}


def loss_named(name: str) -> LossSpec:
    """Return the loss of this name. The ValueError for an unknown one says what to take instead."""
    if name not in LOSSES:
        why = ELSEWHERE.get(name, "it is not known here")
        raise ValueError(f"loss_fn {name!r} is not offered: {why}. There are {', '.join(LOSSES)}")
    return LOSSES[name]


def checked_settings(name: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """Return the settings of a loss, with defaults for those that `config` lacks. ValueError for a wrong setting."""
    allowed = loss_named(name).settings
    for key, value in config.items():
        if key not in allowed:
            raise ValueError(f"loss_fn_config has {key!r}, which {name} does not take; it takes "
                             f"{', '.join(allowed) or 'no settings'}")
        if isinstance(value, str) or not 0 <= value <= LARGEST:
            raise ValueError(f"loss_fn_config[{key!r}] is {value!r}; it must be a number from 0 to {LARGEST:g}")
    settings = {**allowed, **{key: float(value) for key, value in config.items()}}
    if "clip_low_threshold" in settings and settings["clip_low_threshold"] > settings["clip_high_threshold"]:
        raise ValueError(f"clip_low_threshold is {settings['clip_low_threshold']:g} and clip_high_threshold "
                         f"{settings['clip_high_threshold']:g}; both are ratios, such as 0.8 and 1.2, the low one "
                         "below the high one")
    return settings


def token_losses(
    name: str, logprobs: Tensor, values: Mapping[str, Tensor], settings: Mapping[str, float], sequence_ids: Tensor,
    sequences: int,
) -> Tensor:
    """Return the loss (N,) of each token; the sum is to be minimised. `logprobs` (N,) are the policy's; `values` (N,)
    are those that the loss `needs`; `sequence_ids` (N,) int64 number the sequences, from 0 to `sequences` - 1.
    `settings` are complete, as `checked_settings` returns them."""
    if name == "cross_entropy":
        return -values["weights"] * logprobs
    advantages, change = values["advantages"], logprobs - values["logprobs"]
    if name == "dro":
        return -(advantages * logprobs - settings["beta"] / 2 * change.square())
    if name == "gspo":
        mask = values["sequence_ratio_mask"]  # weighs the tokens in their sequence's mean, which is 0 if it is not set
        weight = sequence_sums(mask, sequence_ids, sequences)
        means = sequence_sums(change * mask, sequence_ids, sequences) / torch.where(weight == 0, 1.0, weight)
        change = means[sequence_ids]
    if name == "importance_sampling":
        return -change.where(advantages != 0, 0.0).exp() * advantages  # an overflowing ratio times 0 would be NaN
    low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
    if name == "cispo":
        return -change.detach().exp().clamp(low, high) * advantages * logprobs
    return -held_ratio(change, low, high, advantages) * advantages


def held_ratio(change: Tensor, low: float, high: float, advantages: Tensor) -> Tensor:
    """Return the ratio r = exp(change) as PPO's min(r A, clip(r) A) uses it: at most `high` where A > 0, at least `low`
    where A < 0. A ratio that a bound replaces has no gradient, and is finite even if exp(change) overflows."""
    upper = torch.where(advantages < 0, torch.inf, torch.full_like(change, high))
    lower = torch.where(advantages > 0, 0.0, torch.full_like(change, low))
    inside = (change <= upper.log()) & (change >= lower.log())
    bound = torch.where(change > upper.log(), upper, lower)
    return torch.where(inside, change.where(inside, 0.0).exp(), bound)
