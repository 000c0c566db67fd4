"""Draw a token of each row from its logits, by inverse CDF, in one pass over the logits.

    z = logits / temperature;  p = softmax(z);  token: the first v with p_0 + ... + p_v > u;  logprob = log p_token

logits (B, V) float32, u (B, 1) float64 from [0, 1). A first kernel finds the maximum and the sum of exp(z - maximum) of
each block of a row. A second one sums these in float64, finds the block of u, and reads that block again for the token.
A token of probability 0, as of logit -inf, is never drawn.
"""

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import custom_op
from lowmem_grpo.kernels.triton_utils import Launch, Variant, tl, triton, types_of

LAUNCH = Launch({"BLOCK_V": 4096}, num_warps=8, num_stages=1)
MOST_BLOCKS = 128  # of a row
LEAST = -3e38  # in place of a block's maximum of -inf, from which nothing can be subtracted


def draw_tokens_ref(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return tokens (B,) int64 and their log-probabilities (B,), by plain torch."""
    logprobs = (logits / temperature).log_softmax(-1)
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)


@triton.jit
def block_sums_kernel(most_ptr, sums_ptr, logits_ptr, V, stride, blocks, temperature, LEAST: tl.constexpr,
                      BLOCK_V: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    z = tl.load(logits_ptr + row * stride + column, mask=column < V, other=-float("inf")) / temperature
    most = tl.maximum(tl.max(z, 0), LEAST)
    tl.store(most_ptr + row * blocks + tl.program_id(0), most)
    tl.store(sums_ptr + row * blocks + tl.program_id(0), tl.sum(tl.exp(z - most), 0))


@triton.jit
def draw_tokens_kernel(
    tokens_ptr, logprobs_ptr, most_ptr, sums_ptr, uniform_ptr, logits_ptr, V, stride, blocks, temperature,
    LEAST: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    most = tl.load(most_ptr + row * blocks + b, mask=b < blocks, other=LEAST)
    sums = tl.load(sums_ptr + row * blocks + b, mask=b < blocks, other=0.0).to(tl.float64)
    top = tl.max(most, 0)
    shares = sums * tl.exp(most - top).to(tl.float64)
    total = tl.sum(shares, 0)
    wanted = tl.load(uniform_ptr + row) * total
    last = tl.max(tl.where(shares > 0, b, 0), 0)
    block = tl.minimum(tl.sum((tl.cumsum(shares, 0) <= wanted).to(tl.int32), 0), last)
    column = block * BLOCK_V + tl.arange(0, BLOCK_V)
    z = tl.load(logits_ptr + row * stride + column, mask=column < V, other=-float("inf")) / temperature
    weights = tl.exp(z - tl.sum(tl.where(b == block, most, 0.0), 0)).to(tl.float64)
    # u's place between the ends of its block, in the block's own sum: both sums are rounded, in another order
    place = (wanted - tl.sum(tl.where(b < block, shares, 0.0), 0)) / tl.sum(tl.where(b == block, shares, 0.0), 0)
    below = tl.cumsum(weights, 0) <= tl.maximum(place, 0.0) * tl.sum(weights, 0)
    last = tl.max(tl.where(weights > 0, column, 0), 0)
    token = tl.minimum(block * BLOCK_V + tl.sum(below.to(tl.int32), 0), last)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    logprob = tl.sum(tl.where(column == token, z, 0.0), 0) - top - tl.log(total.to(tl.float32))
    tl.store(logprobs_ptr + row, logprob)


def draw_tokens_triton(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Launch both kernels; logits that these do not read go to the reference."""
    (rows, size), block = logits.shape, LAUNCH.constexprs["BLOCK_V"]
    blocks = triton.cdiv(size, block)
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or blocks > MOST_BLOCKS or not rows:
        return draw_tokens_ref(logits, uniform, temperature)
    most, sums = logits.new_empty(2, rows, blocks)
    tokens, logprobs = new_results(logits)
    numbers = logits, size, logits.stride(0), blocks, float(temperature), LEAST
    block_sums_kernel[(blocks, rows)](most, sums, *numbers, **LAUNCH.options)
    draw_tokens_kernel[(rows,)](tokens, logprobs, most, sums, uniform.contiguous(), *numbers, BLOCKS=MOST_BLOCKS,
                                **LAUNCH.options)
    return tokens, logprobs


def new_results(logits: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    return logits.new_empty(len(logits), dtype=torch.long), logits.new_empty(len(logits))


draw_tokens = custom_op("draw_tokens", draw_tokens_ref, draw_tokens_triton, fake=new_results)


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    types = {"uniform_ptr": "*fp64", "tokens_ptr": "*i64", "temperature": "fp32"}
    return [Variant(kernel.__name__, kernel, {name: kind for name, kind in types_of(
        kernel, torch.float32, **types).items() if name in kernel.arg_names}, LAUNCH, constexprs)
        for kernel, constexprs in ((block_sums_kernel, {"LEAST": LEAST}),
                                   (draw_tokens_kernel, {"LEAST": LEAST, "BLOCKS": MOST_BLOCKS}))]
