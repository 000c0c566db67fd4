"""Linear layers on an FP8 weight with a scale for each row, and dequantizing it: ours, our reference, dense.

`moved_bytes` counts codes, scales, x and the result once each.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.kernels.problems import (
    FWD,
    FWD_BWD,
    OURS,
    REFERENCE,
    Case,
    Problem,
    Provider,
    Results,
    from_forward,
    truth_of,
)
from lowmem_grpo.kernels.fp8 import FP8Weight, fp8_dequantize, fp8_dequantize_ref, fp8_quantize
from lowmem_grpo.kernels.frozen import frozen_linear


def random_weight(case: Case) -> FP8Weight:
    """A weight (O, I) whose entries are about as large as a trained layer's."""
    outputs, inputs = case.shape["O"], case.shape["I"]
    return fp8_quantize(case.randn(outputs, inputs, generator=case.generator()) / inputs**0.5)


def weight_bytes(weight: FP8Weight) -> int:
    """What must be read of it."""
    return weight.codes.nbytes + weight.scales.nbytes


def linear_problem(case: Case) -> Problem:
    """x (M, I) times the transpose of the weight (O, I)."""
    rows, outputs, inputs = (case.shape[name] for name in "MOI")
    weight, generator = random_weight(case), case.generator()
    x, grad = (case.randn(rows, size, generator=generator) for size in (inputs, outputs))
    given = {"dense": fp8_dequantize_ref(replace(weight, dtype=torch.float64))}
    leaves, upstream = {"x": x}, {"out": grad}
    once, product = weight_bytes(weight) + x.nbytes + grad.nbytes, 2 * rows * outputs * inputs
    return Problem(
        case, leaves, {"weight": weight, "dense": given["dense"].to(x.dtype)}, upstream,
        lambda: truth_of(dense, leaves, given, upstream), {FWD: once, FWD_BWD: 2 * once},
        {FWD: product, FWD_BWD: 2 * product},
    )


def dequantize_problem(case: Case) -> Problem:
    """The weight (O, I) in the dtype of the case."""
    weight = random_weight(case)
    size = case.torch_dtype.itemsize * case.shape["O"] * case.shape["I"]
    return Problem(case, {}, {"weight": weight}, {}, lambda: {
        "values": fp8_dequantize_ref(replace(weight, dtype=torch.float64))
    }, {FWD: weight_bytes(weight) + size})


def ours(x: Tensor, weight: FP8Weight, **_: Any) -> Results:
    return {"out": frozen_linear(x, weight)}


def reference(x: Tensor, weight: FP8Weight, **_: Any) -> Results:
    return {"out": x @ fp8_dequantize_ref(weight).T}


def dense(x: Tensor, dense: Tensor, **_: Any) -> Results:
    return {"out": x @ dense.T}


def our_values(weight: FP8Weight) -> Results:
    return {"values": fp8_dequantize(weight)}


def reference_values(weight: FP8Weight) -> Results:
    return {"values": fp8_dequantize_ref(weight)}


LINEAR_PROVIDERS = [
    Provider(OURS, from_forward(ours), OURS),
    Provider(REFERENCE, from_forward(reference), OURS, "dequantize all, then a product"),
    Provider("dense", from_forward(dense), note="the product with a weight that was never quantized (cuBLAS)"),
]
VALUES_PROVIDERS = [
    Provider(OURS, from_forward(our_values), OURS), Provider(REFERENCE, from_forward(reference_values), OURS),
]
PROBLEMS = {"fp8_linear": (linear_problem, LINEAR_PROVIDERS), "fp8_dequantize": (dequantize_problem, VALUES_PROVIDERS)}
