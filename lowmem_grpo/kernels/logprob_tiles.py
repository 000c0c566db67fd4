"""Log-probabilities and gradients tile by tile along the vocabulary, all rows of a tile at once.

A tile is (N, T) logits. Running through the vocabulary this way, each row of the head is read (or dequantized) once per
pass and its gradient is one product with all rows, rounded once. Two passes exist:

    forward    a running maximum m, sum s and weighted sum t of each row (arXiv 1805.02867) and, where asked for,
               A = sum_v exp(z_v - m) slope_v W_v, rescaled whenever m grows; U = slope_y W_y - A / s
    backward   d = (g (onehot - p) - h p (log p + entropy)) * slope     g, h: gradients of logprobs and entropy
               grad_hidden = sum over tiles of d W,  grad_weight = d^T hidden,  grad_bias = sum over rows of d
               (the second term is d entropy / d z_v = -p_v (log p_v + entropy))
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem_grpo.kernels.logits import Head, LogitShape, kernels_take, packed_gradient
from lowmem_grpo.kernels.logprob_rows import Rows
from lowmem_grpo.kernels.logprob_tile_kernels import (
    DECAY,
    MAXIMUM,
    SLOPE,
    SUM,
    TARGET,
    WEIGHTED,
    differentiate_ref,
    logprob_tile_bwd,
    logprob_tile_fwd,
    new_state,
    update_state_ref,
)
from lowmem_grpo.kernels.matmul import accumulator_dtype, addmm_fp32, matmul_fp32

ROWS = 1024  # rows that are finished at a time
NAMES = ("hidden", "weight", "bias", "low", "lora_b")  # the order of a head's operands, and of their gradients
SUMS = ("hidden", "low")  # operands whose gradients are sums over the vocabulary


def bands(vocabulary: int, tile: int) -> list[slice]:
    """Return the slice of the vocabulary for each tile."""
    return [slice(start, min(start + tile, vocabulary)) for start in range(0, vocabulary, tile)]


def forward_tiles(
    head: Head, targets: Tensor, shape: LogitShape, tile: int, keep_gradient: bool
) -> tuple[Rows, Tensor | None]:
    """Return ((logprobs, entropy, m, log s) each (N,), U (N, D) in the dtype of hidden or None)."""
    rows, size = head.hidden.shape
    buffer = head.buffer(rows, min(tile, head.vocabulary))
    state = new_state(rows, buffer)
    total = torch.zeros(rows, size, dtype=buffer.dtype, device=buffer.device) if keep_gradient else None
    gradient_dtype = head.hidden.dtype if keep_gradient else None
    update = logprob_tile_fwd if kernels_take(buffer) else update_state_ref
    for band in bands(head.vocabulary, tile):
        weight = head.weight_rows(band)
        logits = head.logits(slice(None), band, weight, out=buffer[:, : band.stop - band.start])
        update(logits, state, targets, head.bias_rows(band), *shape.numbers(), band.start, gradient_dtype)
        if total is not None:
            addmm_fp32(total.mul_(state[DECAY, :, None]), packed_gradient(logits, head.hidden.dtype), weight)
    ignored = targets == shape.ignore_index
    maximum, log_sum = state[MAXIMUM].clone(), state[SUM].log()
    logprobs = (state[TARGET] - maximum - log_sum).masked_fill_(ignored, 0)
    entropy = (log_sum - state[WEIGHTED] / state[SUM]).masked_fill_(ignored, 0)
    if total is None:
        return (logprobs, entropy, maximum, log_sum), None
    del buffer, logits, weight
    return (logprobs, entropy, maximum, log_sum), finish_gradient(head, total, state, targets, ignored)


def finish_gradient(head: Head, total: Tensor, state: Tensor, targets: Tensor, ignored: Tensor) -> Tensor:
    """Return U = slope_y W_y - total / sum, zero in ignored rows; a band of rows at a time."""
    gradient = total if total.dtype == head.hidden.dtype else torch.empty_like(head.hidden)
    for start in range(0, total.shape[0], ROWS):
        rows = slice(start, start + ROWS)
        target_weight = head.weight_rows(targets[rows].masked_fill(ignored[rows], 0)).to(total.dtype)
        chunk = total[rows].div_(-state[SUM, rows, None]).addcmul_(target_weight, state[SLOPE, rows, None])
        gradient[rows] = chunk.masked_fill_(ignored[rows, None], 0)
    return gradient


@dataclass
class HeadGradients:
    """Gradients of a head's operands, in their shapes; None if not needed. Those of hidden and low are sums over the
    vocabulary, in float32; the others are written band by band."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    low: Tensor | None
    lora_b: Tensor | None

    @classmethod
    def empty(cls, head: Head, needed: list[bool]) -> "HeadGradients":
        """Allocate the gradients that are needed, with the sums at 0."""
        dtype, made = accumulator_dtype(head.hidden.dtype), dict.fromkeys(NAMES)
        for name, is_needed in zip(NAMES, needed, strict=True):
            operand = getattr(head, name)
            if is_needed and operand is not None:
                made[name] = (head.hidden.new_zeros(operand.shape, dtype=dtype) if name in SUMS
                              else torch.empty_like(operand, memory_format=torch.contiguous_format))
        return cls(**made)

    def add(self, head: Head, band: slice, weight: Tensor, difference: Tensor, scale: Tensor) -> None:
        """Add one band's d (N, T); weight (T, D) is the band's."""
        if self.hidden is not None:
            addmm_fp32(self.hidden, difference, weight)
        if self.weight is not None:
            self.weight[band] = matmul_fp32(difference.T, head.hidden).mul_(scale)
        if self.bias is not None:
            self.bias[band] = difference.sum(0, dtype=scale.dtype).mul_(scale)
        if self.low is not None and head.lora_b is not None:
            addmm_fp32(self.low, difference, head.lora_b[band])
        if self.lora_b is not None and head.low is not None:
            self.lora_b[band] = matmul_fp32(difference.T, head.low).mul_(scale)

    def finish(self, head: Head, scale: Tensor) -> list[Tensor | None]:
        """Return the gradients in the order of the operands; the sums are scaled and rounded here."""
        grads = {name: getattr(self, name) for name in NAMES}
        grads |= {name: grads[name].mul_(scale).to(head.hidden.dtype) for name in SUMS if grads[name] is not None}
        return list(grads.values())


def backward_tiles(
    head: Head, targets: Tensor, shape: LogitShape, tile: int, maximum: Tensor, log_sum: Tensor, entropy: Tensor,
    grad_logprobs: Tensor, grad_entropy: Tensor | None, needed: list[bool],
) -> list[Tensor | None]:
    """Return gradients of hidden (N, D), weight (V, D), bias (V,), low (N, r) and lora_b (V, r); None if not needed.
    The incoming gradients (N,) are divided by their largest magnitude before anything is rounded to 16 bits, and the
    results multiplied by it in float32: a loss averaged over many tokens does not underflow in float16."""
    smallest = grad_logprobs.new_full((1,), torch.finfo(grad_logprobs.dtype).tiny)  # for a scale above 0 if all are 0
    present = [grad for grad in (grad_logprobs, grad_entropy) if grad is not None]
    scale = torch.cat([smallest, *present]).abs().amax()
    rows = (maximum, log_sum, entropy, grad_logprobs / scale, None if grad_entropy is None else grad_entropy / scale)
    gradients = HeadGradients.empty(head, needed)
    buffer = head.buffer(head.hidden.shape[0], min(tile, head.vocabulary))
    differentiate = logprob_tile_bwd if kernels_take(buffer) else differentiate_ref
    for band in bands(head.vocabulary, tile):
        weight = head.weight_rows(band)
        logits = head.logits(slice(None), band, weight, out=buffer[:, : band.stop - band.start])
        differentiate(logits, targets, head.bias_rows(band), *rows, *shape.numbers(), band.start, head.hidden.dtype)
        gradients.add(head, band, weight, packed_gradient(logits, head.hidden.dtype), scale)
    return gradients.finish(head, scale)
