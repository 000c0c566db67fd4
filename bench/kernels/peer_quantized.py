"""Linear layers on a weight in NF4 (double quantization, blocks of 64) or FP8 (a scale for each row), and dequantizing
it: ours, our reference, dense, and bitsandbytes for NF4.

An NF4 weight has random codes and scales, so that no quantizer needs to be installed. `moved_bytes` counts codes,
scales, x and the result once each.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.kernels.problems import FWD, FWD_BWD, Case, Forward, Problem, Provider, pair, plain, truth_of
from lowmem_grpo.kernels.fp8 import FP8Weight, fp8_dequantize, fp8_dequantize_ref, fp8_quantize
from lowmem_grpo.kernels.frozen import frozen_linear
from lowmem_grpo.kernels.frozen_weight import FrozenWeight
from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize, nf4_dequantize_ref
from lowmem_grpo.kernels.nf4_linear import nf4_linear

BLOCK, NESTED_BLOCK = 64, 256
NF4 = (  # the code of 4-bit NormalFloat, QLoRA (arXiv 2305.14314), appendix E
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)


def random_nf4(case: Case) -> NF4Weight:
    """Return an NF4 weight (O, I) whose entries are about as large as a trained layer's."""
    outputs, inputs = case.shape["O"], case.shape["I"]
    generator, device = case.generator(), case.device
    blocks = outputs * inputs // BLOCK
    return NF4Weight(
        packed=torch.randint(256, (outputs * inputs // 2,), generator=generator, device=device, dtype=torch.uint8),
        absmax=torch.randint(256, (blocks,), generator=generator, device=device, dtype=torch.uint8),
        code=torch.tensor(NF4, device=device), shape=(outputs, inputs), blocksize=BLOCK, dtype=case.torch_dtype,
        out_features=(outputs,), nested_code=torch.linspace(-1, 1, 256, device=device),
        nested_absmax=torch.full((-(-blocks // NESTED_BLOCK),), 0.02, device=device),
        offset=torch.tensor(0.05, device=device), nested_blocksize=NESTED_BLOCK,
    )


def random_fp8(case: Case) -> FP8Weight:
    """Return an FP8 weight (O, I) whose entries are about as large as a trained layer's."""
    outputs, inputs = case.shape["O"], case.shape["I"]
    return fp8_quantize(case.randn(outputs, inputs, generator=case.generator()) / inputs**0.5)


@dataclass(frozen=True)
class Form:
    """The functions of a quantized format: make a weight, dequantize it (also in plain torch), multiply with it."""

    random: Callable[[Case], FrozenWeight]
    values: Callable[[Any], Tensor]
    reference: Callable[[Any], Tensor]
    linear: Callable[[Tensor, Any], Tensor]

    def exact(self, weight: FrozenWeight) -> Tensor:
        """Return the values (O, I) in float64."""
        return self.reference(replace(weight, dtype=torch.float64))

    def linear_problem(self, case: Case) -> Problem:
        """Return the problem of x (M, I) times the transpose of the weight (O, I)."""
        rows, outputs, inputs = (case.shape[name] for name in "MOI")
        weight, generator = self.random(case), case.generator()
        x, grad = (case.randn(rows, size, generator=generator) for size in (inputs, outputs))
        leaves, upstream, exact = {"x": x}, {"out": grad}, self.exact(weight)
        once, product = weight_bytes(weight) + x.nbytes + grad.nbytes, 2 * rows * outputs * inputs
        return Problem(
            case, leaves, {"weight": weight, "dense": exact.to(x.dtype)}, upstream,
            lambda: truth_of(dense, leaves, {"dense": exact}, upstream), {FWD: once, FWD_BWD: 2 * once},
            {FWD: product, FWD_BWD: 2 * product},
        )

    def dequantize_problem(self, case: Case) -> Problem:
        """Return the problem of dequantizing the weight (O, I) to the dtype of the case."""
        weight = self.random(case)
        size = case.torch_dtype.itemsize * case.shape["O"] * case.shape["I"]
        return Problem(case, {}, {"weight": weight}, {}, lambda: {"values": self.exact(weight)},
                       {FWD: weight_bytes(weight) + size})

    def problems(self, name: str, linear: list[Provider], values: list[Provider]) -> dict[str, Any]:
        """Return both problems with our providers, and with these providers of others."""
        return {f"{name}_linear": (self.linear_problem, [
            *pair(lambda x, weight, **_: {"out": self.linear(x, weight)},
                  lambda x, weight, **_: {"out": x @ self.reference(weight).T}, "dequantize all, then a product"),
            plain("dense", dense, "torch", "the product with a weight that was never quantized (cuBLAS)"), *linear,
        ]), f"{name}_dequantize": (self.dequantize_problem, [
            *pair(lambda weight: {"values": self.values(weight)}, lambda weight: {"values": self.reference(weight)}),
            *values,
        ])}


def weight_bytes(weight: FrozenWeight) -> int:
    """Return the bytes of the weight, all of which must be read."""
    return sum(part.nbytes for part in weight.tensors)


def dense(x: Tensor, dense: Tensor, **_: Any) -> dict[str, Tensor]:
    return {"out": x @ dense.T}


def packed_state(problem: Problem) -> tuple[Tensor, Any]:
    """Return the weight as bitsandbytes keeps it: packed codes, and their quantization state."""
    from bitsandbytes.functional import QuantState

    weight: NF4Weight = problem.given["weight"]
    nested = QuantState(weight.nested_absmax, code=weight.nested_code, blocksize=NESTED_BLOCK, dtype=torch.float32)
    state = QuantState(weight.absmax, shape=torch.Size(weight.shape), code=weight.code, blocksize=BLOCK,
                       quant_type="nf4", dtype=weight.dtype, offset=weight.offset, state2=nested)
    return weight.packed[:, None], state


def bnb_matmul(problem: Problem) -> Forward:
    """Return the function that bitsandbytes' layers call. Since 0.50 that is `gemm_4bit`. By a table of the chip it
    runs a fused dequantize-and-multiply kernel (always up to 4 rows; on an H200 up to 32 for 14,336 outputs and 7 for
    4,096), else it dequantizes and multiplies. A peak below the dense weight's bytes shows that the fused one ran."""
    import bitsandbytes

    packed, state = packed_state(problem)
    return lambda x, **_: {"out": bitsandbytes.matmul_4bit(x, packed, state)}


def bnb_dequantize_matmul(problem: Problem) -> Forward:
    """Return a dense product with the whole weight dequantized by bitsandbytes."""
    from bitsandbytes.functional import dequantize_4bit

    packed, state = packed_state(problem)
    return lambda x, **_: {"out": x @ dequantize_4bit(packed, state).T}


def bnb_gemv(problem: Problem) -> Forward:
    """Return bitsandbytes' product for one row; on the CPU it needs another layout."""
    from bitsandbytes.functional import gemv_4bit

    packed, state = packed_state(problem)
    return lambda x, **_: {"out": gemv_4bit(x, packed, state=state)}


def bnb_values(problem: Problem) -> Forward:
    from bitsandbytes.functional import dequantize_4bit

    packed, state = packed_state(problem)
    return lambda weight: {"values": dequantize_4bit(packed, state)}


PROBLEMS = Form(random_nf4, nf4_dequantize, nf4_dequantize_ref, nf4_linear).problems("nf4", [
    Provider("bnb_matmul_4bit", bnb_matmul, "bitsandbytes", "gemm_4bit: fused or not by its own table of the chip"),
    Provider("bnb_dequantize_matmul", bnb_dequantize_matmul, "bitsandbytes"),
    Provider("bnb_gemv_4bit", bnb_gemv, "bitsandbytes", needs=("card", "forward", "one row")),
], [Provider("bnb_dequantize_4bit", bnb_values, "bitsandbytes")])
PROBLEMS |= Form(random_fp8, fp8_dequantize, fp8_dequantize_ref, frozen_linear).problems("fp8", [], [])
