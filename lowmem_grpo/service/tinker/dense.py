"""Values in the bytes of a Tensor message."""

from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.service.tinker import wire

DTYPES = {wire.FLOAT32: torch.float32, wire.INT64: torch.int64, wire.INT32: torch.int32, wire.BFLOAT16: torch.bfloat16}


def whole_dtype(given: Any, where: str, dtype: torch.dtype) -> int:
    """The number of a Tensor message's dtype, which is to hold whole numbers or floats as `dtype` says."""
    if given.dtype not in DTYPES or DTYPES[given.dtype].is_floating_point != dtype.is_floating_point:
        raise ValueError(f"{where} has the dtype {given.dtype}; it must be "
                         + ("1 (float32) or 4 (bfloat16)" if dtype.is_floating_point else "2 (int64) or 3 (int32)"))
    return int(given.dtype)


def from_bytes(data: bytes, dtype: torch.dtype, where: str) -> Tensor:
    """The values (N,) of bytes, little-endian."""
    if len(data) % dtype.itemsize:
        raise ValueError(f"{where} has {len(data)} bytes; it must be a multiple of {dtype.itemsize}")
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def as_bytes(values: Tensor) -> bytes:
    """The bytes of values on the host, little-endian."""
    return values.contiguous().numpy().tobytes()
