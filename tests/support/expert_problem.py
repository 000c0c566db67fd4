"""Problems for routed_experts: random experts in NF4 and in plain numbers, rows, routes and gate values."""

from dataclasses import replace
from typing import Any

import torch
from nf4_problem import in_4_bit
from torch import Tensor

from lowmem_grpo.kernels.frozen_stack import FrozenStack
from lowmem_grpo.kernels.nf4 import NF4Weight


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def stack(
    experts: int, out: int, columns: int, kind: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> FrozenStack:
    """Random experts: kind "plain", "nf4" or "nested"."""
    weights = (random(experts, out, columns, seed=out) / columns**0.5).to(device, dtype)
    if kind == "plain":
        return FrozenStack.from_weights(weights)
    param = in_4_bit(weights.flatten(0, 1), double=kind == "nested", device=device)
    return FrozenStack(NF4Weight.from_bitsandbytes(param), experts)


def problem(
    rows: int, sizes: tuple[int, int, int, int], kind: str = "nested", dtype: torch.dtype = torch.float32,
    device: str = "cpu", idle: int = 0,
) -> dict[str, Any]:
    """Arguments of routed_experts for sizes (E, k, D, I), of which the last `idle` experts take no row."""
    experts, taken, size, inner = sizes
    scores = random(rows, experts - idle, seed=rows, device=device)
    values, ids = scores.softmax(-1).topk(taken, -1)
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "x": random(rows, size, seed=1, dtype=dtype, device=device).requires_grad_(), "ids": ids,
        "weights": (values / values.sum(-1, keepdim=True)).to(wide).requires_grad_(),
        "gate_up": stack(experts, 2 * inner, size, kind, dtype, device),
        "down": stack(experts, size, inner, kind, dtype, device),
    }


def wide(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same in float64, with the experts as their codes and scales define them."""
    return {name: in_float64(value) for name, value in arguments.items()}


def in_float64(value: Any) -> Any:
    if isinstance(value, FrozenStack):
        held = value.weight
        return replace(value, weight=held.double() if isinstance(held, Tensor) else replace(held, dtype=torch.float64))
    return value.detach().double().requires_grad_() if value.is_floating_point() else value


def outcome(function: Any, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The output, and the gradients of x and of the gate values."""
    y = function(**arguments)
    grad = random(*y.shape, seed=7, dtype=y.dtype, device=str(y.device))
    asked = {name: arguments[name] for name in ("x", "weights") if arguments[name].requires_grad}
    return {"y": y} | dict(zip(asked, torch.autograd.grad(y, list(asked.values()), grad), strict=True))
