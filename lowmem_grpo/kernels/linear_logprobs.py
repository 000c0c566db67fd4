"""Log-probabilities of target tokens from hidden states and the output head, without the logits.

    z = (hidden W^T + bias) * logit_scale;  z = softcap * tanh(z / softcap);  z = z / temperature
    logp = z[target] - logsumexp(z);        entropy = logsumexp(z) - sum(softmax(z) * z)      (on z - max z)

N rows, D hidden size, V vocabulary. Only a chunk of z exists at any time. With a frozen head the gradient of logp with
respect to hidden does not depend on the loss:

    U = d logp / d hidden = ((onehot(target) - softmax(z)) * slope) W       slope: of scale, softcap and temperature

so a forward pass that needs a gradient computes U (N, D) chunk by chunk and keeps it in place of `hidden`, and the
backward pass is one row scaling, grad_hidden = grad_logp * U: two matrix products in all, as many as with the logits
kept. A call without gradients does one matrix product and keeps nothing. Where the head is trained, or the entropy
takes a gradient, the backward pass computes the logits again, tile by tile: three products, and one more for the head's
own gradient. `README.md` beside this file derives all of it.
"""

from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import custom_op, once_differentiable
from lowmem_grpo.kernels.logits import NONE_IGNORED, Head, LogitShape
from lowmem_grpo.kernels.logprob_rows import Rows, forward_rows
from lowmem_grpo.kernels.logprob_tiles import backward_tiles, forward_tiles
from lowmem_grpo.kernels.matmul import accumulator_dtype
from lowmem_grpo.kernels.nf4 import NF4Weight

CPU_CHUNK_BYTES = 32 * 2**20  # fp32 logits at a time, if chunk_rows is None
CUDA_CHUNK_BYTES = 640 * 2**20  # 1,024 rows at V = 151,936: enough for the products to fill a large card
CARD_SHARE = 64  # at most this part of a card's memory


def linear_logprobs_ref(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, temperature: float = 1.0,
    logit_scale: float = 1.0, softcap: float | None = None, ignore_index: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (logprobs (N,), entropy (N,)) in plain torch, which holds all logits; differentiable by autograd."""
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
    hidden: Tensor, weight: Tensor | NF4Weight, targets: Tensor, *, bias: Tensor | None = None,
    temperature: float = 1.0, logit_scale: float = 1.0, softcap: float | None = None, return_entropy: bool = False,
    entropy_grad: bool = False, lora_a: Tensor | None = None, lora_b: Tensor | None = None, lora_scale: float = 1.0,
    chunk_rows: int | None = None, ignore_index: int | None = None, return_best: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Return the log-probability of each target token, the entropy with `return_entropy`, and the log-probability of
    the likeliest token with `return_best`.

    hidden (N, D) and weight (V, D) share a floating dtype, targets (N,) is int64, bias (V,) is optional; a 4-bit weight
    is an `NF4Weight` (or bitsandbytes' Params4bit). lora_a (r, D) and lora_b (V, r) add lora_scale * hidden A^T B^T.
    Returns logprobs (N,) in float32 (float64 for float64 input), or a tuple with the other values asked for, each (N,).
    Rows whose target is `ignore_index` give 0 and no gradient. The log-probability of the likeliest token has no
    gradient; where it equals the target's, the target is the likeliest token.

    hidden, weight, bias, lora_a and lora_b get gradients if they require them (a 4-bit weight never does). The
    entropy is a value without gradient unless `entropy_grad` is set, for a loss with an entropy bonus; that costs a
    third matrix product. `chunk_rows` rows of logits exist at a time, chosen from the device's memory by default.
    """
    if hasattr(weight, "quant_state"):
        weight = NF4Weight.from_bitsandbytes(weight)
    check_arguments(hidden, weight, targets, bias, temperature, chunk_rows)
    check_lora(hidden, weight, lora_a, lora_b)
    ignored = NONE_IGNORED if ignore_index is None else ignore_index
    shape = LogitShape(float(temperature), float(logit_scale), softcap, ignored)
    rows = default_rows(hidden.device, weight.shape[0]) if chunk_rows is None else chunk_rows
    with torch.autocast(hidden.device.type, enabled=False):  # the logits keep fp32, whatever surrounds the call
        low = None
        if lora_a is not None and lora_b is not None:
            low = (hidden @ lora_a.to(hidden.dtype).T) * lora_scale
            lora_b = lora_b.to(hidden.dtype)
        operands = (hidden, weight, bias, low, lora_b)
        needed = [torch.is_grad_enabled() and getattr(operand, "requires_grad", False) for operand in operands]
        if any(needed[1:]) or (entropy_grad and needed[0]):
            function: Any = RecomputedLogprobsFunction
        else:
            function = FrozenHeadLogprobsFunction
        logprobs, entropy, log_sum = function.apply(*operands, targets, shape, rows, needed, entropy_grad)
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
    def forward(ctx, hidden, weight, bias, low, lora_b, targets, shape, chunk_rows, needed, _entropy_grad):
        head = Head(hidden, weight, bias, low, lora_b)
        results, gradient = forward_pass(head, targets, shape, chunk_rows, needed[0])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(results[1], results[3])
        return results[0], results[1], results[3]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, _grad_entropy, _grad_log_sum):
        (gradient,) = ctx.saved_tensors
        # the product is taken in fp32 and rounded once, straight into place
        grad_hidden = torch.mul(gradient, grad_logprobs[:, None], out=torch.empty_like(gradient))
        return grad_hidden, *[None] * 9


class RecomputedLogprobsFunction(torch.autograd.Function):
    """Forward: logprobs and entropy. Backward: recomputes the logits, for every gradient that is needed."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, low, lora_b, targets, shape, chunk_rows, needed, entropy_grad):
        results, _ = forward_pass(Head(hidden, weight, bias, low, lora_b), targets, shape, chunk_rows, False)
        plain = None if isinstance(weight, NF4Weight) else weight
        ctx.save_for_backward(hidden, plain, bias, low, lora_b, targets, *results[1:])
        ctx.quantized = weight if plain is None else None
        ctx.settings = shape, chunk_rows, needed
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(results[3], *([] if entropy_grad else [results[1]]))
        return results[0], results[1], results[3]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy, _grad_log_sum):
        hidden, weight, bias, low, lora_b, targets, entropy, *sums = ctx.saved_tensors
        shape, chunk_rows, needed = ctx.settings
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 10
        head = Head(hidden, ctx.quantized or weight, bias, low, lora_b)
        grad_logprobs = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs
        rows = (*sums, entropy, grad_logprobs, grad_entropy)
        grads = backward_pass(head, targets, shape, chunk_rows, rows, needed)
        return *grads, *[None] * 5


def forward_pass(
    head: Head, targets: Tensor, shape: LogitShape, chunk_rows: int, keep_gradient: bool
) -> tuple[Rows, Tensor | None]:
    """Return ((logprobs, entropy, m, log s), U or None): by rows for a plain weight, by tiles for a 4-bit one."""
    if isinstance(head.weight, NF4Weight):
        return forward_tiles(head, targets, shape, tile_columns(head, chunk_rows), keep_gradient)
    if not torch.compiler.is_compiling():
        return forward_rows(head, targets, shape, chunk_rows, keep_gradient)
    *rows, gradient = forward_op(*head.operands, targets, *shape.numbers(), chunk_rows, keep_gradient)
    return (rows[0], rows[1], rows[2], rows[3]), gradient if keep_gradient else None


def backward_pass(
    head: Head, targets: Tensor, shape: LogitShape, chunk_rows: int,
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None], needed: list[bool],
) -> list[Tensor | None]:
    """Return the gradients of the head's five operands, None if not needed; `rows` as `backward_tiles` takes them."""
    tile = tile_columns(head, chunk_rows)
    if isinstance(head.weight, NF4Weight) or not torch.compiler.is_compiling():
        return backward_tiles(head, targets, shape, tile, *rows, needed)
    grads = backward_op(*head.operands, targets, *shape.numbers(), tile, *rows, needed)
    return [grad if is_needed else None for grad, is_needed in zip(grads, needed, strict=True)]


def tile_columns(head: Head, chunk_rows: int) -> int:
    """Return the columns of a tile over all rows that is as large as `chunk_rows` whole rows of logits."""
    return max(1, chunk_rows * head.vocabulary // max(head.hidden.shape[0], 1))


# The two ops keep the loops over chunks out of graphs that torch.compile makes; elsewhere the loops run as they are.


def forward_compiled(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor | None, lora_b: Tensor | None, targets: Tensor,
    temperature: float, scale: float, softcap: float | None, ignore_index: int, chunk_rows: int, keep_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return logprobs, entropy, m, log s, each (N,), and U (N, D), empty if it is not kept."""
    head, shape = Head(hidden, weight, bias, low, lora_b), LogitShape(temperature, scale, softcap, ignore_index)
    rows, gradient = forward_rows(head, targets, shape, chunk_rows, keep_gradient)
    return *rows, hidden.new_empty(0) if gradient is None else gradient


def forward_fake(hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = [hidden.new_empty(hidden.shape[0], dtype=accumulator_dtype(hidden.dtype)) for _ in range(4)]
    return rows[0], rows[1], rows[2], rows[3], hidden.new_empty(hidden.shape if arguments[-1] else 0)


def backward_compiled(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor | None, lora_b: Tensor | None, targets: Tensor,
    temperature: float, scale: float, softcap: float | None, ignore_index: int, tile: int, maximum: Tensor,
    log_sum: Tensor, entropy: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor | None, needed: list[bool],
) -> list[Tensor]:
    """Return the gradients of hidden, weight, bias, low and lora_b; empty if not needed."""
    head, shape = Head(hidden, weight, bias, low, lora_b), LogitShape(temperature, scale, softcap, ignore_index)
    grads = backward_tiles(head, targets, shape, tile, maximum, log_sum, entropy, grad_logprobs, grad_entropy, needed)
    return [hidden.new_empty(0) if grad is None else grad for grad in grads]


def backward_fake(*arguments: Any) -> list[Tensor]:
    return [torch.empty_like(operand, memory_format=torch.contiguous_format) if needed else arguments[0].new_empty(0)
            for operand, needed in zip(arguments[:5], arguments[-1], strict=True)]


forward_op = custom_op("linear_logprobs_fwd", forward_compiled, fake=forward_fake)
backward_op = custom_op("linear_logprobs_bwd", backward_compiled, fake=backward_fake)


def check_arguments(
    hidden: Tensor, weight: Tensor | NF4Weight, targets: Tensor, bias: Tensor | None, temperature: float,
    chunk_rows: int | None,
) -> None:
    """Raise ValueError, with the expected and the given shapes and dtypes, for an argument that does not fit."""
    if hidden.ndim != 2 or len(weight.shape) != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected hidden (N, D) and weight (V, D); got {tuple(hidden.shape)}, {tuple(weight.shape)}")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.long:
        raise ValueError(f"expected targets ({hidden.shape[0]},) int64; got {tuple(targets.shape)} {targets.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias ({weight.shape[0]},); got {tuple(bias.shape)}")
    if not hidden.is_floating_point():
        raise ValueError(f"expected a floating dtype; got {hidden.dtype}")
    device = weight.packed.device if isinstance(weight, NF4Weight) else weight.device
    if bias is not None and bias.device != device:
        raise ValueError(f"expected bias on {device}; got {bias.device}")
    if hidden.dtype != weight.dtype or hidden.device != device or targets.device != hidden.device:
        raise ValueError(f"expected one dtype and one device; got hidden {hidden.dtype} on {hidden.device}, weight "
                         f"{weight.dtype} on {device}, targets on {targets.device}")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; it must be at least 1")


def check_lora(hidden: Tensor, weight: Tensor | NF4Weight, lora_a: Tensor | None, lora_b: Tensor | None) -> None:
    """Raise ValueError if only one factor of the head's adapter is given, or if they do not fit."""
    if lora_a is None and lora_b is None:
        return
    if lora_a is None or lora_b is None:
        raise ValueError("lora_a and lora_b belong together; got only one of them")
    rank = lora_a.shape[0]
    expected = ((rank, hidden.shape[1]), (weight.shape[0], rank))
    if (tuple(lora_a.shape), tuple(lora_b.shape)) != expected:
        raise ValueError(f"expected lora_a {expected[0]} and lora_b {expected[1]}; got {tuple(lora_a.shape)}, "
                         f"{tuple(lora_b.shape)}")
