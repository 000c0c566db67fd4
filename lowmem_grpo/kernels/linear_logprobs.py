"""Log-probabilities of target tokens from hidden states and the output head, without the logits.

    z = (hidden W^T + bias) * logit_scale;  z = softcap * tanh(z / softcap);  z = z / temperature
    logp = z[target] - logsumexp(z);        entropy = logsumexp(z) - sum(softmax(z) * z)      (on z - max z)

N rows, D hidden size, V vocabulary. Only a chunk of z exists at any time. With a frozen head the gradient of logp with
respect to hidden does not depend on the loss:

    U = d logp / d hidden = ((onehot(target) - softmax(z)) * slope) W       slope: of scale, softcap and temperature

so a forward pass that needs a gradient computes U (N, D) chunk by chunk and keeps it in place of `hidden`, and the
backward pass is one row scaling, grad_hidden = grad_logp * U: two matrix products in all, as many as with the logits
kept. A call without gradients does one. If the head is trained, or the entropy takes a gradient, the backward pass
computes the logits again, tile by tile: three products, and one more for the head's own gradient. `README.md` beside
this file derives all of it.
"""

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import (
    accumulator_dtype,
    check_numbers,
    check_tensors,
    custom_op,
    large_products,
    once_differentiable,
)
from lowmem_grpo.kernels.logits import NONE_IGNORED, new_logits
from lowmem_grpo.kernels.logprob_kernels import backward_tiles, forward_rows, new_gradients

CPU_CHUNK_BYTES = 32 * 2**20  # fp32 logits at a time, if chunk_rows is None
CUDA_CHUNK_BYTES = 640 * 2**20  # 1,024 rows at V = 151,936: enough for the products to fill a large card
CARD_SHARE = 64  # at most this part of a card's memory


def linear_logprobs_ref(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0,
    logit_scale: float = 1.0, softcap: float | None = None, ignore_index: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (logprobs (N,), entropy (N,)) in plain torch, with all logits in memory; differentiable by autograd."""
    dtype = accumulator_dtype(hidden.dtype)
    logits = hidden.to(dtype) @ weight.to(dtype).T
    logits = (logits if bias is None else logits + bias) * logit_scale
    logits = (softcap * torch.tanh(logits / softcap) if softcap else logits) / temperature
    log_softmax = logits.log_softmax(-1)
    ignored = torch.zeros_like(targets, dtype=torch.bool) if ignore_index is None else targets == ignore_index
    logprobs = log_softmax.gather(-1, targets.masked_fill(ignored, 0)[:, None]).squeeze(-1)
    finite = log_softmax.clamp(min=torch.finfo(dtype).min)  # p log p is 0 at p = 0
    entropy = -(log_softmax.exp() * finite).sum(-1)
    return logprobs.masked_fill(ignored, 0), entropy.masked_fill(ignored, 0)


def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0,
    logit_scale: float = 1.0, softcap: float | None = None, return_entropy: bool = False, entropy_grad: bool = False,
    chunk_rows: int | None = None, ignore_index: int | None = None, return_best: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Return the log-probability (N,) of each target token, in float32 (float64 for float64 input). With
    `return_entropy` or `return_best`, return a tuple that goes on with the entropy (N,) and the log-probability (N,) of
    the likeliest token.

    hidden (N, D) and weight (V, D) share a floating dtype, targets (N,) is int64, bias (V,) is optional. Rows whose
    target is `ignore_index` give 0 and no gradient. Other targets outside the vocabulary raise ValueError on the CPU,
    and give NaN on a card. The log-probability of the likeliest token has no gradient; ignored rows have it as well.

    hidden, weight and bias get gradients if they require them. The entropy has a gradient only with `entropy_grad`,
    which costs a third matrix product. `chunk_rows` rows of logits exist at a time; the default suits the device.
    """
    check_numbers(temperature=temperature, logit_scale=logit_scale, softcap=0 if softcap is None else softcap)
    check_arguments(hidden, weight, targets, bias, temperature, chunk_rows)
    ignored = NONE_IGNORED if ignore_index is None else int(ignore_index)
    numbers = float(temperature), float(logit_scale), softcap, ignored
    rows = default_rows(hidden.device, weight.shape[0]) if chunk_rows is None else chunk_rows
    learns, head = (torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts)
                    for parts in ((hidden,), (weight, bias)))
    with torch.autocast(hidden.device.type, enabled=False):  # the logits keep fp32, whatever surrounds the call
        if head or (learns and entropy_grad):
            logprobs, entropy, log_sum = RecomputedLogprobsFunction.apply(hidden, weight, bias, targets, numbers, rows,
                                                                          entropy_grad)
        else:
            logprobs, entropy, log_sum = FrozenHeadLogprobsFunction.apply(hidden, weight, bias, targets, numbers, rows,
                                                                          learns)
    asked = [entropy] * return_entropy + [-log_sum] * return_best
    return (logprobs, *asked) if asked else logprobs


def default_rows(device: torch.device, vocabulary: int) -> int:
    """Return the largest power of two of rows whose float32 logits stay within the device's budget."""
    budget = CPU_CHUNK_BYTES
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory if torch.cuda.is_available() else 80 * 2**30
        budget = min(CUDA_CHUNK_BYTES, memory // CARD_SHARE)
    return 1 << max(0, (budget // (4 * max(vocabulary, 1))).bit_length() - 1)


class FrozenHeadLogprobsFunction(torch.autograd.Function):
    """Forward: logprobs, entropy and (if hidden needs a gradient) U. Backward: one row scaling of U."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, numbers, chunk_rows, keep_gradient):
        forward: Any = forward_op if torch.compiler.is_compiling() else forward_rows
        with large_products():
            results, gradient = forward(hidden, weight, bias, targets, *numbers, chunk_rows, keep_gradient)
        ctx.save_for_backward(gradient)
        logprobs, entropy, _, log_sum = (row.clone() for row in results)
        ctx.mark_non_differentiable(entropy, log_sum)
        return logprobs, entropy, log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, _grad_entropy, _grad_log_sum):
        (gradient,) = ctx.saved_tensors
        # the product is taken in fp32 and rounded once, straight into place
        grad_hidden = torch.mul(gradient, grad_logprobs[:, None], out=torch.empty_like(gradient))
        return grad_hidden, *[None] * 6


class RecomputedLogprobsFunction(torch.autograd.Function):
    """Forward: logprobs and entropy. Backward: recomputes the logits, for every gradient that is needed."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, numbers, chunk_rows, entropy_grad):
        forward: Any = forward_op if torch.compiler.is_compiling() else forward_rows
        with large_products():
            results, _ = forward(hidden, weight, bias, targets, *numbers, chunk_rows, False)
        ctx.save_for_backward(hidden, weight, bias, targets, results)
        rows = len(hidden) + hidden.shape[1] * ctx.needs_input_grad[1]  # in float32, of logits and head: as a chunk's
        ctx.numbers, ctx.tile = numbers, max(1, chunk_rows * len(weight) // max(rows, 1))
        ctx.set_materialize_grads(False)
        logprobs, entropy, _, log_sum = (row.clone() for row in results)
        ctx.mark_non_differentiable(log_sum, *([] if entropy_grad else [entropy]))
        return logprobs, entropy, log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy, _grad_log_sum):
        hidden, weight, bias, targets, results = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 7
        grad_logprobs = torch.zeros_like(grad_entropy) if grad_logprobs is None else grad_logprobs
        needed = ctx.needs_input_grad[:3]
        backward: Any = backward_op if torch.compiler.is_compiling() else backward_tiles
        with large_products():
            grads = backward(hidden, weight, bias, targets, *ctx.numbers, ctx.tile, results, grad_logprobs,
                             grad_entropy, list(needed))
        return *(grad if wanted else None for grad, wanted in zip(grads, needed, strict=True)), *[None] * 4


# The two ops keep the loops over chunks out of graphs that torch.compile makes; elsewhere the loops run as they are.


def new_results(hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return new_logits(hidden, 4, len(hidden)), hidden.new_empty(hidden.shape if arguments[-1] else 0)


forward_op = custom_op("linear_logprobs_fwd", forward_rows, fake=new_results)
backward_op = custom_op("linear_logprobs_bwd", backward_tiles,
                        fake=lambda hidden, weight, bias, *others: new_gradients(hidden, weight, bias, others[-1]))


def check_arguments(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float, chunk_rows: int | None
) -> None:
    """Raise ValueError, with the expected and the given shapes and dtypes, for an argument that does not fit."""
    check_head(hidden, weight, bias, temperature, chunk_rows)
    check_tensors(targets=targets)
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.long:
        raise ValueError(f"expected targets ({hidden.shape[0]},) int64; got {tuple(targets.shape)} {targets.dtype}")
    if targets.device != hidden.device:
        raise ValueError(f"expected targets on {hidden.device}; got {targets.device}")


def check_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, chunk_rows: int | None,
    names: tuple[str, str, str] = ("hidden", "weight", "bias"),
) -> None:
    """Raise ValueError, with the expected and the given shapes and dtypes, for hidden states or a head that do not fit;
    `names` are those of the first three arguments."""
    if hasattr(weight, "quant_state") and isinstance(weight, Tensor):
        raise ValueError(f"expected a head (V, D) of the dtype of hidden; got a {type(weight).__name__} in 4 bits. "
                         "Dequantize it once, with nf4_dequantize, and leave lm_head out of quantization")
    states, head, offset = names
    check_tensors({offset: bias}, **{states: hidden, head: weight})
    if hidden.ndim != 2 or len(weight.shape) != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected {states} (N, D) and {head} (V, D); got {tuple(hidden.shape)}, "
                         f"{tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected {offset} ({weight.shape[0]},); got {tuple(bias.shape)}")
    if not hidden.is_floating_point():
        raise ValueError(f"expected a floating dtype; got {hidden.dtype}")
    if bias is not None and bias.device != weight.device:
        raise ValueError(f"expected {offset} on {weight.device}; got {bias.device}")
    if hidden.dtype != weight.dtype or hidden.device != weight.device:
        raise ValueError(f"expected one dtype and one device; got {states} {hidden.dtype} on {hidden.device}, {head} "
                         f"{weight.dtype} on {weight.device}")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    if chunk_rows is not None and (not isinstance(chunk_rows, Integral) or chunk_rows < 1):
        raise ValueError(f"chunk_rows is {chunk_rows!r}; it must be a whole number, at least 1")
