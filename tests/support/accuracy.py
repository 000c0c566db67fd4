"""The accuracy rule of every kernel, and running Triton code in its interpreter."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from card import HALVES, gpu
from torch import Tensor

from lowmem_grpo.kernels.frozen import FrozenStack
from lowmem_grpo.kernels.frozen_weight import PlainWeight
from lowmem_grpo.kernels.lora import LoRA
from lowmem_grpo.kernels.mxfp4 import MXFP4Weight
from lowmem_grpo.kernels.nf4 import NF4Weight

# tests/conftest.py turns the interpreter on where there is no card. It computes bfloat16 wrongly: float32 only.
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for the card here")
OPERATIONS = ("glu", "rms_norm", "rope", "packed_to_padded", "lora_up", "thin_products")  # the modules of `in_triton`
# Where a kernel's rounding to 16 bits is seen: float16 in the interpreter, both on a card.
IN_16_BITS = [pytest.param("cpu", torch.float16, marks=interpreted),
              *(pytest.param("cuda", dtype, marks=gpu) for dtype in HALVES)]
# What one rounding changes of the largest value; of float32, a sum in another order.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@contextmanager
def in_triton() -> Iterator[None]:
    """Inside, operations of ours launch their Triton kernels for CPU tensors too, which the interpreter runs."""
    with pytest.MonkeyPatch.context() as patch:
        for module in map(import_module, ("lowmem_grpo.kernels." + name for name in OPERATIONS)):
            for launcher in [name for name in vars(module) if name.endswith("_triton")]:
                name = launcher.removesuffix("_triton")
                patch.setattr(module, f"{name}_op" if hasattr(module, f"{name}_op") else name, vars(module)[launcher])
        yield


def in_float64(value: Any) -> Any:
    """The same in float64: a tensor, LoRA, frozen weights, or a dict of them; what holds no floating numbers stays."""
    if isinstance(value, dict):
        return {name: in_float64(one) for name, one in value.items()}
    if isinstance(value, LoRA):
        return LoRA(in_float64(value.a), in_float64(value.b), value.scale)
    if isinstance(value, (NF4Weight, MXFP4Weight)):  # as its codes and scales define it
        return replace(value, dtype=torch.float64)
    if isinstance(value, PlainWeight):
        return PlainWeight(value.tensor.double())
    if isinstance(value, FrozenStack):
        return replace(value, weight=in_float64(value.weight))
    if not torch.is_tensor(value) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def outcome(
    function: Any, arguments: dict[str, Any], drawn: torch.dtype = torch.float32, **options: Any
) -> dict[str, Tensor]:
    """The output (several side by side), and the gradient of everything in the arguments that asks for one.

    The gradient of the output is drawn in the dtype `drawn`.
    """
    asked = {part: leaf for name, value in arguments.items() for part, leaf in leaves(name, value).items()}
    y = function(**arguments, **options)
    y = torch.cat(y, -1) if isinstance(y, tuple) else y
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=drawn).to(y)
    grads = dict(zip(asked, torch.autograd.grad(y, list(asked.values()), grad), strict=True))
    assert all(grads[name].dtype == leaf.dtype for name, leaf in asked.items())
    return {"y": y} | grads


def leaves(name: str, value: Any) -> dict[str, Tensor]:
    """The tensors of an argument that ask for a gradient, by their names."""
    if isinstance(value, list):
        each = [leaves(f"{name}.{number}", one) for number, one in enumerate(value)]
        return {part: leaf for some in each for part, leaf in some.items()}
    if isinstance(value, LoRA):
        return {f"{name}.a": value.a, f"{name}.b": value.b}
    return {name: value} if torch.is_tensor(value) and value.requires_grad else {}


def assert_each_as_accurate(
    ours: dict[str, Tensor], reference: dict[str, Tensor], truth: dict[str, Tensor], epsilon: float, of: str = ""
) -> None:
    """The accuracy rule for all tensors of an outcome, which have the dtypes of the reference."""
    assert ours.keys() == truth.keys()
    for name, exact in truth.items():
        assert ours[name].dtype == reference[name].dtype, f"{name} {of}"
        assert_as_accurate(f"{name} {of}", ours[name], reference[name], exact.detach(), epsilon)


def assert_as_accurate(name: str, ours: Tensor, reference: Tensor, truth: Tensor, epsilon: float) -> None:
    """Our largest error against float64 `truth` is at most the reference's, plus `epsilon` of the largest value."""
    assert ours.shape == truth.shape, f"{name}: got shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    if truth.numel() == 0:
        return
    error, allowed = (values.detach().double() - truth for values in (ours, reference))
    limit = allowed.abs().max() + epsilon * truth.abs().max()
    assert error.abs().max() <= limit, f"{name}: error {error.abs().max():.3e}, allowed {limit:.3e}"
