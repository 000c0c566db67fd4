"""Norms, rotary embedding and gated activations: ours, torch.compile of the plain references, and Liger's.

All of them are bound by memory: `moved_bytes` is what a pass must read and write at least. Weights of norms are frozen,
as under LoRA. Liger overwrites inputs or upstream gradients where it can; so do our providers with "in_place" or
"reuse" in their name.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bench.kernels.problems import (
    FWD,
    FWD_BWD,
    OURS,
    REFERENCE,
    Case,
    Forward,
    Problem,
    Provider,
    Results,
    Run,
    UnsupportedError,
    autograd_run,
    compiled,
    from_forward,
    restore,
    truth_of,
)
from lowmem_grpo.kernels.glu import geglu, geglu_ref, swiglu, swiglu_ref
from lowmem_grpo.kernels.rms_norm import rms_norm, rms_norm_ref
from lowmem_grpo.kernels.rope import angles, rope, rope_in_place, rope_ref

EPS = 1e-6
THETA = 5e5  # of Llama 3's rotary embedding


def make(case: Case, forward: Forward, leaves: Results, given: dict[str, Any], grads: Results,
         passes: tuple[int, int]) -> Problem:
    """A problem bound by memory; `passes` are the bytes of forward and of backward."""
    moved = {FWD: passes[0], FWD_BWD: sum(passes)}
    return Problem(case, leaves, given, grads, lambda: truth_of(forward, leaves, given, grads), moved)


def norm_problem(case: Case) -> Problem:
    """x (N, D): forward reads x and writes y; backward reads x and grad_y and writes grad_x."""
    rows, size = case.shape["N"], case.shape["D"]
    generator = case.generator()
    x, grad = (case.randn(rows, size, generator=generator) for _ in range(2))
    weight = 1 + case.randn(size, generator=generator, scale=0.1)
    return make(case, norm_ref, {"x": x}, {"weight": weight}, {"y": grad}, (2 * x.nbytes, 3 * x.nbytes))


def add_norm_problem(case: Case) -> Problem:
    """Residual added first: forward reads two and writes two; backward reads three and writes one for both inputs."""
    rows, size = case.shape["N"], case.shape["D"]
    generator = case.generator()
    x, residual, grad_y, grad_sum = (case.randn(rows, size, generator=generator) for _ in range(4))
    weight = 1 + case.randn(size, generator=generator, scale=0.1)
    return make(case, add_norm_ref, {"x": x, "residual": residual}, {"weight": weight},
                {"y": grad_y, "sum": grad_sum}, (4 * x.nbytes, 4 * x.nbytes))


def rope_problem(case: Case) -> Problem:
    """q (1, T, H, D), k (1, T, K, D), seen with heads first as in transformers; cos and sin (1, T, D)."""
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


def glu_problem(forward: Forward) -> Callable[[Case], Problem]:
    """gate and up (N, F): forward reads two and writes one, backward reads three and writes two."""

    def build(case: Case) -> Problem:
        generator = case.generator()
        gate, up, grad = (case.randn(case.shape["N"], case.shape["F"], generator=generator) for _ in range(3))
        return make(case, forward, {"gate": gate, "up": up}, {}, {"out": grad}, (3 * gate.nbytes, 5 * gate.nbytes))

    return build


def norm_ref(x: Tensor, weight: Tensor) -> Results:
    return {"y": rms_norm_ref(x, weight, EPS)}


def add_norm_ref(x: Tensor, residual: Tensor, weight: Tensor) -> Results:
    y, total = rms_norm_ref(x, weight, EPS, residual=residual)
    return {"y": y, "sum": total}


def our_norm(x: Tensor, weight: Tensor) -> Results:
    return {"y": rms_norm(x, weight, EPS)}


def our_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Results:
    y, total = rms_norm(x, weight, EPS, residual=residual)
    return {"y": y, "sum": total}


def turning(function: Callable[..., tuple[Tensor, Tensor]]) -> Forward:
    """A rope function as a forward of this problem: heads come first in what it sees."""

    def forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Results:
        q_out, k_out = function(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return {"q": q_out, "k": k_out}

    return forward


def gated(function: Callable[..., Tensor], **options: Any) -> Forward:
    """A gated activation as a forward of its problem. It is given views, so that it may write over their bytes."""

    def forward(gate: Tensor, up: Tensor) -> Results:
        return {"out": function(gate.view_as(gate), up.view_as(up), **options)}

    return forward


def build_rope_in_place(problem: Problem) -> Run:
    """Both passes over the bytes of their inputs, as a fused layer calls them: no autograd."""
    leaves = {name: leaf.clone() for name, leaf in problem.leaves.items()}
    # clone() keeps the strides of a transposed gradient, which is what attention hands back
    upstream = {name: grad.clone() for name, grad in problem.upstream.items()}
    turns = [angles(problem.given[name]) for name in ("cos", "sin")]
    backward = problem.case.passes == FWD_BWD

    def call() -> Results:
        with torch.no_grad():
            q, k = rope(*(leaf.transpose(1, 2) for leaf in leaves.values()), *turns, in_place=True)
            if backward:
                rope_in_place(upstream["q"], upstream["k"], *turns, True, True)
        turned = {f"grad_{name}": grad.transpose(1, 2) for name, grad in upstream.items()} if backward else {}
        return {"q": q, "k": k} | turned

    return Run(call, lambda: restore(problem, leaves, upstream))


def liger(make_forward: Callable[[], Forward]) -> Callable[[Problem], Run]:
    """The `build` of a Liger kernel."""

    def build(problem: Problem) -> Run:
        forward = make_forward()
        if problem.case.device != "cuda":
            raise UnsupportedError("its kernels need a card")
        return autograd_run(problem, forward, overwrites=True)

    return build


def liger_norm() -> Forward:
    from liger_kernel.transformers.functional import liger_rms_norm

    return lambda x, weight: {"y": liger_rms_norm(x, weight, EPS)}


def liger_add_norm() -> Forward:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    def forward(x: Tensor, residual: Tensor, weight: Tensor) -> Results:
        y, total = liger_fused_add_rms_norm(x, residual, weight, EPS)
        return {"y": y, "sum": total}

    return forward


def liger_rope() -> Forward:
    from liger_kernel.transformers.functional import liger_rope

    return turning(liger_rope)


def liger_gated(name: str) -> Callable[[], Forward]:
    """Makes the forward of one of its gated activations."""
    return lambda: gated(getattr(import_module("liger_kernel.transformers.functional"), f"liger_{name}"))


def four(ours: Forward, reference: Forward, theirs: Callable[[], Forward], note: str = "") -> list[Provider]:
    """Ours, the reference, torch.compile of it, and Liger."""
    return [
        Provider(OURS, from_forward(ours), OURS), Provider(REFERENCE, from_forward(reference), OURS),
        Provider("torch_compile", compiled(reference), note="of the reference"),
        Provider("liger", liger(theirs), "liger-kernel", note),
    ]


def glu_providers(function: Callable[..., Tensor], reference: Forward, theirs: Callable[[], Forward]) -> list[Provider]:
    """With a second one of ours that writes gradients over the inputs, as Liger does."""
    build = from_forward(gated(function, reuse_inputs=True), overwrites=True)
    reuse = Provider(f"{OURS}_reuse", build, OURS, "gradients over inputs")
    return [*four(gated(function), reference, theirs, "gradients over inputs"), reuse]


IN_PLACE = Provider(f"{OURS}_in_place", build_rope_in_place, OURS, "both passes in place, without autograd")
PROBLEMS = {
    "rms_norm": (norm_problem, four(our_norm, norm_ref, liger_norm, "gradient over the upstream one")),
    "add_rms_norm": (add_norm_problem, four(our_add_norm, add_norm_ref, liger_add_norm)),
    "rope": (rope_problem, [*four(turning(rope), turning(rope_ref), liger_rope, "in place"), IN_PLACE]),
    "swiglu": (glu_problem(gated(swiglu_ref)), glu_providers(swiglu, gated(swiglu_ref), liger_gated("swiglu"))),
    "geglu": (glu_problem(gated(geglu_ref)), glu_providers(geglu, gated(geglu_ref), liger_gated("geglu"))),
}
