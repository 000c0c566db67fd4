"""The values of Tensor messages; `Cells`: several targets for a token, each with a weight, dense or sparse (CSR)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.service.tinker import wire

DTYPES = {wire.FLOAT32: torch.float32, wire.INT64: torch.int64, wire.INT32: torch.int32, wire.BFLOAT16: torch.bfloat16}
MOST_WIDTH = 128  # targets of a token


@dataclass(frozen=True)
class Cells:
    """The E cells of a (T, K) matrix that are not left out, row by row."""

    rows: Tensor  # (E,) int64, of T
    columns: Tensor  # (E,) int64, of K
    tokens: Tensor  # (E,) int64
    weights: Tensor  # (E,) float32
    length: int  # T
    width: int  # K

    def matrix(self, values: Tensor) -> Tensor:
        """Values (E,) in their places of (T, K); 0 where a cell was left out."""
        return values.new_zeros(self.length, self.width).index_put((self.rows, self.columns), values)


def is_wide(tensor: Any) -> bool:
    """Return whether a Tensor message has more than one value for a token, or is sparse."""
    return tensor.WhichOneof("kind") == "sparse_csr" or len(tensor.shape) > 1


def cells_of(targets: Any, weights: Any, where: str, length: int) -> Cells:
    """The targets and weights of a datum of `length` tokens. What both leave out is left out; what one of them leaves
    out is 0 there. ValueError names the field that is wrong."""
    names = [f"{where}['target_tokens']", f"{where}['weights']"]
    tokens = listed(targets, names[0], length, torch.int64)
    factors = listed(weights, names[1], length, torch.float32)
    if list(targets.shape) != list(weights.shape):
        raise ValueError(f"{names[1]} has the shape {list(weights.shape)}, and the targets {list(targets.shape)}; each "
                         "target needs one weight")
    width = int(targets.shape[1])
    cells = torch.cat([tokens[0], factors[0]]).unique()
    ids, numbers = (torch.zeros(len(cells), dtype=values.dtype).index_put((torch.searchsorted(cells, at),), values)
                    for at, values in (tokens, factors))
    return Cells(cells // width, cells % width, ids, numbers, length, width)


def listed(tensor: Any, where: str, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cells (E,) int64 in ascending order, their values (E,)) of a matrix of `length` rows, whose cell (t, k) is
    t * K + k."""
    shape = list(tensor.shape)
    if len(shape) != 2 or shape[0] != length or not 1 <= shape[1] <= MOST_WIDTH:
        raise ValueError(f"{where} has the shape {shape}; it must be [{length}, K], a row for each token of "
                         f"model_input, with at most {MOST_WIDTH} targets")
    sparse = tensor.WhichOneof("kind") == "sparse_csr"
    data = tensor.sparse_csr.values if sparse else tensor.dense
    values = values_of(tensor, data, where, dtype)
    cells = csr_cells(tensor.sparse_csr, where, shape) if sparse else torch.arange(math.prod(shape))
    if len(cells) != len(values):
        raise ValueError(f"{where} has {len(values)} values for {len(cells)} places; each needs one")
    return cells, values


def csr_cells(matrix: Any, where: str, shape: list[int]) -> Tensor:
    crow, columns = (from_bytes(getattr(matrix, name), torch.int64, f"{where}.{name}")
                     for name in ("crow_indices", "col_indices"))
    if len(crow) != shape[0] + 1 or crow[0] != 0 or crow[-1] != len(columns) or bool((crow.diff() < 0).any()):
        raise ValueError(f"{where}.crow_indices must be {shape[0] + 1} numbers that never fall, from 0 to the number "
                         f"of columns that are listed, {len(columns)}")
    rows = torch.repeat_interleave(torch.arange(shape[0]), crow.diff())
    cells = rows * shape[1] + columns
    if len(columns) and (bool(((columns < 0) | (columns >= shape[1])).any()) or bool((cells.diff() <= 0).any())):
        raise ValueError(f"{where}.col_indices must rise within a row, and be 0 to {shape[1] - 1}")
    return cells


def values_of(tensor: Any, data: bytes, where: str, dtype: torch.dtype) -> Tensor:
    """Return the values (N,) of a Tensor message in these bytes: whole numbers or finite floats, as `dtype` says."""
    floats = dtype.is_floating_point
    if tensor.dtype not in DTYPES or DTYPES[tensor.dtype].is_floating_point != floats:
        raise ValueError(f"{where} has the dtype {tensor.dtype}; it must be "
                         + ("1 (float32) or 4 (bfloat16)" if floats else "2 (int64) or 3 (int32)"))
    values = from_bytes(data, DTYPES[tensor.dtype], where)
    if floats and not bool(values.isfinite().all()):
        raise ValueError(f"{where} holds NaN or infinity; every value must be a finite number")
    return values.to(dtype)


def from_bytes(data: bytes, dtype: torch.dtype, where: str) -> Tensor:
    """Return the values (N,) of bytes, little-endian."""
    if len(data) % dtype.itemsize:
        raise ValueError(f"{where} has {len(data)} bytes; it must be a multiple of {dtype.itemsize}")
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def as_bytes(values: Tensor) -> bytes:
    return values.contiguous().numpy().tobytes()
