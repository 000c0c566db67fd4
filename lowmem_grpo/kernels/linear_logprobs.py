"""Log-probabilities of target tokens from hidden states and the output head, without the logits.

    z = (hidden W^T + bias) * logit_scale;  z = softcap * tanh(z / softcap);  z = z / temperature
    logp = z[target] - logsumexp(z);        entropy = logsumexp(z) - sum(softmax(z) * z)

N rows, D hidden size, V vocabulary. Only a chunk of rows of z exists at any time. With a frozen head the gradient of
logp with respect to hidden does not depend on the loss:

    U = d logp / d hidden = ((onehot(target) - softmax(z)) * dz) W        dz: derivative of scale, softcap, temperature

so a forward pass that needs a gradient computes U (N, D) chunk by chunk and keeps it in place of `hidden`, and the
backward pass is one row scaling, grad_hidden = grad_logp * U: two matrix products in all, as many as with the logits
kept. A call without gradients does one matrix product and keeps nothing.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 32 * 2**20  # of fp32 logits at a time, where chunk_rows is not given


def linear_logprobs_ref(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0,
    logit_scale: float = 1.0, softcap: float | None = None, ignore_index: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain reference that holds all logits: (logprobs (N,), entropy (N,)), differentiable by autograd."""
    logits = shape_logits(matmul_fp32(hidden, weight.T), bias, temperature, logit_scale, softcap)
    log_softmax = logits.log_softmax(-1)
    ignored = targets == ignore_index if ignore_index is not None else torch.zeros_like(targets, dtype=torch.bool)
    logprobs = log_softmax.gather(-1, targets.masked_fill(ignored, 0)[:, None]).squeeze(-1)
    entropy = -(log_softmax.exp() * floored(log_softmax)).sum(-1)
    return logprobs.masked_fill(ignored, 0), entropy.masked_fill(ignored, 0)


def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0,
    logit_scale: float = 1.0, softcap: float | None = None, return_entropy: bool = False,
    chunk_rows: int | None = None, ignore_index: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each target token, and its entropy with `return_entropy`.

    hidden (N, D) and weight (V, D) share a floating dtype, targets (N,) is int64, bias (V,) is optional. Returns
    logprobs (N,) in float32 (float64 for float64 input), and the pair (logprobs, entropy) with `return_entropy`.
    Rows whose target is `ignore_index` give 0 and no gradient. The head is frozen: `weight` and `bias` take no
    gradient, and asking for one raises ValueError. The entropy is a value, without gradient.
    """
    check_arguments(hidden, weight, targets, bias, temperature)
    rows = max(1, CHUNK_BYTES // (4 * weight.shape[0])) if chunk_rows is None else chunk_rows
    if rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; it must be at least 1")
    with torch.autocast(hidden.device.type, enabled=False):  # the logits keep fp32, whatever surrounds the call
        logprobs, entropy = LinearLogprobsFunction.apply(
            hidden, weight, targets, bias, temperature, logit_scale, softcap, rows, ignore_index
        )
    return (logprobs, entropy) if return_entropy else logprobs


def check_arguments(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float) -> None:
    """Raise ValueError that says what was expected and what was got."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected hidden (N, D) and weight (V, D); got {tuple(hidden.shape)}, {tuple(weight.shape)}")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.long:
        raise ValueError(f"expected targets ({hidden.shape[0]},) int64; got {tuple(targets.shape)} {targets.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias ({weight.shape[0]},); got {tuple(bias.shape)}")
    if not hidden.is_floating_point():
        raise ValueError(f"expected a floating dtype; got {hidden.dtype}")
    if bias is not None and bias.device != weight.device:
        raise ValueError(f"expected bias on {weight.device}; got {bias.device}")
    if hidden.dtype != weight.dtype or hidden.device != weight.device or targets.device != hidden.device:
        raise ValueError(
            f"expected one dtype and one device; got hidden {hidden.dtype} on {hidden.device}, weight {weight.dtype} "
            f"on {weight.device}, targets on {targets.device}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    if torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad)):
        raise ValueError("the head must be frozen: call weight.requires_grad_(False), or keep lm_head out of LoRA")


class LinearLogprobsFunction(torch.autograd.Function):
    """Forward: logprobs, entropy and (where hidden needs a gradient) U. Backward: one row scaling of U."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, bias, temperature, logit_scale, softcap, chunk_rows, ignore_index):
        accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(hidden.shape[0], dtype=accumulate, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, hidden.shape[0], chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits = matmul_fp32(hidden[rows], weight.T)
            logits = shape_logits(logits, bias, temperature, logit_scale, softcap, in_place=True)
            logprobs[rows], entropy[rows], probs = logprob_rows(logits, targets[rows], ignore_index)
            if gradient is not None:
                scale = logit_scale / temperature
                slope = scale * (1 - (logits * (temperature / softcap)) ** 2) if softcap else scale
                gradient[rows] = gradient_rows(probs, targets[rows], slope, ignore_index).to(weight.dtype) @ weight
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, _grad_entropy):
        (gradient,) = ctx.saved_tensors
        # the product is taken in fp32 and rounded once, straight into place
        grad_hidden = torch.mul(gradient, grad_logprobs[:, None], out=torch.empty_like(gradient))
        return grad_hidden, None, None, None, None, None, None, None, None


def logprob_rows(logits: Tensor, targets: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs (R,), entropy (R,), probs (R, V)) of a chunk of finished logits (R, V)."""
    normalizer = logits.logsumexp(-1)
    probs = (logits - normalizer[:, None]).exp_()
    entropy = normalizer - (probs * floored(logits)).sum(-1)
    if ignore_index is None:
        return logits.gather(-1, targets[:, None]).squeeze(-1) - normalizer, entropy, probs
    ignored = targets == ignore_index
    logprobs = logits.gather(-1, targets.masked_fill(ignored, 0)[:, None]).squeeze(-1) - normalizer
    return logprobs.masked_fill_(ignored, 0), entropy.masked_fill_(ignored, 0), probs


def floored(logits: Tensor) -> Tensor:
    """Logits with -inf made finite, so that p log p is 0 at p = 0."""
    return logits.clamp(min=torch.finfo(logits.dtype).min)


def gradient_rows(probs: Tensor, targets: Tensor, slope: Tensor | float, ignore_index: int | None) -> Tensor:
    """(onehot(target) - probs) * slope of a chunk, in place; all zero in ignored rows."""
    difference = probs.neg_()
    ignored = targets == ignore_index if ignore_index is not None else None
    one = torch.ones((), dtype=probs.dtype, device=probs.device).expand(targets.shape[0], 1)
    difference.scatter_add_(1, (targets if ignored is None else targets.masked_fill(ignored, 0))[:, None], one)
    difference *= slope
    return difference if ignored is None else difference.masked_fill_(ignored[:, None], 0)


def shape_logits(
    logits: Tensor, bias: Tensor | None, temperature: float, logit_scale: float, softcap: float | None,
    in_place: bool = False,
) -> Tensor:
    """Bias, scale, softcap and temperature, in this order."""
    logits = logits if in_place else logits.clone()
    if bias is not None:
        logits += bias
    if logit_scale != 1.0:
        logits *= logit_scale
    if softcap:
        logits = logits.div_(softcap).tanh_().mul_(softcap) if in_place else softcap * torch.tanh(logits / softcap)
    return logits.div_(temperature) if temperature != 1.0 else logits


def matmul_fp32(left: Tensor, right: Tensor) -> Tensor:
    """left @ right with a result (and accumulation) in float32, or float64 for float64 input."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.is_cuda and not torch.is_grad_enabled():
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
