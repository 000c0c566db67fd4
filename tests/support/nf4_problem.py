"""Problems for nf4_linear: random quantized weights and adapters, in any dtype and in float64."""

from typing import Any

import bitsandbytes as bnb
import torch
from accuracy import ROUNDING, assert_each_as_accurate, in_float64, outcome
from torch import Tensor

from lowmem_grpo.kernels.nf4 import NF4Weight
from lowmem_grpo.kernels.nf4_linear import nf4_linear, nf4_linear_ref

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ONE, THREE, ODD = ((70,), 192), ((128, 64, 33), 256), ((37,), 75)  # (out of each matrix, in); ODD: blocks span rows
GRADIENTS = ("x", "lora_a", "lora_b", "bias")


def in_4_bit(values: Tensor, double: bool = False, device: str = "cpu", quant_type: str = "nf4", **options: Any) -> Any:
    """A weight as bitsandbytes quantizes it."""
    return bnb.nn.Params4bit(
        values.detach(), requires_grad=False, quant_type=quant_type, compress_statistics=double, **options
    ).to(device)


def quantized(rows: int, columns: int, dtype: torch.dtype, double: bool = False, device: str = "cpu") -> Any:
    """A random weight of one matrix."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) / columns**0.5
    return in_4_bit(values.to(dtype), double, device)


def problem(
    rows: int, size: tuple[tuple[int, ...], int], dtype: torch.dtype, double: bool = False, rank: int = 5,
    lora_dtype: torch.dtype | None = None, device: str = "cpu",
) -> dict[str, Any]:
    """Arguments of nf4_linear, of which all but the weight ask for a gradient."""
    features, columns = size
    params = [quantized(part, columns, dtype, double, device) for part in features]
    weight = NF4Weight.adjacent(params) if len(params) > 1 else NF4Weight.from_bitsandbytes(params[0])
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    lora = lora_dtype or dtype
    return {
        "x": random(rows, columns), "weight": weight, "lora_a": random(rank * len(features), columns, dtype=lora),
        "lora_b": random(sum(features), rank, dtype=lora), "scale": 0.3, "bias": random(sum(features)),
    }


def assert_all_as_accurate(arguments: dict[str, Any]) -> None:
    """nf4_linear against the reference in the same dtype, and float64."""
    plain, truth = outcome(nf4_linear_ref, arguments), outcome(nf4_linear_ref, in_float64(arguments))
    assert_each_as_accurate(outcome(nf4_linear, arguments), plain, truth, ROUNDING[arguments["x"].dtype])
