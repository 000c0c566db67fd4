"""Log-probabilities, entropies and their gradients from parts of the logits, in place: some whole rows at a time, or
all rows of a tile of the vocabulary.

    m = max z;  s = sum exp(z - m);  logp = (z[target] - m) - log s;  entropy = log s - sum(exp(z - m) (z - m)) / s
    rows     gradient = (onehot(target) - p) * slope                                              of logp
    tiles    d = (g (onehot(target) - p) - h p (log p + entropy)) * slope                         of a loss
             grad_hidden = sum over tiles of d W,  grad_weight = d^T hidden,  grad_bias = sum over rows of d

N rows, R of a chunk, V vocabulary, T entries of a tile, first ... first + T - 1; p = softmax(z), z and slope as in
`logits.py`; g, h: gradients of the log-probability and of the entropy of each row (d entropy / d z_v = -p_v (log p_v +
entropy)). A row is read twice: once for a running maximum, sum and weighted sum (Milakov and Gimelshein, arXiv
1805.02867), once to write the gradient over the logits. By tiles, the gradient of each row of the head is one product
with all rows, rounded once. A 16-bit gradient fills the first half of each row's bytes.
"""

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import accumulator_dtype, addmm, addmm_fp32, custom_op, matmul_fp32
from lowmem_grpo.kernels.logits import (
    LogitShape,
    floor_,
    floored,
    kernels_take,
    new_logits,
    packed_gradient,
    row_dot,
    row_statistics,
    shape_logits,
    types_of_logits,
)
from lowmem_grpo.kernels.triton_utils import Launch, Variant, flagged, tl, triton

ROWS = Launch({"BLOCK_V": 2048}, num_warps=8, num_stages=1)  # one row per program, 8 entries per thread
TILES = Launch({"BLOCK_V": 1024}, num_warps=4, num_stages=1)


def forward_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, scale: float,
    softcap: float | None, ignore_index: int, chunk_rows: int, keep_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return logprobs, entropy, m and log s as one tensor (4, N), and U (N, D) of linear_logprobs.py in the dtype of
    hidden, empty unless `keep_gradient`, from hidden (N, D), weight (V, D) and bias (V,)."""
    rows, vocabulary = hidden.shape[0], weight.shape[0]
    check_targets(targets, vocabulary, ignore_index)
    buffer = new_logits(hidden, min(chunk_rows, rows), vocabulary)
    results = buffer.new_empty(4, rows)
    gradient = hidden.new_empty(hidden.shape if keep_gradient else 0)
    numbers, dtype = (temperature, scale, softcap, ignore_index), weight.dtype if keep_gradient else None
    finish = logprob_rows if kernels_take(buffer) else finish_rows_ref
    for start in range(0, rows, chunk_rows):
        chunk = slice(start, min(start + chunk_rows, rows))
        logits = matmul_fp32(hidden[chunk], weight.T, out=buffer[: chunk.stop - start])
        results[:, chunk] = finish(logits, targets[chunk], bias, *numbers, dtype)
        if keep_gradient:
            difference = packed_gradient(logits, weight.dtype)
            if not difference.is_cuda:  # oneDNN reads past the end of padded rows of odd length, and 0 * NaN is NaN
                difference = difference.contiguous()
            addmm(gradient[chunk], difference, weight, beta=0)
    return results, gradient


def check_targets(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise ValueError for a target outside the vocabulary. On a card it is not checked: its row becomes NaN."""
    if type(targets) is Tensor and targets.is_cpu:  # a fake tensor has no values
        ids = targets.numpy()
        if len(wrong := ids[(ids != ignore_index) & ((ids < 0) | (ids >= vocabulary))]):
            raise ValueError(f"targets hold {wrong[0]}; they must be tokens, from 0 to {vocabulary - 1}. Give the "
                             "target of the rows to leave out as ignore_index, as in ignore_index=-100")


def finish_rows_ref(
    logits: Tensor, targets: Tensor, bias: Tensor | None, temperature: float, scale: float, softcap: float | None,
    ignore_index: int, gradient_dtype: torch.dtype | None,
) -> Tensor:
    """Return (4, R): logprobs, entropy, m, log s of raw logits (R, V), which are overwritten: with `gradient_dtype`, by
    their gradient in the layout of `packed_gradient`. Needs one more buffer of the size of the logits."""
    shape = LogitShape(temperature, scale, softcap, ignore_index)
    ignored = targets == ignore_index
    columns = targets.masked_fill(ignored, 0)[:, None]
    target = shape.apply_(logits, bias).gather(-1, columns)
    maximum = floor_(logits).amax(-1, keepdim=True)
    weights = logits.sub_(maximum).exp()
    total = weights.sum(-1, keepdim=True)
    log_sum = total.log()
    logprobs = (target - maximum - log_sum).squeeze(-1)
    entropy = log_sum.squeeze(-1) - row_dot(weights, logits) / total.squeeze(-1)
    if gradient_dtype is not None:
        difference = weights.div_(-total).scatter_add_(1, columns, torch.ones_like(total))
        difference.mul_(shape.slope_(logits, maximum)).masked_fill_(ignored[:, None], 0)
        packed_gradient(logits, gradient_dtype).copy_(difference)
    rows = logprobs.masked_fill_(ignored, 0), entropy.masked_fill_(ignored, 0)
    return torch.stack([*rows, maximum.squeeze(-1), log_sum.squeeze(-1)])


@triton.jit
def logprob_rows_kernel(
    logits_ptr, gradient_ptr, results_ptr, targets_ptr, bias_ptr, R, V, logits_stride, gradient_stride,
    temperature, scale, softcap, ignore_index,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_GRADIENT: tl.constexpr, BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    target = tl.load(targets_ptr + row)
    kept, outside = target != ignore_index, (target < 0) | (target >= V)
    target = tl.where(outside, 0, target)

    row_max, total, weighted = row_statistics(
        logits_ptr, bias_ptr, V, temperature, scale, softcap, HAS_BIAS, HAS_SOFTCAP, BLOCK_V
    )
    log_sum = tl.where(kept & outside, float("nan"), tl.log(total))

    target_raw = tl.load(logits_ptr + target)
    target_bias = tl.load(bias_ptr + target).to(tl.float32) if HAS_BIAS else 0.0
    target_z, _ = shape_logits(target_raw, target_bias, scale, softcap, temperature, HAS_SOFTCAP)
    tl.store(results_ptr + row, tl.where(kept, target_z - row_max - log_sum, 0.0))
    tl.store(results_ptr + R + row, tl.where(kept, log_sum - weighted / total, 0.0))
    tl.store(results_ptr + 2 * R + row, row_max)
    tl.store(results_ptr + 3 * R + row, log_sum)

    if HAS_GRADIENT:
        gradient_ptr += row * gradient_stride
        lanes = tl.arange(0, BLOCK_V)
        for start in range(0, V, BLOCK_V):
            columns = start + lanes
            inside = columns < V
            raw = tl.load(logits_ptr + columns, mask=inside, other=0.0)
            # A narrower gradient is written over logits that other threads of this program may still be reading:
            # the bytes of block j lie within those of blocks 0..j, which every thread has read at this point.
            tl.debug_barrier()
            bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
            z, slope = shape_logits(raw, bias, scale, softcap, temperature, HAS_SOFTCAP)
            onehot = tl.where(columns == target, 1.0, 0.0)
            gradient = tl.where(kept, (onehot - tl.exp(z - row_max - log_sum)) * slope, 0.0)
            tl.store(gradient_ptr + columns, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)


def logprob_rows_triton(
    logits: Tensor, targets: Tensor, bias: Tensor | None, temperature: float, scale: float, softcap: float | None,
    ignore_index: int, gradient_dtype: torch.dtype | None,
) -> Tensor:
    """Launch the kernel, one program per row; return (4, R). A gradient, if wanted, overwrites the logits."""
    rows, vocabulary = logits.shape
    results = torch.empty(4, rows, dtype=logits.dtype, device=logits.device)
    gradient = packed_gradient(logits, gradient_dtype or logits.dtype)
    if rows:
        logprob_rows_kernel[(rows,)](
            logits, gradient, results, targets, logits if bias is None else bias, rows, vocabulary,
            logits.stride(0), gradient.stride(0), float(temperature), float(scale), float(softcap or 0), ignore_index,
            HAS_BIAS=bias is not None, HAS_SOFTCAP=bool(softcap), HAS_GRADIENT=gradient_dtype is not None,
            **ROWS.options,
        )
    return results


logprob_rows = custom_op(
    "logprob_rows", finish_rows_ref, logprob_rows_triton, mutates=("logits",),
    fake=lambda logits, *_: logits.new_empty(4, logits.shape[0]),
)


def backward_tiles(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, scale: float,
    softcap: float | None, ignore_index: int, tile: int, results: Tensor, grad_logprobs: Tensor,
    grad_entropy: Tensor | None, needed: list[bool],
) -> list[Tensor]:
    """Return gradients of hidden (N, D), weight (V, D) and bias (V,), empty if not needed, from the results (4, N) of
    `forward_rows` and the incoming gradients (N,). Incoming gradients are divided by their largest magnitude first, so
    that a loss averaged over many tokens does not underflow in float16."""
    smallest = grad_logprobs.new_full((1,), torch.finfo(grad_logprobs.dtype).tiny)  # for a divisor above 0 if all are 0
    present = [grad for grad in (grad_logprobs, grad_entropy) if grad is not None]
    most = torch.cat([smallest, *present]).abs().amax()
    _, entropy, maximum, log_sum = results
    rows = (maximum, log_sum, entropy, grad_logprobs / most, None if grad_entropy is None else grad_entropy / most)
    total = hidden.new_zeros(hidden.shape if needed[0] else 0, dtype=accumulator_dtype(hidden.dtype))
    _, grad_weight, grad_bias = new_gradients(hidden, weight, bias, [False, *needed[1:]])
    buffer = new_logits(hidden, len(hidden), min(tile, len(weight)))
    differentiate = logprob_tile_bwd if kernels_take(buffer) else differentiate_ref
    for start in range(0, len(weight), tile):
        band = slice(start, min(start + tile, len(weight)))
        logits = matmul_fp32(hidden, weight[band].T, out=buffer[:, : band.stop - start])
        differentiate(logits, targets, None if bias is None else bias[band], *rows, temperature, scale, softcap,
                      ignore_index, start, hidden.dtype)
        difference = packed_gradient(logits, hidden.dtype)
        if needed[0]:
            addmm_fp32(total, difference, weight[band])
        if needed[1]:
            grad_weight[band] = matmul_fp32(difference.T, hidden).mul_(most)
        if needed[2]:
            grad_bias[band] = difference.sum(0, dtype=most.dtype).mul_(most)
    return [total.mul_(most).to(hidden.dtype), grad_weight, grad_bias]


def new_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: list[bool]) -> list[Tensor]:
    return [torch.empty_like(part, memory_format=torch.contiguous_format) if wanted and part is not None
            else hidden.new_empty(0) for part, wanted in zip((hidden, weight, bias), needed, strict=True)]


def differentiate_ref(
    logits: Tensor, targets: Tensor, bias: Tensor | None, maximum: Tensor, log_sum: Tensor, entropy: Tensor,
    grad_logprobs: Tensor, grad_entropy: Tensor | None, temperature: float, scale: float, softcap: float | None,
    ignore_index: int, first: int, gradient_dtype: torch.dtype,
) -> None:
    """Overwrite raw logits (N, T) of a tile, whose first token is `first`, by their gradient d, as a
    `packed_gradient`."""
    shape = LogitShape(temperature, scale, softcap, ignore_index)
    columns = (targets - first).clamp(0, logits.shape[1] - 1)[:, None]
    here = columns.squeeze(-1) + first == targets
    floor_(shape.apply_(logits, bias)).sub_(maximum[:, None])
    difference = (logits - log_sum[:, None]).exp_().mul_(-grad_logprobs[:, None])
    if grad_entropy is not None:
        log_probs = logits - log_sum[:, None]
        difference.sub_(log_probs.exp() * (log_probs + entropy[:, None]) * grad_entropy[:, None])
    difference.scatter_add_(1, columns, torch.where(here, grad_logprobs, 0)[:, None])
    difference.mul_(shape.slope_(logits, maximum[:, None])).masked_fill_((targets == ignore_index)[:, None], 0)
    packed_gradient(logits, gradient_dtype).copy_(difference)


@triton.jit
def logprob_tile_bwd_kernel(
    logits_ptr, gradient_ptr, targets_ptr, bias_ptr, maximum_ptr, log_sum_ptr, entropy_ptr, grad_logprobs_ptr,
    grad_entropy_ptr, T, first, logits_stride, gradient_stride, temperature, scale, softcap, ignore_index,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    gradient_ptr += row * gradient_stride
    target = tl.load(targets_ptr + row)
    kept = target != ignore_index
    maximum = tl.load(maximum_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    grad_logprob = tl.load(grad_logprobs_ptr + row)
    entropy = tl.load(entropy_ptr + row)
    grad_entropy = tl.load(grad_entropy_ptr + row) if HAS_ENTROPY else 0.0
    lanes = tl.arange(0, BLOCK_V)
    for start in range(0, T, BLOCK_V):
        columns = start + lanes
        inside = columns < T
        raw = tl.load(logits_ptr + columns, mask=inside, other=0.0)
        tl.debug_barrier()  # see logprob_rows_kernel: a narrower result is written over bytes that all have read
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
        z, slope = shape_logits(raw, bias, scale, softcap, temperature, HAS_SOFTCAP)
        log_prob = floored(z) - maximum - log_sum
        prob = tl.exp(log_prob)
        onehot = tl.where(columns + first == target, 1.0, 0.0)
        gradient = grad_logprob * (onehot - prob)
        if HAS_ENTROPY:
            gradient -= grad_entropy * prob * (log_prob + entropy)
        gradient = tl.where(kept, gradient * slope, 0.0)
        tl.store(gradient_ptr + columns, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)


def logprob_tile_bwd_triton(
    logits: Tensor, targets: Tensor, bias: Tensor | None, maximum: Tensor, log_sum: Tensor, entropy: Tensor,
    grad_logprobs: Tensor, grad_entropy: Tensor | None, temperature: float, scale: float, softcap: float | None,
    ignore_index: int, first: int, gradient_dtype: torch.dtype,
) -> None:
    """Write the gradient d over one tile of logits (N, T)."""
    rows, columns = logits.shape
    gradient = packed_gradient(logits, gradient_dtype)
    if rows:
        logprob_tile_bwd_kernel[(rows,)](
            logits, gradient, targets, logits if bias is None else bias, maximum, log_sum, entropy, grad_logprobs,
            grad_logprobs if grad_entropy is None else grad_entropy, columns, first, logits.stride(0),
            gradient.stride(0), float(temperature), float(scale), float(softcap or 0), ignore_index,
            HAS_BIAS=bias is not None, HAS_SOFTCAP=bool(softcap), HAS_ENTROPY=grad_entropy is not None,
            **TILES.options,
        )


logprob_tile_bwd = custom_op("logprob_tile_bwd", differentiate_ref, logprob_tile_bwd_triton, mutates=("logits",))


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    rows = types_of_logits(logprob_rows_kernel, dtype, results_ptr="*fp32")
    wide = ("maximum_ptr", "log_sum_ptr", "entropy_ptr", "grad_logprobs_ptr", "grad_entropy_ptr")
    tiles = types_of_logits(logprob_tile_bwd_kernel, dtype, **dict.fromkeys(wide, "*fp32"))
    flags = ("HAS_BIAS", "HAS_SOFTCAP")
    return [*flagged("logprob_rows", logprob_rows_kernel, rows, ROWS, (*flags, "HAS_GRADIENT")),
            *flagged("logprob_tile_bwd", logprob_tile_bwd_kernel, tiles, TILES, (*flags, "HAS_ENTROPY"))]
