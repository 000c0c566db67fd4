"""FP8 weights: random, in every kind of block, and with every code."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.fp8 import FP8Weight, fp8_quantize, scales_shape

KINDS = ("row", "tensor", "128", "ragged")


def block_of(kind: str, shape: tuple[int, int]) -> tuple[int, int]:
    """(h, w) of a kind of scales for a weight of this shape."""
    return {"row": (1, shape[1]), "tensor": shape, "128": (128, 128), "ragged": (7, 50)}[kind]


def in_fp8(shape: tuple[int, int], kind: str = "row", dtype: torch.dtype = torch.float32, device: str = "cpu"
           ) -> FP8Weight:
    """A random weight, quantized; the same for the same shape."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) / shape[1] ** 0.5
    return fp8_quantize(values.to(device, dtype), block_of(kind, shape))


def all_codes(block: tuple[int, int] = (1, 256), dtype: torch.dtype = torch.float32) -> FP8Weight:
    """(3, 256): each row has all 256 codes, and its own scales."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 1)
    scales = torch.rand(scales_shape((3, 256), block), generator=torch.Generator().manual_seed(1)) + 0.1
    return FP8Weight.of(codes, scales, block, dtype)


def joined(features: Sequence[int], columns: int, dtype: torch.dtype, kind: str = "row") -> FP8Weight:
    """Several random matrices in one weight."""
    whole = in_fp8((sum(features), columns), kind, dtype)
    return replace(whole, out_features=tuple(features))


def by_definition(weight: FP8Weight) -> Tensor:
    """Value times scale, one block at a time, in float64."""
    values, (height, width) = weight.codes.view(torch.float8_e4m3fn).double(), weight.block
    for i, row in enumerate(weight.scales.tolist()):
        for j, scale in enumerate(row):
            values[i * height : (i + 1) * height, j * width : (j + 1) * width] *= scale
    return values


def wide(arguments: dict[str, Any]) -> dict[str, Any]:
    """The FP8 weights among the arguments in float64, dequantized."""
    return {name: by_definition(value) if isinstance(value, FP8Weight) else value for name, value in arguments.items()}
