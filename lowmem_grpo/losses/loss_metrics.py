"""The metrics of a loss, under TRL's names: detached scalars, with the count that each mean is over."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.losses.loss_types import LossTokens, LossType, clip_bounds, sequence_means, vespo_phi


class Report:
    """Collects metrics: means with their counts, and extremes."""

    def __init__(self) -> None:
        self.metrics: dict[str, Tensor] = {}
        self.counts: dict[str, float] = {}

    def mean(self, name: str, values: Tensor) -> None:
        """Add the mean of values (N,), if there are any."""
        if values.numel():
            self.metrics[name], self.counts[name] = values.detach().mean(), float(len(values))

    def extremes(self, name: str, values: Tensor, *kinds: str) -> None:
        """Add the "min", the "max" or both of values (N,), if there are any."""
        if values.numel():
            self.metrics |= {f"{name}{kind}": getattr(values, kind)() for kind in kinds}


def report_clipping(
    kind: LossType, tokens: LossTokens, options: Mapping[str, Any], per_sequence: bool, report: Report
) -> None:
    """Report the clipping of a loss type, if it clips. Means are over tokens, or with `per_sequence` over sequences."""
    if kind.metrics and tokens.logprobs.numel():
        KINDS[kind.metrics](tokens, options, per_sequence, report)


def of_sequences(flags: Tensor, tokens: LossTokens, fill: float | None = None) -> Tensor:
    """Return the mean of `flags` (N,) in each sequence, (S,). Sequences without tokens get `fill`; if `fill` is None,
    they are left out, which synchronises with the card."""
    means = sequence_means(flags.to(tokens.logprobs.dtype), tokens.sequence_ids, tokens.lengths)
    return means[tokens.lengths > 0] if fill is None else means.masked_fill(tokens.lengths == 0, fill)


def counted(flags: Tensor, tokens: LossTokens, per_sequence: bool) -> Tensor:
    """Return the values that a mean is taken over: `flags` (N,), or with `per_sequence` their mean in each sequence."""
    return of_sequences(flags, tokens) if per_sequence else flags.to(tokens.logprobs.dtype)


def clip(tokens: LossTokens, options: Mapping[str, Any], per_sequence: bool, report: Report) -> None:
    """Report the share of tokens whose gradient was clipped away: below the bounds if A < 0, above them if A > 0."""
    weight, (low, high) = tokens.log_weight.detach().exp(), clip_bounds(options)
    bounded = weight if options["delta"] is None else weight.clamp(max=options["delta"])
    both_sides(bounded < low, bounded > high, tokens, per_sequence, report)


def gmpo(tokens: LossTokens, options: Mapping[str, Any], per_sequence: bool, report: Report) -> None:
    """Report the share of tokens whose log ratio was clipped before the mean over the sequence."""
    ratio = tokens.log_ratio.detach()
    upper = options["epsilon"] if options["epsilon_high"] is None else options["epsilon_high"]
    both_sides(ratio < -options["epsilon"], ratio > upper, tokens, False, report)


def both_sides(below: Tensor, above: Tensor, tokens: LossTokens, per_sequence: bool, report: Report) -> None:
    """Report the shares of tokens clipped on either side, from flags (N,): the sign of A decides which flag counts."""
    low, high = below & (tokens.advantages < 0), above & (tokens.advantages > 0)
    for name, flags in (("low_mean", low), ("high_mean", high), ("region_mean", low | high)):
        report.mean(f"clip_ratio/{name}", counted(flags, tokens, per_sequence))
    report.extremes("clip_ratio/low_", of_sequences(low, tokens, torch.inf), "min")
    report.extremes("clip_ratio/high_", of_sequences(high, tokens, -torch.inf), "max")


def cispo(tokens: LossTokens, options: Mapping[str, Any], per_sequence: bool, report: Report) -> None:
    """Report the share of tokens with A > 0 whose weight was bounded."""
    bounded = (tokens.log_weight.detach().exp() > options["epsilon_high"]) & (tokens.advantages > 0)
    report.mean("cispo_clip_ratio", counted(bounded, tokens, per_sequence))


def vespo(tokens: LossTokens, options: Mapping[str, Any], per_sequence: bool, report: Report) -> None:
    """Report the mean over sequences of the weight phi."""
    report.mean("vespo/phi_seq_mean", of_sequences(vespo_phi(tokens, options), tokens))


KINDS: dict[str, Callable[..., None]] = {"clip": clip, "gmpo": gmpo, "cispo": cispo, "vespo": vespo}
FIRST_WORDS = ("clip_ratio", "cispo_clip_ratio", "vespo")  # begin the names of their metrics, before the slash


def report_correction(correction: Tensor, tokens: LossTokens, report: Report) -> None:
    """Report min, mean and max of the weights (N,) for the sampler's mismatch, by sequence if each has one weight."""
    values = of_sequences(correction, tokens) if tokens.correction_is_per_sequence else correction
    report.mean("sampling/importance_sampling_ratio/mean", values)
    report.extremes("sampling/importance_sampling_ratio/", values, "min", "max")
    report.mean("sampling/importance_sampling_ratio/dropped", (correction == 0).to(correction.dtype))


def percentiles(values: Tensor) -> list[float]:
    """Return the 1st, 50th and 99th percentile of `values` (N,), by nearest rank; all NaN if there are none."""
    if values.numel() == 0:
        return [float("nan")] * 3
    ordered = values.sort().values
    places = [round(share * (len(ordered) - 1)) for share in (0.01, 0.5, 0.99)]
    return ordered[torch.tensor(places, device=values.device)].tolist()


def effective_sample_share(weights: Tensor) -> float:
    """Return the effective sample size of weights (N,) as a share of N, (sum w)^2 / (N sum w^2), from 0 to 1."""
    if weights.numel() == 0:
        return float("nan")
    largest = weights.max()
    if not largest > 0:
        return 0.0 if largest == 0 else float("nan")
    shares = weights / largest  # at most 1, so that squares do not overflow
    return (shares.sum().square() / (len(weights) * shares.square().sum())).item()
