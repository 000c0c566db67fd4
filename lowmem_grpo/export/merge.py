"""Writes a merged model: LoRA's product is added in float32 and rounded once, to 16 bits.

The files are written shard by shard. For a model of any size, memory holds only a shard of about a GiB and one tile of
float32 rows. Everything is read back and compared with W + s B A in float64. Each value must be off by at most half a
unit of its last place, and equal the rounded one; only near a tie float32 may round the other way.

If W lies anywhere between two 16-bit numbers, as values of NF4 do, rounding keeps an update on average. If W is a
16-bit number itself, an update of less than half a unit is lost. The kept share is measured and reported.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lowmem_grpo.export.base_weights import INDEX, Weight
from lowmem_grpo.export.lora_pairs import LoraPair

SHARD_BYTES = 2**30
TILE_ELEMENTS = 2**23  # in a tile; 32 MiB in float32
OTHERWISE = 1e-3  # share of elements that float32 may round to the neighbouring value, near a tie


class MergeError(RuntimeError):
    """A merged model cannot be made, or is wrong; the message says where, and what to do."""


@dataclass
class MergeCheck:
    """The results of reading a merged model back."""

    tensors: int = 0
    merged: int = 0
    worst_rounding: float = 0.0  # largest |error| in half units of the weight's own last place: at most 1
    rounded_otherwise: float = 0.0  # largest share of a tensor's elements that float32 and float64 round differently
    gained: float = 0.0  # sum of (merged - W) * update
    norm: float = 0.0  # sum of update ** 2

    @property
    def kept(self) -> float:
        """The part of the adapter's update that rounding to 16 bits leaves in the merged weights."""
        return self.gained / self.norm if self.norm else 1.0


def write_merged(
    folder: Path, weights: list[Weight], pairs: dict[str, LoraPair], dtype: torch.dtype, shard_bytes: int = SHARD_BYTES
) -> int:
    """Write model*.safetensors and their index into `folder`; returns the bytes of all tensors.

    MergeError if a layer of the adapter has no weight, or if a weight overflows.
    """
    check_layers(weights, pairs)
    own, split = {weight.name: weight for weight in weights}, split_of(weights, dtype, shard_bytes)
    for file, names in split.filename_to_tensors.items():
        tensors = {name: merged_tensor(own[name], pair_of(own[name], pairs), dtype) for name in names}
        save_file(tensors, folder / file, {"format": "pt"})
        del tensors
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=1), "utf-8")
    return int(split.metadata["total_size"])


def split_of(weights: list[Weight], dtype: torch.dtype, shard_bytes: int) -> StateDictSplit:
    """Return the names of the tensors of each file, in order. A tensor that is larger than a shard gets its own."""
    return split_state_dict_into_shards_factory(
        {weight.name: weight for weight in weights}, get_storage_size=lambda weight: size_of(weight, dtype),
        filename_pattern="model{suffix}.safetensors", max_shard_size=shard_bytes,
    )


def pair_of(weight: Weight, pairs: dict[str, LoraPair]) -> LoraPair | None:
    """Return what is added to a tensor; None for a bias."""
    return pairs.get(weight.module) if weight.name.endswith(".weight") else None


def check_layers(weights: list[Weight], pairs: dict[str, LoraPair]) -> None:
    """MergeError if a layer of the adapter is not in the model, or has another shape."""
    shapes = {weight.module: weight.shape for weight in weights if weight.name.endswith(".weight")}
    for name, pair in pairs.items():
        wanted = (pair.b.shape[0], pair.a.shape[1])
        if shapes.get(name) != wanted:
            own = f"{shapes[name]} in the base model" if name in shapes else "not in the base model"
            raise MergeError(f"the adapter's layer {name}, {wanted}, is {own}: the adapter was trained on another "
                             "model. Name the right one with --base")


def size_of(weight: Weight, dtype: torch.dtype) -> int:
    """Bytes of a tensor as it will be written."""
    return math.prod(weight.shape) * written_dtype(weight, dtype).itemsize


def written_dtype(weight: Weight, dtype: torch.dtype) -> torch.dtype:
    """The dtype in the file: `dtype` for floating point, a weight's own for everything else."""
    return dtype if weight.dtype.is_floating_point else weight.dtype


def tiles(weight: Weight) -> Iterator[tuple[int, int]]:
    """Row ranges of about TILE_ELEMENTS."""
    rows, width = weight.shape[0], max(1, math.prod(weight.shape[1:]))
    step = max(1, TILE_ELEMENTS // width // weight.step) * weight.step
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def merged_tensor(weight: Weight, pair: LoraPair | None, dtype: torch.dtype) -> Tensor:
    """The tensor to be written, in host memory. MergeError if it is not finite."""
    rows = weight.open()
    if not weight.shape:
        return rows(0, 1).to("cpu", written_dtype(weight, dtype))
    out = torch.empty(weight.shape, dtype=written_dtype(weight, dtype))
    for start, stop in tiles(weight):
        tile = rows(start, stop)
        if pair is not None:
            tile = tile.float() + pair.rows(start, stop, tile.device)
        out[start:stop] = tile
        if out.is_floating_point() and not out[start:stop].isfinite().all():
            raise MergeError(overflow(weight.name, tile, dtype))
    return out


def overflow(name: str, tile: Tensor, dtype: torch.dtype) -> str:
    """Why a weight is not finite."""
    if not tile.isfinite().all():
        return f"{name} is not finite in the base model or with the adapter; use an older checkpoint"
    largest = tile.abs().max().item()
    return f"{name} reaches {largest:.4g}, too large for {dtype}; export in bfloat16 (--dtype bfloat16)"


# reading back


def check_merged(folder: Path, files: dict[str, Path], weights: list[Weight], pairs: dict[str, LoraPair]) -> MergeCheck:
    """Compare the written files with base and adapter, by rows. MergeError if they differ by more than rounding."""
    wanted = {weight.name for weight in weights}
    if files.keys() != wanted:
        odd = sorted(files.keys() ^ wanted)[0]
        raise MergeError(f"{folder} does not hold the model's tensors: {odd} is missing or too many")
    check = MergeCheck(len(weights))
    for weight in weights:
        with safe_open(files[weight.name], "pt") as file:
            if weight.shape:
                check_tensor(weight, file.get_slice(weight.name), pair_of(weight, pairs), check)
            else:  # a slice needs a dimension
                check_same(weight, weight.open()(0, 1), file.get_tensor(weight.name))
    return check


def check_tensor(weight: Weight, written: Any, pair: LoraPair | None, check: MergeCheck) -> None:
    """Compare one tensor, and add the result to `check`. `written` is a slice of the file."""
    rows, otherwise, elements = weight.open(), 0, max(1, math.prod(weight.shape))
    for start, stop in tiles(weight):
        base, read = rows(start, stop), written[start:stop]
        read = read.to(base.device)
        if pair is None:
            check_same(weight, base, read)
        else:
            update = pair.rows(start, stop, base.device, torch.float64)
            otherwise += check_rows(weight.name, base, read, update, check)
    check.merged += pair is not None
    check.rounded_otherwise = max(check.rounded_otherwise, otherwise / elements)
    if otherwise > max(4, OTHERWISE * elements):
        raise MergeError(f"{weight.name} was read back and is not base plus adapter, rounded: {otherwise:,} of "
                         f"{elements:,} elements are a unit off")


def check_same(weight: Weight, base: Tensor, read: Tensor) -> None:
    """MergeError if a tensor to which nothing is added is not the base's, in the dtype that was written."""
    if not torch.equal(base.to(read.device, read.dtype), read):
        raise MergeError(f"{weight.name} was read back and is not what the base model has")


def check_rows(name: str, base: Tensor, read: Tensor, update: Tensor, check: MergeCheck) -> int:
    """Compare rows of a merged weight in float64. Returns how many elements were rounded the other way."""
    base, values = base.double(), read.double()
    exact = base + update
    worst = worst_rounding(exact, values, read.dtype, base.abs().amax().item())
    if not worst <= 1:  # also NaN
        raise MergeError(f"{name} was read back and is not base plus adapter: off by {worst:.3g} half units")
    check.worst_rounding = max(check.worst_rounding, worst)
    check.gained += ((values - base) * update).sum().item()
    check.norm += update.square().sum().item()
    return int((read != exact.to(read.dtype)).sum())


def worst_rounding(exact: Tensor, values: Tensor, dtype: torch.dtype, summed: float) -> float:
    """Largest error of `values`, in half units of their last place; `summed` is the largest |W|."""
    info = torch.finfo(dtype)
    half = info.eps / 2 * (1 + 1e-3) * values.abs() + info.smallest_normal * info.eps / 2 + 1e-6 * summed
    return ((values - exact).abs() / half).max().item()
