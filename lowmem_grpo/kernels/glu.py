"""Gated linear units: h = act(gate) * up, forward and backward each in one pass over the memory.

    swiglu           act(g) = g * sigmoid(g)                                                 LlamaMLP, Qwen3MLP, Phi3MLP
    geglu            act(g) = g * (1 + tanh u) / 2,  u = sqrt(2 / pi) (g + 0.044715 g^3)     Gemma3MLP
    geglu, "none"    act(g) = g * (1 + erf(g / sqrt 2)) / 2
    ClampedSwiGLU    clamped_swiglu.py                                                       GptOssExperts
    backward         grad_gate = grad * up * act'(gate);  grad_up = grad * act(gate)

gate, up and h are (N, F) here, (..., F) for callers (Shazeer, arXiv 2002.05202). As in transformers the activation is
rounded to the dtype before the product. Only gate and up are kept; backward computes the activation again.
`ClampedSwiGLU` reads gate and up from alternating columns, and has no autograd function: `routed_experts` calls it.
"""

from itertools import product
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.clamped_swiglu import CLAMPED, ClampedSwiGLU
from lowmem_grpo.kernels.custom_op import check_tensors, custom_op, once_differentiable
from lowmem_grpo.kernels.triton_utils import Launch, Variant, tl, triton, types_of

APPROXIMATE = {"silu": "", "gelu_tanh": "tanh", "gelu": "none"}  # by activation: torch's name of its approximation
Activation = str | ClampedSwiGLU


def swiglu_ref(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Compute `swiglu` in plain torch."""
    gate, up = halves(gate, up)
    return activate_ref(gate, "silu") * up


def geglu_ref(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    """Compute `geglu` in plain torch."""
    gate, up = halves(gate, up)
    return activate_ref(gate, gelu_name(approximate)) * up


def activate_ref(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate=APPROXIMATE[activation])


def gradients_ref(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return (grad_gate, grad_up, h); grad_gate is rounded once."""
    if activation not in APPROXIMATE:
        return ClampedSwiGLU.from_text(activation).gradients(grad, gate, up)
    activated = activate_ref(gate, activation)
    wide = torch.promote_types(gate.dtype, torch.float32)
    grad_activated = grad.to(wide) * up.to(wide)
    if activation == "silu":
        grad_gate = torch.ops.aten.silu_backward(grad_activated, gate.to(wide))
    else:
        grad_gate = torch.ops.aten.gelu_backward(grad_activated, gate.to(wide), approximate=APPROXIMATE[activation])
    return grad_gate.to(gate.dtype), grad * activated, activated * up


def launch_rule(columns: int) -> Launch:
    """Return a launch of 1,024 entries per program. No two threads share an entry, so writing in place is safe."""
    block = 1024 if columns > 256 else 256 if columns > 64 else 64
    return Launch({"BLOCK_N": 1024 // block, "BLOCK_F": block}, num_warps=4, num_stages=1)


@triton.jit
def tile(N, F, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr):
    """Return rows (BLOCK_N, 1), columns (1, BLOCK_F) and the mask of this program's tile."""
    blocks = tl.cdiv(F, BLOCK_F)
    program = tl.program_id(0)
    rows = (program // blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    columns = (program % blocks) * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    return rows, columns, (rows < N) & (columns < F)


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    """Return act(gate) and act'(gate) in float32."""
    if ACTIVATION == "clamped":
        share = tl.sigmoid(ALPHA * gate)
        slope = share * (1 + ALPHA * gate * (1 - share))
    elif ACTIVATION == "silu":
        share = tl.sigmoid(gate)
        slope = share * (1 + gate * (1 - share))
    elif ACTIVATION == "gelu_tanh":
        share = tl.sigmoid(1.5957691216057308 * gate * (1 + 0.044715 * gate * gate))
        slope = share * (1 + gate * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * gate * gate))
    else:
        share = 0.5 * (1 + tl.erf(0.7071067811865476 * gate))
        slope = share + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    return gate * share, slope


@triton.jit
def clamped(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """Return the values that a ClampedSwiGLU uses in place of gate and up; NaN stays NaN. Others use them unchanged."""
    if ACTIVATION == "clamped":
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1
    return gate, up


@triton.jit
def glu_fwd_kernel(
    gate_ptr, up_ptr, out_ptr, N, F, gate_stride, up_stride, out_stride, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, STEP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
):
    rows, columns, inside = tile(N, F, BLOCK_N, BLOCK_F)
    gate = tl.load(gate_ptr + rows * gate_stride + columns * STEP, mask=inside, other=0.0)
    up = tl.load(up_ptr + rows * up_stride + columns * STEP, mask=inside, other=0.0)
    used, factor = clamped(gate.to(tl.float32), up.to(tl.float32), ACTIVATION, LIMIT)
    activated, _ = activate(used, ACTIVATION, ALPHA)
    out = activated.to(gate.dtype).to(tl.float32) * factor
    tl.store(out_ptr + rows * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def glu_bwd_kernel(
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, product_ptr, N, F,
    grad_stride, gate_stride, up_stride, grad_gate_stride, grad_up_stride, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, STEP: tl.constexpr, HAS_PRODUCT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    rows, columns, inside = tile(N, F, BLOCK_N, BLOCK_F)
    grad = tl.load(grad_ptr + rows * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + rows * gate_stride + columns * STEP, mask=inside, other=0.0)
    up = tl.load(up_ptr + rows * up_stride + columns * STEP, mask=inside, other=0.0).to(tl.float32)
    used, factor = clamped(gate.to(tl.float32), up, ACTIVATION, LIMIT)
    activated, slope = activate(used, ACTIVATION, ALPHA)
    activated = activated.to(gate.dtype).to(tl.float32)
    kind: tl.constexpr = grad_gate_ptr.dtype.element_ty
    grad_gate, grad_up = grad * factor * slope, grad * activated
    if ACTIVATION == "clamped":
        grad_gate = tl.where(gate.to(tl.float32) <= LIMIT, grad_gate, 0.0)
        grad_up = tl.where(tl.abs(up) <= LIMIT, grad_up, 0.0)
    tl.store(grad_gate_ptr + rows * grad_gate_stride + columns * STEP, grad_gate.to(kind), mask=inside)
    tl.store(grad_up_ptr + rows * grad_up_stride + columns * STEP, grad_up.to(kind), mask=inside)
    if HAS_PRODUCT:
        tl.store(product_ptr + rows * grad_stride + columns, (activated * factor).to(kind), mask=inside)


def launch_bwd(
    grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor, activation: str, product: bool
) -> None:
    """Write grad_gate and grad_up, possibly over gate and up. With `product`, write act(gate) * up over `grad`."""
    rows, columns = gate.shape
    launch = launch_rule(columns)
    glu_bwd_kernel[grid(rows, columns, launch)](
        grad, gate, up, grad_gate, grad_up, grad, rows, columns, grad.stride(0), gate.stride(0), up.stride(0),
        grad_gate.stride(0), grad_up.stride(0), HAS_PRODUCT=product, **compiled_for(activation),
        **launch.options,
    )


def compiled_for(activation: str) -> dict[str, Any]:
    """Return an activation's compile-time values; STEP is how far apart the columns of gate, and of up, lie."""
    if activation in APPROXIMATE:
        return {"ACTIVATION": activation, "ALPHA": 0.0, "LIMIT": 0.0, "STEP": 1}
    clamp = ClampedSwiGLU.from_text(activation)
    return {"ACTIVATION": CLAMPED, "ALPHA": clamp.alpha, "LIMIT": clamp.limit, "STEP": 2}


def grid(rows: int, columns: int, launch: Launch) -> tuple[int]:
    return (-(-rows // launch.constexprs["BLOCK_N"]) * -(-columns // launch.constexprs["BLOCK_F"]),)


def new_gradients(gate: Tensor, fused: bool) -> list[Tensor]:
    """Return uninitialised [grad_gate, grad_up], (N, F) each, or with `fused` one [grad_gate_up] (N, 2 F)."""
    return [gate.new_empty(len(gate), 2 * gate.shape[1])] if fused else [gate.new_empty(gate.shape) for _ in range(2)]


def glu_fwd_triton(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return h (N, F)."""
    (rows, columns), compiled = gate.shape, compiled_for(activation)
    gate, up = (rows_of(part, compiled["STEP"]) for part in (gate, up))
    out = gate.new_empty(gate.shape)
    launch = launch_rule(columns)
    glu_fwd_kernel[grid(rows, columns, launch)](
        gate, up, out, rows, columns, gate.stride(0), up.stride(0), out.stride(0), **compiled,
        **launch.options,
    )
    return out


def glu_bwd_triton(grad: Tensor, gate: Tensor, up: Tensor, activation: str, fused: bool) -> list[Tensor]:
    gradients = new_gradients(gate, fused)
    launch_bwd(rows_of(grad), rows_of(gate), rows_of(up), *halves(*gradients), activation, product=False)
    return gradients


def glu_bwd_all_triton(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    launch_bwd(grad, gate, up, gate, up, activation, product=True)


def glu_fwd_cpu(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return h (N, F)."""
    if activation not in APPROXIMATE:
        activated, _, factor = ClampedSwiGLU.from_text(activation).parts(gate, up)
        return activated.mul_(factor).to(gate.dtype)
    return activate_ref(gate, activation).mul_(up).contiguous()  # in one buffer


def glu_bwd_cpu(grad: Tensor, gate: Tensor, up: Tensor, activation: str, fused: bool) -> list[Tensor]:
    gradients = new_gradients(gate, fused)
    for target, values in zip(halves(*gradients), gradients_ref(grad, gate, up, activation)[:2], strict=True):
        target.copy_(values)
    return gradients


def glu_bwd_all_cpu(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    for target, values in zip((gate, up, grad), gradients_ref(grad, gate, up, activation), strict=True):
        target.copy_(values)


glu_fwd = custom_op("glu_fwd", glu_fwd_cpu, glu_fwd_triton, fake=lambda gate, up, _: gate.new_empty(gate.shape))
glu_bwd = custom_op(
    "glu_bwd", glu_bwd_cpu, glu_bwd_triton, fake=lambda _grad, gate, _up, _name, fused: new_gradients(gate, fused)
)
glu_bwd_all = custom_op("glu_bwd_all", glu_bwd_all_cpu, glu_bwd_all_triton, mutates=("grad", "gate", "up"))


class GLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, activation):
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return glu_fwd(*halves(gate, up), activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        gradients = glu_bwd(grad, *halves(gate, up), ctx.activation, up is None)
        return gradients[0], None if up is None else gradients[1], None


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, from gate and up (..., F) of one shape, dtype and device. Without `up`, `gate` is a fused
    projection (..., 2 F), whose halves are gate and up."""
    return glu(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """Return gelu(gate) * up, with the tensors of `swiglu`. `approximate` is "tanh" or "none" (the error function)."""
    return glu(gate, up, gelu_name(approximate))


def glu(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    check_arguments(gate, up, activation)
    shape = gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)
    if 0 in shape:
        return activate_ref(halves(gate, up)[0], activation) * halves(gate, up)[1]
    return GLUFunction.apply(rows_of(gate), None if up is None else rows_of(up), activation).view(shape)


def glu_forward(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return h without autograd; gate, up (..., F); activation "silu", "gelu_tanh", "gelu" or a ClampedSwiGLU."""
    check_arguments(gate, up, activation)
    if not gate.numel():
        return gate.new_empty(gate.shape)
    step, text = (1, activation) if isinstance(activation, str) else (2, activation.text)
    return glu_fwd(rows_of(gate, step), rows_of(up, step), text).view(gate.shape)


def glu_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: Activation) -> None:
    """Write grad_gate over gate, grad_up over up and h over grad, all (..., F), in one pass without autograd. The
    down projection's weight gradient needs h."""
    check_arguments(gate, up, activation)
    check_arguments(gate, grad, activation)
    if gate.numel():
        step, text = (1, activation) if isinstance(activation, str) else (2, activation.text)
        rows = (rows_in_place(*one) for one in (("grad", grad, 1), ("gate", gate, step), ("up", up, step)))
        glu_bwd_all(*rows, text)


def halves(gate: Tensor, up: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (gate, up). Without `up`, they are the halves of the last dimension of `gate`."""
    if up is not None:
        return gate, up
    half = gate.shape[-1] // 2
    return gate[..., :half], gate[..., half:]


def rows_of(values: Tensor, step: int = 1) -> Tensor:
    """Return (..., F) as (N, F) with columns `step` apart: a view if the strides allow, else a copy."""
    rows = values.reshape(-1, values.shape[-1])
    return rows if rows.stride(1) == step else values.new_empty(len(rows), step * rows.shape[1])[:, ::step].copy_(rows)


def rows_in_place(name: str, values: Tensor, step: int = 1) -> Tensor:
    """Return (..., F) as a view (N, F) with columns `step` apart; ValueError if there is none."""
    columns = "adjacent columns" if step == 1 else "every second column"
    message = f"{name} is written in place and must be evenly spaced rows of {columns}; got {values.stride()}"
    try:
        rows = values.view(-1, values.shape[-1])
    except RuntimeError as error:
        raise ValueError(message) from error
    if rows.stride(1) != step or rows.stride(0) == 0:
        raise ValueError(message)
    return rows


def gelu_name(approximate: str) -> str:
    """Return "gelu_tanh" or "gelu", the activation for torch's `approximate`; ValueError for an unknown one."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f'approximate is {approximate!r}; it must be "tanh" or "none"')
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def check_arguments(gate: Tensor, up: Tensor | None, activation: Activation) -> None:
    """Raise ValueError, with the expected and the given shapes and dtypes, for an argument that does not fit."""
    check_activation(activation)
    check_tensors({"up": up}, gate=gate)
    if not gate.is_floating_point():
        raise ValueError(f"expected a floating dtype; got {gate.dtype}")
    if up is None:
        if gate.ndim == 0 or gate.shape[-1] % 2:
            raise ValueError(f"expected gate and up, or one tensor (..., 2 F); got one of shape {tuple(gate.shape)}")
        return
    if gate.ndim == 0 or gate.shape != up.shape:
        raise ValueError(f"expected two tensors of one shape (..., F); got {tuple(gate.shape)}, {tuple(up.shape)}")
    if gate.dtype != up.dtype or gate.device != up.device:
        raise ValueError(f"expected one dtype and one device; got {gate.dtype} on {gate.device}, {up.dtype} on "
                         f"{up.device}")


def check_activation(activation: Activation) -> None:
    if activation not in APPROXIMATE and not isinstance(activation, ClampedSwiGLU):
        raise ValueError(f"activation is {activation!r}; it must be one of {list(APPROXIMATE)}, or a ClampedSwiGLU "
                         "where gate and up lie in alternating columns")


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    """Return a variant of each kernel for each activation and tile, with and without the product."""
    cases: list[Variant] = []
    launches = launch_rule(64), launch_rule(256), launch_rule(1024)
    for activation, launch in product((*APPROXIMATE, ClampedSwiGLU().text), launches):
        chosen = compiled_for(activation)
        name = f"{chosen['ACTIVATION']} {launch.constexprs['BLOCK_F']}"
        cases.append(Variant(f"glu_fwd {name}", glu_fwd_kernel, types_of(glu_fwd_kernel, dtype), launch, chosen))
        cases += [Variant(f"glu_bwd {name}{' product' * wanted}", glu_bwd_kernel, types_of(glu_bwd_kernel, dtype),
                          launch, chosen | {"HAS_PRODUCT": wanted}) for wanted in (False, True)]
    return cases
