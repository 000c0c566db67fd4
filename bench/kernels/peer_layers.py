"""Norms, rotary embedding and gated activations: ours, torch.compile of the plain references, and Liger's.

All of them are memory-bound: `moved_bytes` is the least that a pass must read and write. Weights of norms are frozen,
as under LoRA. Liger overwrites inputs or upstream gradients where it can; ours does not.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bench.kernels.problems import FWD, FWD_BWD, Case, Forward, Problem, Provider, Results, compiled, pair, truth_of
from lowmem_grpo.kernels.glu import geglu, geglu_ref, swiglu, swiglu_ref
from lowmem_grpo.kernels.rms_norm import rms_norm, rms_norm_ref
from lowmem_grpo.kernels.rope import rope, rope_ref

EPS = 1e-6
THETA = 5e5  # base of Llama 3's rotary embedding


def make(case: Case, forward: Forward, leaves: Results, given: dict[str, Any], grads: Results,
         passes: tuple[int, int]) -> Problem:
    """Return a memory-bound problem; `passes` are the bytes that forward and backward move."""
    moved = {FWD: passes[0], FWD_BWD: sum(passes)}
    return Problem(case, leaves, given, grads, lambda: truth_of(forward, leaves, given, grads), moved)


def rows_problem(forward: Forward, inputs: str, outputs: str, moved: tuple[int, int],
                 weighted: bool) -> Callable[[Case], Problem]:
    """Return a function that makes a problem whose inputs and outputs have one shape (N, D); `moved` are the numbers of
    such tensors that forward and backward read or write. A norm (`weighted`) has a weight (D,) too."""

    def build(case: Case) -> Problem:
        rows, width = case.shape.values()
        generator, names = case.generator(), (inputs.split(), outputs.split())
        leaves, grads = ({name: case.randn(rows, width, generator=generator) for name in group} for group in names)
        given = {"weight": 1 + case.randn(width, generator=generator, scale=0.1)} if weighted else {}
        size = rows * width * case.torch_dtype.itemsize
        return make(case, forward, leaves, given, grads, (moved[0] * size, moved[1] * size))

    return build


def rope_problem(case: Case) -> Problem:
    """Return a problem of q (1, T, H, D), k (1, T, K, D), viewed heads first as in transformers; cos, sin (1, T, D)."""
    tokens, width = case.shape["T"], case.shape["D"]
    generator = case.generator()
    q, k, grad_q, grad_k = (
        case.randn(1, tokens, case.shape[heads], width, generator=generator) for heads in ("H", "K", "H", "K")
    )
    frequencies = THETA ** (-torch.arange(0, width, 2, device=case.device) / width)
    angle = (torch.arange(tokens, device=case.device)[:, None] * frequencies).repeat(1, 2)[None]
    given = {"cos": angle.cos().to(q.dtype), "sin": angle.sin().to(q.dtype)}
    moved = 2 * (q.nbytes + k.nbytes + given["cos"].nbytes)
    upstream = {"q": grad_q.transpose(1, 2), "k": grad_k.transpose(1, 2)}
    return make(case, turning(rope_ref), {"q": q, "k": k}, given, upstream, (moved, moved))


# Functions wrapped as the forwards of these problems


def normed(function: Callable[..., Tensor]) -> Forward:
    return lambda x, weight: {"y": function(x, weight, EPS)}


def added(function: Callable[..., Any]) -> Forward:
    """Return the forward of a norm that adds a residual first."""

    def forward(x: Tensor, residual: Tensor, weight: Tensor) -> Results:
        y, total = function(x, weight, EPS, residual=residual)
        return {"y": y, "sum": total}

    return forward


def turning(function: Callable[..., tuple[Tensor, Tensor]]) -> Forward:
    """Return the forward of a rope function, which gets q and k with heads first."""

    def forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Results:
        q_out, k_out = function(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return {"q": q_out, "k": k_out}

    return forward


def gated(function: Callable[..., Tensor]) -> Forward:
    """Return the forward of a gated activation. It gets views, so that it may write over their bytes."""
    return lambda gate, up: {"out": function(gate.view_as(gate), up.view_as(up))}


def liger(name: str, as_forward: Callable[[Callable[..., Any]], Forward], note: str = "") -> Provider:
    """Return the provider of a function of Liger's."""
    return Provider("liger", lambda _: as_forward(getattr(import_module("liger_kernel.transformers.functional"), name)),
                    "liger-kernel", note, needs=("card",), overwrites=True)


def four(ours: Forward, reference: Forward, theirs: Provider) -> list[Provider]:
    """Return our provider, the reference, torch.compile of the reference, and Liger's provider."""
    return [*pair(ours, reference), compiled(reference, "of the reference"), theirs]


def norm(as_forward: Callable[[Callable[..., Any]], Forward], inputs: str, outputs: str, moved: tuple[int, int],
         theirs: Provider) -> tuple[Callable[[Case], Problem], list[Provider]]:
    reference = as_forward(rms_norm_ref)
    return rows_problem(reference, inputs, outputs, moved, True), four(as_forward(rms_norm), reference, theirs)


def glu(name: str, ours: Callable[..., Tensor],
        plain_form: Callable[..., Tensor]) -> tuple[Callable[[Case], Problem], list[Provider]]:
    """Return problem and providers of a gated activation."""
    reference, theirs = gated(plain_form), liger(f"liger_{name}", gated, "gradients over inputs")
    return rows_problem(reference, "gate up", "out", (3, 5), False), four(gated(ours), reference, theirs)


PROBLEMS = {
    # forward reads x and writes y; backward reads x and grad_y and writes grad_x
    "rms_norm": norm(normed, "x", "y", (2, 3), liger("liger_rms_norm", normed, "gradient over the upstream one")),
    # forward reads two and writes two; backward reads three and writes one for both inputs
    "add_rms_norm": norm(added, "x residual", "y sum", (4, 4), liger("liger_fused_add_rms_norm", lambda function: added(
        lambda x, weight, eps, residual: function(x, residual, weight, eps)))),
    "rope": (rope_problem, four(turning(rope), turning(rope_ref), liger("liger_rope", turning, "in place"))),
    "swiglu": glu("swiglu", swiglu, swiglu_ref), "geglu": glu("geglu", geglu, geglu_ref),
}
