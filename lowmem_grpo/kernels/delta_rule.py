"""The gated delta rule (Yang, Kautz and Hatamizadeh, arXiv 2412.06464) over packed sequences (`runs`), with initial and
final states, and the causal convolution before it.

    k = key / |key|,  q = query / |query| / sqrt(K)                                (|x| = sqrt(sum x^2 + 1e-6))
    S_t = exp(g_t) S_{t-1} + k_t (x) beta_t (v_t - exp(g_t) S_{t-1}^T k_t),        o_t = S_t^T q_t

query, key (T, H_k, K), v and o (T, H, V), g and beta (T, H) float32, S (K, V) of each head and sequence; H is a
multiple of H_k, and neighbouring heads share a query and a key. g <= 0.

Chunks of C tokens. Write b_i = sum_{t <= i} g_t within a chunk and S for the state before it. What each token adds to
the state, u_i = beta_i (v_i - ...), depends on the earlier ones of its chunk through a triangular system, which is
solved for all chunks at once:

    (1 + A) u = beta v - beta exp(b) k^T S,   A_ij = beta_i exp(b_i - b_j) k_i . k_j  for j < i
    o_i = exp(b_i) S^T q_i + sum_{j <= i} exp(b_i - b_j) (q_i . k_j) u_j
    S' = exp(b_C) S + sum_j exp(b_C - b_j) k_j (x) u_j

b_i - b_j is taken as the sum of g between j and i, never as a difference: under strong decay b grows, and its
difference would lose the digits that matter. All is computed in float32 (float64 for inputs of that dtype). Only the
inputs are kept for backward; heads are independent, so both passes take a few heads at a time, to save scratch memory.

The convolution: y_t = silu(sum_j w_j x_{t - W + 1 + j}), j = 0 .. W - 1, for x, y (T, C), w (C, W) and states
(S, W - 1, C). Before a sequence's first token x is the initial state; the final state is the last W - 1 inputs.
"""

import logging
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lowmem_grpo.kernels.custom_op import once_differentiable
from lowmem_grpo.kernels.varlen import CHUNK, VarlenSequences

NORM_EPSILON = 1e-6
AGREEMENT = 0.02  # relative norm; rounding to 16 bits takes about 0.005
SCRATCH = 2**22  # numbers (T, heads, K) that are computed at a time
FLA, OLDEST = "flash-linear-attention", (0, 6)  # names and layout of states are those of 0.6.0

logger = logging.getLogger(__name__)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, runs: VarlenSequences,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs (T, H, V) in value's dtype, and final states (S, H, K, V); `initial` None means zeros."""
    if initial is None:
        initial = g.new_zeros(len(runs.lengths), value.shape[1], key.shape[2], value.shape[2])
    if not runs.tokens:
        return value, initial
    if fla_serves(value) and fla_agrees(value.device, value.dtype):
        return by_fla(query, key, value, g, beta, runs, initial)
    return DeltaRuleFunction.apply(query, key, value, g, beta, initial, runs)


def delta_rule_ref(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, runs: VarlenSequences, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `delta_rule` token by token, in plain torch."""
    results, finals, start = [], [], 0
    for length, state in zip(runs.lengths, initial, strict=True):
        state = state[None]
        for token in range(start, start + length):
            now = slice(token, token + 1)
            result, state = delta_step(query[now], key[now], value[now], g[now], beta[now], state)
            results.append(result)
        finals.append(state)
        start += length
    return torch.cat(results) if results else value, torch.cat(finals)


@cache
def fla_version() -> str | None:
    """Return the installed version of flash-linear-attention; None without one, or if it is below OLDEST."""
    try:
        release = version(FLA)
    except PackageNotFoundError:
        return None
    numbers = re.match(r"(\d+)\.(\d+)", release)
    return release if numbers and tuple(map(int, numbers.groups())) >= OLDEST else None


def fla_serves(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and fla_version() is not None


def describe_kernels(x: Tensor) -> str:
    """Return words, for messages, that say which kernels compute the gated delta rule for x."""
    if fla_serves(x):
        return f"the kernels of {FLA} {fla_version()}"
    wish = f"; {FLA} {OLDEST[0]}.{OLDEST[1]} or later is faster" if x.is_cuda and fla_version() is None else ""
    return f"plain torch{wish}"


def by_fla(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, runs: VarlenSequences, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `delta_rule` with flash-linear-attention's kernels, which do not accept sequences without tokens."""
    rule: Any = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    states = list(zip(initial.split(1), runs.lengths, strict=True))
    result, final = rule(query[None], key[None], value[None], g[None], beta[None], output_final_state=True,
                         initial_state=torch.cat([state for state, length in states if length]),
                         use_qk_l2norm_in_kernel=True, cu_seqlens=runs.filled.cu_seqlens)
    new = iter(final.split(1))
    return result[0], torch.cat([next(new) if length else state for state, length in states])


@cache
def fla_agrees(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether fla's results and gradients agree with the token-by-token rule, cached per card and dtype."""
    runs, outcomes = VarlenSequences((70, 3, 0, 60), device), []
    with torch.enable_grad():
        inputs = example(runs, device, dtype)
        query, key, value, g, beta, initial = inputs
        for rule in (by_fla, delta_rule_ref):
            result, final = rule(query, key, value, g, beta, runs, initial)
            grads = torch.autograd.grad(result.float().sin().sum() + final.cos().sum(), inputs)
            outcomes.append([tensor.detach().float() for tensor in (result, final, *grads)])
    worst = max(float((tensor - other).norm() / other.norm()) for tensor, other in zip(*outcomes, strict=True))
    if not worst < AGREEMENT:
        logger.warning("%s and the gated delta rule differ by %.3f of its size: plain torch computes it. Install "
                       "another version of it, or none", describe_kernels(value), worst)
    return worst < AGREEMENT


def example(runs: VarlenSequences, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return random inputs of the rule, which require gradients, to try the kernels with."""
    draw, count = torch.Generator().manual_seed(0), runs.tokens
    made = [torch.randn(count, heads, 64, generator=draw) for heads in (2, 2, 4)]
    made += [-torch.rand(count, 4, generator=draw), torch.rand(count, 4, generator=draw),
             torch.randn(len(runs.lengths), 4, 64, 64, generator=draw)]
    kinds = [dtype] * 3 + [torch.float32] * 3
    return [part.to(device, kind).requires_grad_() for part, kind in zip(made, kinds, strict=True)]


def delta_step(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the rule on one token of each of B sequences; return outputs (B, H, V) and the next states (B, H, K, V)."""
    groups, dtype = value.shape[1] // key.shape[1], state.dtype
    query, key = (normed(x.to(dtype)).repeat_interleave(groups, 1) for x in (query, key))
    state = state * g.to(dtype).exp()[..., None, None]
    told = (state * key[..., None]).sum(-2)
    added = beta.to(dtype)[..., None] * (value.to(dtype) - told)
    state = state + key[..., None] * added[..., None, :]
    result = (state * query[..., None]).sum(-2) * query.shape[-1] ** -0.5
    return result.to(value.dtype), state


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON)


class DeltaRuleFunction(torch.autograd.Function):
    """The gated delta rule in its chunked form. Only the inputs are saved for backward."""

    @staticmethod
    def forward(ctx, query, key, value, g, beta, initial, runs):
        parts = query, key, value, g, beta, initial
        ctx.save_for_backward(*parts)
        ctx.runs = runs
        result, final = torch.empty_like(value), torch.empty_like(initial)
        for some, heads in tiles(parts):
            result[:, heads], final[:, heads] = without_autocast(some, runs)
        return result, final

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_result, grad_final):
        parts = ctx.saved_tensors
        grads = tuple(torch.empty_like(part) for part in parts)
        for (some, heads), (room, _) in zip(tiles(parts), tiles(grads), strict=True):
            wanted = tuple(part.detach().requires_grad_() for part in some)
            # hooks of its own, so that outer ones do not offload what it saves
            with torch.enable_grad(), saved_tensors_hooks(Tensor.detach, Tensor.detach):
                result, final = without_autocast(wanted, ctx.runs)
            gradients = torch.autograd.grad((result, final), wanted, (grad_result[:, heads], grad_final[:, heads]))
            for place, grad in zip(room, gradients, strict=True):
                place.copy_(grad)
        return (*grads, None)


def tiles(parts: tuple[Tensor, ...]) -> Iterator[tuple[tuple[Tensor, ...], slice]]:
    """Yield the inputs of a few heads at a time, as views, and the slice of these heads in `value`."""
    query, key, value, g, beta, initial = parts
    groups = value.shape[1] // key.shape[1]
    at_once = max(1, SCRATCH // (max(1, len(key)) * groups * max(key.shape[2], value.shape[2])))
    for start in range(0, key.shape[1], at_once):
        few = slice(start, start + at_once)
        heads = slice(start * groups, min(start + at_once, key.shape[1]) * groups)
        yield (query[:, few], key[:, few], value[:, heads], g[:, heads], beta[:, heads], initial[:, heads]), heads


def without_autocast(parts: tuple[Tensor, ...], runs: VarlenSequences) -> tuple[Tensor, Tensor]:
    """Run `chunked` without autocast, so that its matrix products stay in float32."""
    with torch.autocast(parts[0].device.type, enabled=False):
        return chunked(parts, runs)


def chunked(parts: tuple[Tensor, ...], runs: VarlenSequences) -> tuple[Tensor, Tensor]:
    """Compute the rule chunk by chunk; everything that does not need the state is computed for all chunks at once."""
    query, key, value, g, beta, initial = parts
    chunks, dtype, groups = runs.chunks, initial.dtype, value.shape[1] // key.shape[1]

    def laid(x: Tensor, repeats: int = 1) -> Tensor:
        """Return x (T, H, ...) in chunks, (N, H, C, ...), with 0 where a chunk has no token."""
        rows = x.index_select(0, chunks.sources).unflatten(0, (-1, CHUNK))
        rows = torch.where(chunks.real.view(*chunks.real.shape, *[1] * (x.dim() - 1)), rows, 0).to(dtype)
        return rows.transpose(1, 2).repeat_interleave(repeats, 1)

    q, k, v, step, rate = laid(query, groups), laid(key, groups), laid(value), laid(g), laid(beta)[..., None]
    q, k = normed(q) * q.shape[-1] ** -0.5, normed(k)
    between = sums_between(step)
    decay = between.exp()
    since_start = step.cumsum(-1).exp()[..., None]
    until_end = decay[..., -1, :, None]
    system = rate * (k @ k.mT) * decay  # only what lies below the diagonal is read
    solved = torch.linalg.solve_triangular(system, torch.cat([rate * v, rate * since_start * k], -1), upper=False,
                                           unitriangular=True)
    added, read = solved.split((v.shape[-1], k.shape[-1]), -1)
    laid_results, final = scan(added, read, q * since_start, (q @ k.mT) * decay, k * until_end,
                               since_start[..., -1:, :], initial.index_select(0, chunks.order), chunks.counts)
    result = laid_results.transpose(1, 2).flatten(0, 1).index_select(0, chunks.places)
    return result.to(value.dtype), final.index_select(0, chunks.back)


def sums_between(step: Tensor) -> Tensor:
    """Return (..., C, C): the sum of step (..., C) over j < t <= i, and -inf for j > i."""
    width = step.shape[-1]
    below = torch.ones(width, width, dtype=torch.bool, device=step.device).tril(-1)
    sums = torch.where(below, step[..., None], 0).cumsum(-2)
    return sums.masked_fill(below.mT, -torch.inf)


def scan(
    added: Tensor, read: Tensor, q: Tensor, scores: Tensor, k: Tensor, decay: Tensor, state: Tensor,
    counts: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Return the results of all chunks (N, H, C, V) and the last state of each sequence (S, H, K, V). The N chunks are
    ordered by their index i within their sequence. The first `counts[i]` sequences of `state` have a chunk i."""
    results, finals = [], []
    steps = zip(*(tensor.split(counts) for tensor in (added, read, q, scores, k, decay)), strict=True)
    for new, reads, asks, pairs, keys, whole in steps:
        if len(new) < len(state):  # otherwise the view would keep each step's states alive
            finals.append(state[len(new) :])
            state = state[: len(new)]
        new = new - reads @ state
        results.append(asks @ state + pairs @ new)
        state = whole * state + keys.mT @ new
    return torch.cat(results), torch.cat([state, *reversed(finals)])


def causal_conv(
    x: Tensor, weight: Tensor, runs: VarlenSequences, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return outputs (T, C) and final states (S, W - 1, C); `initial` (S, W - 1, C) is zeros if None."""
    before = weight.shape[1] - 1
    if initial is None:
        initial = x.new_zeros(len(runs.lengths), before, x.shape[1])
    if not runs.tokens:
        return x, initial
    stream = torch.cat([part for run in zip(initial, x.split(runs.lengths), strict=True) for part in run])
    ends = list(accumulate(length + before for length in runs.lengths))
    if fla_serves(x):
        conv: Any = import_module("fla.modules.causal_conv1d").causal_conv1d
        wide = conv(stream[None], weight, activation="silu")[0][0]
    else:
        convolved = F.conv1d(stream.T[None], weight[:, None], padding=before, groups=len(weight))
        wide = F.silu(convolved[0, :, : len(stream)].T)
    result = torch.cat([wide[end - length : end] for end, length in zip(ends, runs.lengths, strict=True)])
    return result, torch.stack([stream[end - before : end] for end in ends])
