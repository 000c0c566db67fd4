"""Write a merged model: LoRA's product is added in float32 and rounded once, to 16 bits.

Files are written shard by shard, so memory holds a shard of about a GiB and one tile of float32 rows. Everything is
read back and compared with W + s B A in float64: each value must be the nearest 16-bit number or, near a tie, the
neighbour on the other side. If W is itself a 16-bit number (unlike NF4 values), an update of less than half a unit in
the last place is lost, so the share of the update that is kept is measured.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lowmem_grpo.models.export.base_weights import Weight
from lowmem_grpo.models.stored_model import INDEX
from lowmem_grpo.runs.adapter_file import (
    PREFIX,
    SIDES,
    layers_of,
    rank_of,
    read_adapter,
    refuse_variants,
    scaling_of,
)
from lowmem_grpo.runs.expert_names import is_stack
from lowmem_grpo.runs.saved_adapter import AdapterError

SHARD_BYTES = 2**30
TILE_ELEMENTS = 2**23  # elements in a tile; 32 MiB in float32
OTHERWISE = 1e-3  # share of elements that float32 may round to the neighbouring value, near a tie


@dataclass(frozen=True)
class LoraPair:
    """The LoRA update of one weight (out, in): scaling * b @ a. Or that of a stack of E experts (E, in, out)."""

    a: Tensor  # (r, in); of a stack (E r, in), expert by expert
    b: Tensor  # (out, r); of a stack (out, r E), with each expert in every E-th column
    scaling: float
    experts: int = 0  # E; 0: the weight is no stack

    @property
    def shape(self) -> tuple[int, ...]:
        matrix = self.b.shape[0], self.a.shape[1]
        return (self.experts, *matrix[::-1]) if self.experts else matrix

    def rows(self, start: int, stop: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return rows `start` to `stop` of the update, (stop - start, in); of a stack, experts (stop - start, in, out).
        """
        if self.experts:
            a = self.a.unflatten(0, (self.experts, -1))[start:stop].to(device, dtype)
            b = self.b.unflatten(1, (-1, self.experts))[..., start:stop].to(device, dtype)
            return (a.mT @ b.permute(2, 1, 0)).mul_(self.scaling)
        b, a = self.b[start:stop].to(device, dtype), self.a.to(device, dtype)
        return (b @ a).mul_(self.scaling)


def read_pairs(folder: Path) -> dict[str, LoraPair]:
    """Return {module: LoRA pair} of a saved adapter. AdapterError if it is not plain, finite LoRA."""
    return pairs_of(*read_adapter(folder), folder)


def pairs_of(config: LoraConfig, tensors: dict[str, Tensor], folder: Path) -> dict[str, LoraPair]:
    """Return the same, of what was read from a folder."""
    refuse_variants(config, folder, "merged")
    pairs = {}
    for module, parts in sorted(layers_of(tensors).items()):
        a, b = (parts.pop(SIDES[side], None) for side in "AB")
        if a is None or b is None or a.ndim != 2 or b.ndim != 2 or parts:
            raise AdapterError(f"the adapter in {folder} has not just one lora_A and one lora_B matrix for {module}; "
                               "only LoRA on linear layers is merged")
        rank = rank_of(config, module)
        experts = len(a) // rank if is_stack(module) else 0
        if {len(a), b.shape[1]} != {rank * (experts or 1)}:
            raise AdapterError(f"the adapter in {folder} has rank {len(a)} and {b.shape[1]} in {module}, and "
                               f"adapter_config.json says r={rank}; one file is of another adapter")
        pairs[module.removeprefix(PREFIX)] = LoraPair(a, b, scaling_of(config, module), experts)
    return checked(pairs, str(folder))


def live_pairs(model: Any) -> dict[str, LoraPair]:
    """Return {module: active LoRA pair} of a PEFT model. AdapterError without any, or if one is merged or not plain."""
    pairs = {}
    for path, layer in model.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        name, special = path.removeprefix(PREFIX), list(layer.lora_embedding_A) or list(layer.lora_variant)
        active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
        if layer.merged or special or len(active) > 1 or any(layer.lora_bias[adapter] for adapter in active):
            raise AdapterError(f"{name} does not have one plain LoRA adapter that is not merged yet; unmerge it "
                               "(model.unmerge_adapter()), or choose one adapter (model.set_adapter)")
        if active:
            a, b = (factor[active[0]].weight.detach() for factor in (layer.lora_A, layer.lora_B))
            experts = getattr(layer.get_base_layer(), "experts", 0)
            pairs[name] = LoraPair(a, b, float(layer.scaling[active[0]]), experts)
    return checked(pairs, "the model")


def checked(pairs: dict[str, LoraPair], where: str) -> dict[str, LoraPair]:
    """Return the pairs. AdapterError if there are none, or a pair is not finite."""
    if not pairs:
        raise AdapterError(f"{where} has no LoRA layer: there is nothing to merge")
    for name, pair in pairs.items():
        if not (pair.a.isfinite().all() and pair.b.isfinite().all()):
            raise AdapterError(f"the adapter of {where} is not finite: {name} holds NaN or infinity. The run diverged; "
                               "take an older checkpoint")
    return pairs


class MergeError(RuntimeError):
    """A merged model could not be written, or is wrong; the message says where, and what to do."""


@dataclass
class MergeCheck:
    """The results of reading a merged model back."""

    tensors: int = 0
    merged: int = 0
    trained: int = 0  # with an adapter's own values
    worst_rounding: float = 0.0  # largest |error| in half units of the weight's last place: at most 1
    rounded_otherwise: float = 0.0  # largest share of a tensor's elements that float32 and float64 round differently
    gained: float = 0.0  # sum of (merged - W) * update
    norm: float = 0.0  # sum of update ** 2

    @property
    def kept(self) -> float:
        """The share of the adapter's update that is left in the merged weights after rounding to 16 bits."""
        return self.gained / self.norm if self.norm else 1.0


def write_merged(folder: Path, weights: list[Weight], pairs: dict[str, LoraPair], dtype: torch.dtype,
                 shard_bytes: int = SHARD_BYTES) -> int:
    """Write model*.safetensors and their index into `folder`; return the size of all tensors in bytes. MergeError if
    the base model lacks a layer of the adapter or has it in another shape, or if a merged weight is not finite."""
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
    """Return the tensor names of each file, in order. A tensor larger than a shard gets its own file."""
    return split_state_dict_into_shards_factory(
        {weight.name: weight for weight in weights}, get_storage_size=lambda weight: size_of(weight, dtype),
        filename_pattern="model{suffix}.safetensors", max_shard_size=shard_bytes,
    )


def pair_of(weight: Weight, pairs: dict[str, LoraPair]) -> LoraPair | None:
    return pairs.get(weight.name.removesuffix(".weight"))


def check_layers(weights: list[Weight], pairs: dict[str, LoraPair]) -> None:
    """Raise MergeError if a layer of the adapter is not in the model, or has another shape."""
    shapes = {weight.name.removesuffix(".weight"): weight.shape for weight in weights}
    for name, pair in pairs.items():
        if shapes.get(name) != pair.shape:
            own = f"{shapes[name]} in the base model" if name in shapes else "not in the base model"
            raise MergeError(f"the adapter's layer {name}, {pair.shape}, is {own}: the adapter was trained on another "
                             "model. Name the right one with --base")


def size_of(weight: Weight, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor in the written file."""
    return math.prod(weight.shape) * written_dtype(weight, dtype).itemsize


def written_dtype(weight: Weight, dtype: torch.dtype) -> torch.dtype:
    return dtype if weight.dtype.is_floating_point else weight.dtype


def tiles(weight: Weight) -> Iterator[tuple[int, int]]:
    """Return the (start, stop) of each tile: a range of rows that are merged together."""
    rows, width = weight.shape[0], max(1, math.prod(weight.shape[1:]))
    step = max(1, TILE_ELEMENTS // width // weight.step) * weight.step
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def merged_tensor(weight: Weight, pair: LoraPair | None, dtype: torch.dtype) -> Tensor:
    """Return the tensor to be written, in host memory. MergeError if it is not finite."""
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
    """Return a message that says why a merged tile is not finite, and what to do."""
    if not tile.isfinite().all():
        return f"{name} is not finite in the base model or with the adapter; use an older checkpoint"
    largest = tile.abs().max().item()
    return f"{name} reaches {largest:.4g}, too large for {dtype}; export in bfloat16 (--dtype bfloat16)"


# Reading back


def check_merged(folder: Path, files: dict[str, Path], weights: list[Weight], pairs: dict[str, LoraPair]) -> MergeCheck:
    """Compare the written files with base plus adapter, by rows. MergeError if they differ by more than rounding."""
    wanted = {weight.name for weight in weights}
    if files.keys() != wanted:
        odd = sorted(files.keys() ^ wanted)[0]
        raise MergeError(f"{folder} does not hold the model's tensors: {odd} is missing or unexpected")
    check = MergeCheck(len(weights))
    for weight in weights:
        with safe_open(files[weight.name], "pt") as file:
            if weight.shape:
                check_tensor(weight, file.get_slice(weight.name), pair_of(weight, pairs), check)
            else:  # a scalar cannot be sliced
                check_same(weight, weight.open()(0, 1), file.get_tensor(weight.name))
    return check


def check_tensor(weight: Weight, written: Any, pair: LoraPair | None, check: MergeCheck) -> None:
    """Compare one tensor and add the result to `check`. `written` is a slice of the file. MergeError if it differs."""
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
    check.trained += weight.trained
    check.rounded_otherwise = max(check.rounded_otherwise, otherwise / elements)
    if otherwise > max(4, OTHERWISE * elements):
        raise MergeError(f"{weight.name} was read back and is not base plus adapter, rounded: {otherwise:,} of "
                         f"{elements:,} elements are a unit off")


def check_same(weight: Weight, base: Tensor, read: Tensor) -> None:
    """Raise MergeError if a tensor without an update differs from the base model's, cast to the written dtype."""
    if not torch.equal(base.to(read.device, read.dtype), read):
        raise MergeError(f"{weight.name} was read back and is not what the base model has")


def check_rows(name: str, base: Tensor, read: Tensor, update: Tensor, check: MergeCheck) -> int:
    """Compare rows of a merged weight with their float64 values; return how many elements are not the nearest number.
    MergeError if an element is off by more than rounding."""
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
    """Return the largest error of `values` against `exact`, divided by the allowed error: half a unit in the last place
    of `dtype`, plus float32's error in a sum of numbers up to `summed`."""
    info = torch.finfo(dtype)
    half = info.eps / 2 * (1 + 1e-3) * values.abs() + info.smallest_normal * info.eps / 2 + 1e-6 * summed
    return ((values - exact).abs() / half).max().item()
