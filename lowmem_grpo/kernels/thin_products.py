"""Several matrix products in one launch, each with a thin matrix, as LoRA has them: one side is a rank.

    out_g = scale_g left_g right_g        or, for the first ones,      out_g += scale_g left_g right_g

left (M, K), right (K, N), out (M, N) of any strides; out in the dtype of left, or in float32. Sums are in float32 and
rounded once. Of all layers on one input, low and all d_low are one launch, dA and all dB another, with dx += d_low A.
They read each of x and dy_i once, which bounds their time on a card, as it does that of one product after the other in
cuBLAS, however many the rows.

A tile of `out` belongs to one program, which sums over all of K in order: the result is the same each time, and needs
no second launch. dA and dB sum over the tokens, in tiles of only 32 entries of `in` and `out`, so that a layer of 2,048
has as many programs as a card has multiprocessors; cuBLAS would split the tokens and add the parts. Ranks above `THIN`
are products of their own, which cuBLAS computes faster, and so are all before sm_80, where Triton has no tensor cores.
"""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import custom_op, matmul_fp32
from lowmem_grpo.kernels.triton_utils import TRITON_TYPES, Launch, Variant, capability, next_power_of_2, tl, triton

Product = tuple[Tensor, Tensor, Tensor, float]  # out, left, right, scale
THIN = 192  # three ranks of 64


def thin_products_cpu(
    outs: list[Tensor], lefts: list[Tensor], rights: list[Tensor], scales: list[float], adding: int
) -> None:
    """Compute one product after the other in plain torch; the first `adding` are added to their `out`."""
    for number, (out, left, right, scale) in enumerate(zip(outs, lefts, rights, scales, strict=True)):
        if out.dtype == left.dtype:
            out.addmm_(left, right, beta=int(number < adding), alpha=scale)
            continue
        matmul_fp32(left, right, out=out)
        if scale != 1:
            out.mul_(scale)


def launch_rule(rank: int) -> Launch:
    """Return the launch for `out` with columns for a rank. Products that are added sum over it, BLOCK_N at a time."""
    block = min(64, max(16, next_power_of_2(rank)))
    return Launch({"BLOCK_M": max(32, block), "BLOCK_N": block, "BLOCK_K": 128 if block < 64 else 64}, num_stages=3)


@triton.jit
def tile_of_one(
    out_ptr, left_ptr, right_ptr, scale, size, stride, tile, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Compute one tile (BLOCK_M, BLOCK_N) of out; size: M, N, K; stride: of rows and columns of out, left and right."""
    across = tl.maximum(tl.cdiv(size[1], BLOCK_N), 1)
    m = (tile // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = (tile % across) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K)
    terms = tl.where(tile < tl.cdiv(size[0], BLOCK_M) * across, size[2], 0)  # none beyond the last tile
    left = left_ptr + m * stride[2] + k[None, :] * stride[3]
    right = right_ptr + k[:, None] * stride[4] + n * stride[5]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, terms, BLOCK_K):
        there = k < size[2] - start
        a = tl.load(left, mask=(m < size[0]) & there[None, :], other=0.0)
        b = tl.load(right, mask=there[:, None] & (n < size[1]), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += BLOCK_K * stride[3]
        right += BLOCK_K * stride[4]
    out = out_ptr + m * stride[0] + n * stride[1]
    inside = (m < size[0]) & (n < size[1])
    total = total * scale
    if ADD:
        total += tl.load(out, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def thin_products_kernel(
    outs, lefts, rights, scales, sizes, strides, ADDING: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    for g in tl.static_range(len(outs)):
        if tl.program_id(1) == g:
            if g < ADDING:
                tile_of_one(outs[g], lefts[g], rights[g], scales[g], sizes[g], strides[g], tile, True, 32, 128, BLOCK_N)
            else:
                tile_of_one(outs[g], lefts[g], rights[g], scales[g], sizes[g], strides[g], tile, False, BLOCK_M,
                            BLOCK_N, BLOCK_K)


def thin_products_triton(
    outs: list[Tensor], lefts: list[Tensor], rights: list[Tensor], scales: list[float], adding: int
) -> None:
    """Launch the kernel where it `fits`, and cuBLAS elsewhere."""
    if lefts[0].is_cuda and not fits(lefts, rights):
        return thin_products_cpu(outs, lefts, rights, scales, adding)
    rows = list(zip(outs, lefts, rights, scales, strict=True))
    rows = rows[:adding] + [upright(*row) for row in rows[adding:]]
    sizes = tuple((*out.shape, left.shape[1]) for out, left, *_ in rows)
    launch = launch_rule(min((size[1] for size in sizes[adding:]), default=16))
    blocks = [(32, 128)] * adding + [(launch.constexprs["BLOCK_M"], launch.constexprs["BLOCK_N"])] * len(rows)
    tiles = max(-(-m // block[0]) * -(-n // block[1]) for (m, n, _), block in zip(sizes, blocks, strict=False))
    strides = tuple((*out.stride(), *left.stride(), *right.stride()) for out, left, right, _ in rows)
    if tiles:
        thin_products_kernel[(tiles, len(rows))](*zip(*rows, strict=True), sizes, strides, ADDING=adding,
                                                 **launch.options)


def fits(lefts: list[Tensor], rights: list[Tensor]) -> bool:
    """Return whether one launch computes the products at least as fast as cuBLAS: see above."""
    thin = all(min(*left.shape, *right.shape) <= THIN for left, right in zip(lefts, rights, strict=True))
    return thin and lefts[0].dtype in TRITON_TYPES and lefts[0].itemsize == 2 and capability(lefts[0].device) >= 80


def upright(out: Tensor, left: Tensor, right: Tensor, scale: float) -> Product:
    """Return the product, or that of the transposed matrices, whose `out` then has the rank as columns."""
    return (out.T, right.T, left.T, scale) if len(out) < out.shape[1] else (out, left, right, scale)


thin_products = custom_op("thin_products", thin_products_cpu, thin_products_triton, mutates=("outs",))


def multiply(products: Sequence[Product], adding: int = 0) -> None:
    """Compute the products (out, left, right, scale) in one launch, without autograd; add the first `adding` to out."""
    if products:
        outs, lefts, rights, scales = map(list, zip(*products, strict=True))
        thin_products(outs, lefts, rights, scales, adding)


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    """Return a variant per rank and order of `left`, for two products of aligned sizes; none before sm_80."""
    kind, found = "*" + TRITON_TYPES[dtype], []
    for rank, adding in product((16, 32, 64), (0, 1)) if capability >= 80 else ():
        added, summed = ("i32", "1", "i32", "1", "i32", "1"), ("i32", "i32", "1", "i32", "i32", "1")
        types = {"outs": (kind, "*fp32") if adding else (kind,) * 2, "lefts": (kind,) * 2, "rights": (kind,) * 2,
                 "scales": ("fp32",) * 2, "sizes": (("i32",) * 3,) * 2,
                 "strides": (added, summed if adding else added)}
        found.append(Variant(f"thin_products rank={rank} adding={adding}", thin_products_kernel, types,
                             launch_rule(rank), {"ADDING": adding}))
    return found
