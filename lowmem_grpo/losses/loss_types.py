"""The loss types: each has a token term, token weights, options and a source.

    log_ratio_t = logp_t - old_logp_t          per token; (1/|o|) sum_t log_ratio_t at sequence level (GSPO)
    w_t = exp(log_ratio_t)                     the importance weight at the level that the settings name
    loss = sum_t weight_t (l_t + beta KL_t)    l_t from `token_loss`, weight_t from `weights`

The denominators of `weights` count the whole step, so that its split into micro-batches cannot change the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lowmem_grpo.utils import torch

if TYPE_CHECKING:
    from torch import Tensor

NEAR, TERMS = 0.1, 11  # |log rho| below which k3 is a series, and its last power: all digits of a float64

# exp(x) is infinite in float32 for x above 88, and 0 * inf is NaN, in a product and in its gradient. So the log of a
# ratio is kept below that wherever only a bound of the ratio matters.


def sequence_lengths(sequence_ids: Tensor, count: int | None = None) -> Tensor:
    """Return each sequence's number of tokens, (S,) int64. `count` is S; without it the call syncs with the card."""
    if count is None:
        return torch.bincount(sequence_ids)
    return sequence_ids.new_zeros(count).index_add(0, sequence_ids, torch.ones_like(sequence_ids))


def sequence_sums(values: Tensor, sequence_ids: Tensor, count: int) -> Tensor:
    """Return the sum of `values` (N,) over each of `count` sequences, (S,); differentiable."""
    return values.new_zeros(count).index_add(0, sequence_ids, values)


def sequence_means(values: Tensor, sequence_ids: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean of `values` (N,) over each sequence, (S,); 0 for a sequence without tokens."""
    return sequence_sums(values, sequence_ids, len(lengths)) / lengths.clamp(min=1)


def log_limit(like: Tensor) -> float:
    """Return the log of a large ratio: far above any bound, but surely finite in the dtype of `like`."""
    return math.log(torch.finfo(like.dtype).max) - 1


def ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), for values without gradient. The result is never 0, since 0 marks tokens left out."""
    return log_ratio.clamp(min=-log_limit(log_ratio)).exp()


def k3_of(log_ratio: Tensor) -> Tensor:
    """Return rho - log rho - 1 (N,), the k3 estimate of a KL; near 0 by a series, which keeps all digits."""
    near = log_ratio.abs() < NEAR
    small = torch.where(near, log_ratio, 0.0)
    series = torch.ones_like(small)
    for power in range(TERMS, 2, -1):
        series = 1 + small / power * series
    return torch.where(near, small.square() / 2 * series, torch.expm1(log_ratio) - log_ratio)


def held(log_ratio: Tensor, bounded: Tensor | bool) -> Tensor:
    """Return the log ratios. Those that would overflow, and that a later step bounds (`bounded`), become a constant."""
    limit = log_limit(log_ratio)
    return torch.where((log_ratio > limit) & bounded, limit, log_ratio)


@dataclass(frozen=True)
class LossTokens:
    """The tokens of one `grpo_loss` call, aligned (N,), of S sequences."""

    logprobs: Tensor  # (N,) with gradient
    log_ratio: Tensor  # (N,) logprobs - old_logprobs, per token at every level
    log_weight: Tensor  # (N,) log w_t at the settings' level
    advantages: Tensor  # (N,)
    sequence_ids: Tensor  # (N,) int64
    lengths: Tensor  # (S,) tokens of each sequence
    correction: Tensor | None = None  # (N,) weights for the sampler's mismatch; None: no correction
    correction_is_per_sequence: bool = False
    kept: Tensor | None = None  # (N,) bool, tokens whose policy term counts; None: all

    def only(self, kept: Tensor) -> LossTokens:
        """Return the same tokens, but with ratio 1 where `kept` (N,) is False, so that those cannot overflow."""
        logprobs, log_weight = (torch.where(kept, values, 0.0) for values in (self.logprobs, self.log_weight))
        return replace(self, logprobs=logprobs, log_weight=log_weight, kept=kept)


TokenLoss = Callable[[LossTokens, Mapping[str, Any]], "Tensor"]
Weights = Callable[["Tensor", "StepCounts"], "Tensor"]


@dataclass(frozen=True)
class StepCounts:
    """The denominators of a step's means."""

    sequences: float
    tokens: float
    max_completion_length: int | None


# The token terms l_t (N,), which are minimised.


def clipped(tokens: LossTokens, options: Mapping[str, Any]) -> Tensor:
    """Return -min(min(w, delta) A, clip(w, 1 - epsilon, 1 + epsilon_high) A)."""
    low, high = clip_bounds(options)
    weight = held(tokens.log_weight, (tokens.advantages >= 0) | (options["delta"] is not None)).exp()
    bounded = weight if options["delta"] is None else weight.clamp(max=options["delta"])
    return -torch.min(bounded * tokens.advantages, weight.clamp(low, high) * tokens.advantages)


def clip_bounds(options: Mapping[str, Any]) -> tuple[float, float]:
    upper = options["epsilon"] if options["epsilon_high"] is None else options["epsilon_high"]
    return 1 - options["epsilon"], 1 + upper


def cispo(tokens: LossTokens, options: Mapping[str, Any]) -> Tensor:
    """Return -sg(min(w, epsilon_high)) A logp: the weight is bounded, the gradient never cut off."""
    return -tokens.log_weight.exp().clamp(max=options["epsilon_high"]).detach() * tokens.advantages * tokens.logprobs


def sapo(tokens: LossTokens, options: Mapping[str, Any]) -> Tensor:
    """Return -(4 / tau) sigmoid(tau (w - 1)) A, with tau by the sign of A: a soft gate in place of the clip."""
    tau = of_sign("sapo_temperature", tokens.advantages > 0, options, tokens.logprobs)
    return -torch.sigmoid(tau * (held(tokens.log_weight, True).exp() - 1)) * 4 / tau * tokens.advantages


def of_sign(name: str, positive: Tensor, options: Mapping[str, Any], like: Tensor) -> Tensor:
    """Return the option `name`_pos or `name`_neg of each token (N,), in the precision of `like`."""
    return torch.where(positive, torch.full_like(like, options[f"{name}_pos"]), options[f"{name}_neg"])


LOWEST, HIGHEST = math.log(1e-8), 20.0  # VESPO's own bounds on log w


def vespo_phi(tokens: LossTokens, options: Mapping[str, Any]) -> Tensor:
    """Return phi(w) = w^k exp(lambda (1 - w)) (N,) without gradient; w is the ratio of each token's whole sequence. It
    is computed in float64, since phi magnifies the rounding errors of float32 in sums over thousands of tokens."""
    count = len(tokens.lengths)
    log_w = sequence_sums(tokens.log_ratio.detach().double().clamp(-HIGHEST, HIGHEST), tokens.sequence_ids, count)
    if tokens.correction is not None:
        mismatch = tokens.correction.double().log().clamp(LOWEST, HIGHEST)
        over = sequence_means(mismatch, tokens.sequence_ids, tokens.lengths)
        log_w = log_w + (over if tokens.correction_is_per_sequence else over * tokens.lengths)
    log_w = log_w.clamp(LOWEST, HIGHEST)[tokens.sequence_ids]
    positive = tokens.advantages >= 0
    k, scale = (of_sign(name, positive, options, log_w) for name in ("vespo_k", "vespo_lambda"))
    scale = scale.clamp(min=1e-4)
    return torch.exp(scale + k * log_w - scale * log_w.exp()).to(tokens.logprobs.dtype)


def vespo(tokens: LossTokens, options: Mapping[str, Any]) -> Tensor:
    """Return -phi(w) A logp, with phi as a constant."""
    return -vespo_phi(tokens, options) * tokens.advantages * tokens.logprobs


def gmpo(tokens: LossTokens, options: Mapping[str, Any]) -> Tensor:
    """Return -exp(mean_t clipped log_ratio_t) A: a geometric mean of ratios, clipped above if A >= 0, else below."""
    upper = options["epsilon"] if options["epsilon_high"] is None else options["epsilon_high"]
    low, high = tokens.log_ratio.clamp(min=-options["epsilon"]), tokens.log_ratio.clamp(max=upper)
    bounded = torch.where(tokens.advantages >= 0, high, low)
    mean = sequence_means(bounded, tokens.sequence_ids, tokens.lengths)
    if tokens.kept is not None:  # ratio 1 for sequences without a kept token
        mean = torch.where(sequence_sums(tokens.kept.to(mean.dtype), tokens.sequence_ids, len(mean)) > 0, mean, 0.0)
    return -mean.exp()[tokens.sequence_ids] * tokens.advantages


def reinforce(tokens: LossTokens, options: Mapping[str, Any]) -> Tensor:
    return -tokens.advantages * tokens.logprobs


# The token weights: weight_t (N,) from the length (N,) of the token's sequence.


def mean_of_sequence_means(lengths: Tensor, step: StepCounts) -> Tensor:
    return 1 / (lengths * max(step.sequences, 1))


def mean_of_sequence_sums(lengths: Tensor, step: StepCounts) -> Tensor:
    return torch.full_like(lengths, 1 / max(step.sequences, 1))


def mean_over_tokens(lengths: Tensor, step: StepCounts) -> Tensor:
    return torch.full_like(lengths, 1 / max(step.tokens, 1))


def mean_over_longest(lengths: Tensor, step: StepCounts) -> Tensor:
    """Return 1 / (sequences of the step * max_completion_length): a constant, free of length bias."""
    if not step.max_completion_length:
        raise ValueError("this loss type divides by max_completion_length; pass it")
    return torch.full_like(lengths, 1 / (max(step.sequences, 1) * step.max_completion_length))


@dataclass(frozen=True)
class LossType:
    """A loss type: the functions that the code calls and the texts that the documentation shows."""

    token_loss: TokenLoss
    weights: Weights
    options: Mapping[str, Any]  # options besides those of every type, with their defaults
    formula: str
    when: str
    source: str
    level: str = "token"  # the ratio's, for a type without importance_sampling_level
    counts_generation: bool = False  # `StepCounts.tokens` is the mean over the optimizer steps of one generation
    metrics: str = ""  # its own metrics: a key of KINDS in loss_metrics.py, or empty
    in_trl: bool = False  # True: TRL's GRPOConfig has it, together with the options of its other types


CLIP = {"epsilon": 0.2, "epsilon_high": None, "delta": None}
GSPO = {"epsilon": 3e-4, "epsilon_high": 4e-4, "delta": None}  # the paper's, section 5.1
LEVEL = {"importance_sampling_level": "token"}
SAPO = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
LOSS_TYPES: dict[str, LossType] = {
    "grpo": LossType(
        clipped, mean_of_sequence_means, CLIP | LEVEL, "-mean_seq(clipped(w, A))",
        "The original GRPO. Tokens of short completions weigh more than tokens of long ones.",
        "DeepSeekMath, arXiv 2402.03300, eq. 3", metrics="clip", in_trl=True,
    ),
    "bnpo": LossType(
        clipped, mean_over_tokens, CLIP | LEVEL, "-mean_step(clipped(w, A))",
        "Like dapo, except that each optimizer step averages over its own tokens.", "TRL", metrics="clip", in_trl=True,
    ),
    "dr_grpo": LossType(
        clipped, mean_over_longest, CLIP | LEVEL,
        "-sum_step(clipped(w, A)) / (completions of the optimizer step * max_completion_length)",
        "Removes the bias towards long wrong answers.",
        "Dr. GRPO, arXiv 2503.20783", metrics="clip", in_trl=True,
    ),
    "dapo": LossType(
        clipped, mean_over_tokens, CLIP | LEVEL, "-mean_gen(clipped(w, A))",
        "The default. All tokens have the same weight.",
        "DAPO, arXiv 2503.14476, eq. 8", counts_generation=True, metrics="clip", in_trl=True,
    ),
    "luspo": LossType(
        clipped, mean_of_sequence_sums, CLIP | LEVEL, "-sum_step(clipped(w, A)) / completions of the optimizer step",
        "GSPO without its length bias. The paper sets importance_sampling_level='sequence'.",
        "LUSPO, arXiv 2602.05261", metrics="clip", in_trl=True,
    ),
    "gspo": LossType(
        clipped, mean_of_sequence_means, GSPO, "-mean_seq(clipped(w, A)), w = exp(mean_t(logp - old))",
        "For mixtures of experts and long completions. This w stays close to 1, so the default epsilon is small.",
        "GSPO, arXiv 2507.18071, eq. 5 to 7", level="sequence", metrics="clip",
    ),
    "gspo_token": LossType(
        clipped, mean_of_sequence_means, GSPO,
        "-mean_seq(clipped(w, A)), w = sg(exp(mean_t(logp - old))) exp(logp - sg(logp))",
        "For completions whose tokens have unequal advantages or weights. Otherwise, the gradient is gspo's.",
        "GSPO, arXiv 2507.18071, eq. 13", level="sequence_token", metrics="clip",
    ),
    "cispo": LossType(
        cispo, mean_over_tokens, {"epsilon_high": 5.0} | LEVEL, "-mean_gen(sg(min(w, epsilon_high)) A logp)",
        "Keeps the gradient of rare but decisive tokens.",
        "MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786", counts_generation=True, metrics="cispo", in_trl=True,
    ),
    "sapo": LossType(
        sapo, mean_of_sequence_means, SAPO | LEVEL,
        "-mean_seq((4 / tau) sigmoid(tau (w - 1)) A), tau = sapo_temperature_pos if A > 0, else sapo_temperature_neg",
        "For several optimizer steps per generation. A soft gate replaces the clip, so every token contributes.",
        "SAPO, arXiv 2511.20347", in_trl=True,
    ),
    "vespo": LossType(
        vespo, mean_over_tokens, VESPO,
        "-mean_gen(sg(w^k exp(lambda (1 - w))) A logp), w = exp(sum_t(logp - old)), "
        "k = vespo_k_pos and lambda = vespo_lambda_pos if A >= 0, else vespo_k_neg and vespo_lambda_neg",
        "For samples from an older policy. If w is far from 1, the weight of the completion falls smoothly towards 0.",
        "VESPO, arXiv 2602.10693", counts_generation=True, metrics="vespo", in_trl=True,
    ),
    "gmpo": LossType(
        gmpo, mean_of_sequence_means, {"epsilon": 0.4, "epsilon_high": None},
        "-mean_seq(exp(mean_t(d)) A), d = min(logp - old, epsilon_high) if A >= 0, else max(logp - old, -epsilon)",
        "For steps in which a few tokens have extreme ratios.",
        "GMPO, arXiv 2507.20673", metrics="gmpo",
    ),
    "rloo": LossType(
        clipped, mean_of_sequence_means, CLIP, "-mean_seq(clipped(w, A)), w = exp(sum_t(logp - old))",
        "Treats a completion as one action. RLOOConfig combines this loss with advantage_estimator='rloo'.",
        "RLOO, arXiv 2402.14740; TRL", level="sequence_sum", metrics="clip",
    ),
    "reinforce": LossType(
        reinforce, mean_over_tokens, {}, "-mean_step(A logp)",
        "For one optimizer step per generation, since the loss has no ratio and no clip.", "Williams, 1992",
    ),
}
