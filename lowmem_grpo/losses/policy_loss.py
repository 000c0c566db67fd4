"""The policy loss, on aligned tokens (N,). All loss types of `loss_types.py` share these factors, in this order:

    l_t = token_loss_t * keep_t (off-policy mask) * mask_t (top entropy) * sg(c_t) (correction)
    loss = sum_t weight_t (l_t + beta KL_t w_t) - entropy_coef * (mean entropy of the tokens that take part)
"""

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.losses.loss_metrics import Report, report_clipping, report_correction
from lowmem_grpo.losses.loss_settings import LossSettings
from lowmem_grpo.losses.loss_types import (
    LOSS_TYPES,
    LossTokens,
    StepCounts,
    sequence_lengths,
    sequence_means,
    sequence_sums,
)
from lowmem_grpo.losses.off_policy import CORRECTIONS, correction_weights, off_policy_sequence_mask
from lowmem_grpo.losses.regularization import KL_ESTIMATORS, top_entropy_mask, weighed_kl
from lowmem_grpo.types import LossOutput


def grpo_loss(
    logprobs: Tensor, advantages: Tensor, sequence_ids: Tensor, *, old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None, rollout_logprobs: Tensor | None = None, entropy: Tensor | None = None,
    policy_mask: Tensor | None = None, num_sequences_in_step: float | None = None,
    num_tokens_in_step: float | None = None, num_policy_tokens_in_step: float | None = None,
    correct_mismatch: bool | None = None, entropy_coef: float | None = None, num_sequences: int | None = None,
    settings: LossSettings | None = None, **options: Any,
) -> LossOutput:
    """Return what these tokens add to the step's loss, which is the sum over all micro-batches.

    All tensors are (N,): `logprobs` with gradient, `advantages`, `sequence_ids` int64, `old_logprobs` at the start of
    the update (None: on-policy, the ratio is exactly 1), `ref_logprobs` of the reference (for beta), `rollout_logprobs`
    of the sampler (for corrections), `entropy` of each token's distribution (with gradient for a bonus), `policy_mask`
    bool: tokens whose policy term counts (None: by `top_entropy_quantile` over this call).

    Each call must have whole sequences. The `num_*_in_step` are the denominators of the step's means (None: this call's
    own counts): sequences and tokens of all completions that count in the loss, and the policy tokens that
    `policy_mask` keeps. `correct_mismatch` and `entropy_coef` override the settings. `num_sequences` bounds the
    sequence ids; without it the call synchronises with the card.

    `options` are the fields of `LossSettings`, in place of `settings`. ValueError for wrong or contradictory options,
    and for missing log-probabilities.
    """
    settings = settings_of(settings, options)
    constants = {"advantages": advantages, "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs,
                 "rollout_logprobs": rollout_logprobs, "sequence_ids": sequence_ids, "policy_mask": policy_mask}
    check_tokens({"logprobs": logprobs, "entropy": entropy} | constants, constants)
    kind, chosen = LOSS_TYPES[settings.loss_type], settings.chosen()
    correct = settings.vllm_importance_sampling_correction is True if correct_mismatch is None else correct_mismatch
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    tokens = loss_tokens(logprobs, old, advantages, sequence_ids, rollout_logprobs, settings, correct, num_sequences)
    if policy_mask is None and settings.top_entropy_quantile < 1:
        known = needed(entropy, "entropy", f"top_entropy_quantile is {settings.top_entropy_quantile}")
        policy_mask = top_entropy_mask(known.detach(), settings.top_entropy_quantile)
    report = Report()
    report_clipping(kind, tokens, chosen, settings.level != "token", report)
    term_factors = list(factors(tokens, settings, rollout_logprobs, policy_mask, report))
    counting = nonzero(tokens, term_factors)
    per_token = kind.token_loss(tokens if counting is None else tokens.only(counting), chosen)
    for factor in term_factors:
        per_token = per_token * factor
    per_token = per_token if counting is None else torch.where(counting, per_token, 0.0)
    if settings.beta:
        per_token = per_token + settings.beta * kl_term(tokens, settings, ref_logprobs, report)
    step = StepCounts(given(num_sequences_in_step, (tokens.lengths > 0).sum()),
                      given(num_tokens_in_step, len(logprobs)), settings.max_completion_length)
    policy_loss = (per_token * kind.weights(tokens.lengths[sequence_ids].to(per_token.dtype), step)).sum()
    loss, coef = policy_loss, given(entropy_coef, settings.entropy_coef)
    if coef:
        known = needed(entropy, "entropy", f"entropy_coef is {coef}")
        loss = loss - coef * mean_entropy(known, policy_mask, num_policy_tokens_in_step)
    samples = {"ratio": tokens.log_ratio.detach().exp()}
    if rollout_logprobs is not None:
        mismatch = (old - rollout_logprobs).detach()
        report.mean("sampling/sampling_logp_difference/mean", mismatch.abs())
        report.extremes("sampling/sampling_logp_difference/", mismatch.abs(), "max")
        samples["mismatch"] = mismatch.exp()
    return LossOutput(loss, report.metrics, report.counts, samples, policy_loss.detach())


def check_tokens(tensors: Mapping[str, Any], constants: Container[str]) -> None:
    """Raise ValueError for a tensor that is not (N,) or has a wrong dtype, and for a constant that needs a gradient."""
    size = getattr(tensors["logprobs"], "shape", "?")
    for name, values in tensors.items():
        if values is None:
            continue
        if not isinstance(values, Tensor) or values.ndim != 1 or values.shape != size:
            shape = tuple(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise ValueError(f"{name} is {shape}; it must be a tensor (N,) with an entry for each trained token: "
                             "select those of a tensor (B, T) by its mask, and repeat what belongs to a completion")
        kind = {"sequence_ids": "int64", "policy_mask": "bool"}.get(name)
        if kind and (values.is_floating_point() or (kind == "bool" and values.dtype != torch.bool)):
            raise ValueError(f"{name} is {values.dtype}; it must be {kind}, as {name}.to(torch.{kind}) makes it")
        if name in constants and values.requires_grad:
            raise ValueError(f"{name} needs a gradient, which the loss would drop or misdirect: {name}.detach()")


def settings_of(settings: LossSettings | None, options: dict[str, Any]) -> LossSettings:
    """Return the settings, or those made of keyword options; TypeError if both are given."""
    if settings is not None and options:
        raise TypeError(f"grpo_loss got settings and also {', '.join(options)}; give one of them")
    if settings is not None and not isinstance(settings, LossSettings):
        raise TypeError(f"settings is a {type(settings).__name__}; give LossSettings, or its fields as options")
    return settings or LossSettings(**options)


def loss_tokens(
    logprobs: Tensor, old: Tensor, advantages: Tensor, sequence_ids: Tensor, rollout_logprobs: Tensor | None,
    settings: LossSettings, correct: bool, num_sequences: int | None = None,
) -> LossTokens:
    """Return the tokens with their ratio at the settings' level and, if `correct`, the mismatch correction."""
    lengths, log_ratio = sequence_lengths(sequence_ids, num_sequences), logprobs - old
    mode = settings.vllm_importance_sampling_mode
    log_weight = at_level(log_ratio, sequence_ids, lengths, settings.level)
    correction = None
    if correct:
        sampled = needed(rollout_logprobs, "rollout_logprobs", "the sampler's mismatch is to be corrected")
        correction = correction_weights(mode, old, sampled, sequence_ids, lengths, settings.correction_bounds)
    return LossTokens(logprobs, log_ratio, log_weight, advantages, sequence_ids, lengths, correction,
                      CORRECTIONS[mode].per_sequence)


def at_level(log_ratio: Tensor, sequence_ids: Tensor, lengths: Tensor, level: str) -> Tensor:
    """Return log w (N,) at this `level`: the token's own log ratio, its sequence's sum (RLOO), or its sequence's mean
    (GSPO). "sequence_token" has the value of the mean and the gradient of the token."""
    if level == "token":
        return log_ratio
    if level == "sequence_sum":
        return sequence_sums(log_ratio, sequence_ids, len(lengths))[sequence_ids]
    mean = sequence_means(log_ratio, sequence_ids, lengths)[sequence_ids]
    return mean if level == "sequence" else mean.detach() + (log_ratio - log_ratio.detach())


def factors(
    tokens: LossTokens, settings: LossSettings, rollout_logprobs: Tensor | None, policy_mask: Tensor | None,
    report: Report,
) -> Iterator[Tensor]:
    """Yield the factors of the policy term, each (N,): the off-policy mask, the token mask, the correction."""
    if settings.off_policy_mask_threshold is not None:
        logprobs = tokens.logprobs.detach()
        sampler = logprobs - tokens.log_ratio.detach() if rollout_logprobs is None else rollout_logprobs
        kept = off_policy_sequence_mask(logprobs, sampler, tokens.advantages, tokens.sequence_ids, tokens.lengths,
                                        settings.off_policy_mask_threshold).to(logprobs.dtype)
        report.mean("off_policy/masked_share", 1 - kept)
        yield kept
    if policy_mask is not None:
        yield policy_mask.to(tokens.logprobs.dtype)
    if tokens.correction is not None:
        report_correction(tokens.correction, tokens, report)
        if settings.loss_type != "vespo":  # VESPO's sequence weight contains it
            yield tokens.correction


def nonzero(tokens: LossTokens, term_factors: list[Tensor]) -> Tensor | None:
    """Return where (N,) neither the advantage nor a factor of the policy term is 0; None if there are no factors. Other
    tokens get 0 and no gradient, even if their other values are infinite."""
    if not term_factors:
        return None
    return torch.stack([tokens.advantages != 0, *(factor != 0 for factor in term_factors)]).all(0)


def kl_term(tokens: LossTokens, settings: LossSettings, ref_logprobs: Tensor | None, report: Report) -> Tensor:
    """Return the KL term (N,), weighted by the ratio if `use_bias_correction_kl`."""
    reference = needed(ref_logprobs, "ref_logprobs", f"beta is {settings.beta}")
    name = settings.kl_estimator or "k3"
    if settings.use_bias_correction_kl:
        of_token = settings.level in ("token", "sequence_token")
        kl = weighed_kl(name, tokens.logprobs, reference, tokens.log_weight, of_token)
    else:
        kl = KL_ESTIMATORS[name](tokens.logprobs, reference)
    report.mean("kl", kl)
    return kl


def mean_entropy(entropy: Tensor, policy_mask: Tensor | None, count: float | None) -> Tensor:
    """Return what these tokens add to the step's mean entropy, over the tokens that `policy_mask` keeps."""
    taken = entropy if policy_mask is None else torch.where(policy_mask, entropy, 0.0)
    own = len(entropy) if policy_mask is None else policy_mask.sum()
    return taken.sum() / max(given(count, own), 1)


def given(value: float | None, default: float | Tensor) -> float:
    return float(default if value is None else value)


def needed(values: Tensor | None, name: str, why: str) -> Tensor:
    """Return the values; ValueError if they are None."""
    if values is None:
        raise ValueError(f"{why}, which needs {name}; pass it, or leave the option out")
    return values
