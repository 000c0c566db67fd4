"""The metrics of a loss, under TRL's names: detached scalars, with the count that each mean is over."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.losses.loss_types import LossTokens, LossType, clip_bounds, sequence_means, vespo_phi

Means = dict[str, tuple[Tensor, float]]  # name: (mean, count)


def clip_metrics(
    kind: LossType, tokens: LossTokens, options: Mapping[str, Any], per_sequence: bool
) -> tuple[Means, dict[str, Tensor]]:
    """Return (means, extremes) of the clipping of a loss type; empty for one that does not clip. Means are over
    sequences if the ratio is one for the sequence, else over tokens; extremes are over sequences."""
    if not kind.metrics or tokens.logprobs.numel() == 0:
        return {}, {}
    return KINDS[kind.metrics](tokens, options, per_sequence)


def averaged(flags: Tensor, tokens: LossTokens, per_sequence: bool) -> tuple[Tensor, float]:
    """Return (mean, count) of values (N,), over tokens or over sequences."""
    if not per_sequence:
        return flags.to(tokens.logprobs.dtype).mean(), float(len(flags))
    means = of_sequences(flags, tokens)
    return means.mean(), float(len(means))


def of_sequences(flags: Tensor, tokens: LossTokens) -> Tensor:
    """Return the mean of each sequence that has tokens. Synchronises with the card."""
    means = sequence_means(flags.to(tokens.logprobs.dtype), tokens.sequence_ids, tokens.lengths)
    return means[tokens.lengths > 0]


def filled_means(flags: Tensor, tokens: LossTokens, fill: float) -> Tensor:
    """Return the mean of each sequence (S,), or `fill` for one without tokens."""
    means = sequence_means(flags.to(tokens.logprobs.dtype), tokens.sequence_ids, tokens.lengths)
    return means.masked_fill(tokens.lengths == 0, fill)


def clip(tokens: LossTokens, options: Mapping[str, Any], per_sequence: bool) -> tuple[Means, dict[str, Tensor]]:
    """Measure the share of tokens whose gradient was clipped away: below the bounds if A < 0, above them if A > 0."""
    weight, (low, high) = tokens.log_weight.detach().exp(), clip_bounds(options)
    bounded = weight if options["delta"] is None else weight.clamp(max=options["delta"])
    return both_sides(bounded < low, bounded > high, tokens, per_sequence)


def gmpo(tokens: LossTokens, options: Mapping[str, Any], per_sequence: bool) -> tuple[Means, dict[str, Tensor]]:
    """Measure the share of tokens whose log ratio was clipped before the mean over the sequence."""
    ratio = tokens.log_ratio.detach()
    upper = options["epsilon"] if options["epsilon_high"] is None else options["epsilon_high"]
    return both_sides(ratio < -options["epsilon"], ratio > upper, tokens, False)


def both_sides(below: Tensor, above: Tensor, tokens: LossTokens, per_sequence: bool) -> tuple[Means, dict[str, Tensor]]:
    """Return the shares of tokens clipped on either side, from flags (N,): the sign of A decides which flag counts."""
    low, high = below & (tokens.advantages < 0), above & (tokens.advantages > 0)
    shares = {"low_mean": low, "high_mean": high, "region_mean": low | high}
    means = {f"clip_ratio/{name}": averaged(flags, tokens, per_sequence) for name, flags in shares.items()}
    extremes = {"clip_ratio/low_min": filled_means(low, tokens, torch.inf).min(),
                "clip_ratio/high_max": filled_means(high, tokens, -torch.inf).max()}
    return means, extremes


def cispo(tokens: LossTokens, options: Mapping[str, Any], per_sequence: bool) -> tuple[Means, dict[str, Tensor]]:
    """Measure the share of tokens with A > 0 whose weight was bounded."""
    bounded = (tokens.log_weight.detach().exp() > options["epsilon_high"]) & (tokens.advantages > 0)
    return {"cispo_clip_ratio": averaged(bounded, tokens, per_sequence)}, {}


def vespo(tokens: LossTokens, options: Mapping[str, Any], per_sequence: bool) -> tuple[Means, dict[str, Tensor]]:
    """Measure the mean over sequences of the weight phi."""
    return {"vespo/phi_seq_mean": averaged(vespo_phi(tokens, options), tokens, True)}, {}


KINDS: dict[str, Callable[..., tuple[Means, dict[str, Tensor]]]] = {
    "clip": clip, "gmpo": gmpo, "cispo": cispo, "vespo": vespo,
}
FIRST_WORDS = ("clip_ratio", "cispo_clip_ratio", "vespo")  # begin the names of their metrics, before the slash


def correction_metrics(correction: Tensor, tokens: LossTokens) -> tuple[Means, dict[str, Tensor]]:
    """Measure the weights (N,) for the sampler's mismatch: min, mean, max, over sequences if each has one weight."""
    if correction.numel() == 0:
        return {}, {}
    name, values = "sampling/importance_sampling_ratio", correction
    if tokens.correction_is_per_sequence:
        values = of_sequences(correction, tokens)
    means = {f"{name}/mean": (values.mean(), float(len(values)))}
    return means, {f"{name}/min": values.min(), f"{name}/max": values.max()}


def mismatch_metrics(mismatch: Tensor) -> tuple[Means, dict[str, Tensor]]:
    """Measure |log pi_old - log mu| over tokens (N,): mean and max."""
    if mismatch.numel() == 0:
        return {}, {}
    name, values = "sampling/sampling_logp_difference", mismatch.abs()
    return {f"{name}/mean": (values.mean(), float(len(values)))}, {f"{name}/max": values.max()}


def percentiles(values: Tensor, shares: tuple[float, ...] = (0.01, 0.5, 0.99)) -> list[float]:
    """Return the values (N,) at the given shares of their order, by nearest rank; all NaN if there are none."""
    if values.numel() == 0:
        return [float("nan")] * len(shares)
    ordered = values.sort().values
    places = [round(share * (len(ordered) - 1)) for share in shares]
    return ordered[torch.tensor(places, device=values.device)].tolist()


def effective_sample_share(weights: Tensor) -> float:
    """Return (sum w)^2 / (N sum w^2), from 0 to 1: the share of N samples that weights (N,) leave in effect."""
    if weights.numel() == 0:
        return float("nan")
    largest = weights.max()
    if not largest > 0:
        return 0.0 if largest == 0 else float("nan")
    shares = weights / largest  # at most 1, so that squares do not overflow
    return (shares.sum().square() / (len(weights) * shares.square().sum())).item()
