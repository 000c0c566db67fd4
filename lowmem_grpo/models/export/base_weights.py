"""The frozen weights that are merged with an adapter, read one tensor at a time, by rows.

`stored_weights` reads a checkpoint's safetensors files without loading the model. A weight that the run held in 4 bit
or in FP8 is first quantized like in the loader, because the adapter was trained on the quantized values.
`live_weights` reads a loaded model, in any layout of its weights.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Params4bit
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AutoHfQuantizer

from lowmem_grpo.kernels.fp8 import fp8_quantize
from lowmem_grpo.kernels.frozen import FrozenStack, QuantizedWeight
from lowmem_grpo.kernels.nf4 import NF4Weight
from lowmem_grpo.memory.families import has_experts
from lowmem_grpo.memory.layer_forms import BITS_16, FP8_BLOCK, NF4
from lowmem_grpo.models.expert_loading import quantized_stack
from lowmem_grpo.models.experts import STACKS, expert_stacks
from lowmem_grpo.models.fp8_layers import BLOCK, OF_ACTIVATIONS, fp8_linears, scale_of
from lowmem_grpo.models.fp8_layers import stored_weight as stored_weight_in_fp8
from lowmem_grpo.models.pretrained import nf4
from lowmem_grpo.models.stored_model import block_of, quantization_of
from lowmem_grpo.models.text_backbone import text_name
from lowmem_grpo.runs.adapter_file import PREFIX

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PARTS = ".weight."  # a 4-bit weight has `q_proj.weight.absmax` beside `q_proj.weight`
STATE = ".quant_state.bitsandbytes__"
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
            "BOOL": torch.bool}  # safetensors' names; all other dtypes are floating point
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
BLOCK_ROWS = 64  # multiples of this many rows, of any width, end at an NF4 block's end
Rows = Callable[[int, int], Tensor]  # (start, stop) -> (stop - start, ...)


@dataclass(frozen=True)
class Weight:
    """A tensor of a model. `open` returns a reader of its rows, which keeps no other tensor in memory."""

    name: str  # as in a checkpoint
    shape: tuple[int, ...]
    dtype: torch.dtype
    open: Callable[[], Rows]
    step: int = 1  # a reader can only start at multiples of this many rows

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


def quantized_rows(weight: QuantizedWeight) -> Rows:
    """Return a reader that dequantizes rows of 4-bit or FP8 weights to float32."""
    def rows(start: int, stop: int) -> Tensor:
        band = torch.empty(stop - start, weight.shape[1], device=weight.device)
        weight.fill(band, row=start)
        return band

    return rows


def plain_rows(tensor: Any, dtype: torch.dtype | None, device: torch.device | str) -> Rows:
    """Return a reader of a tensor or of a slice of a file, which casts floating-point values to `dtype` if given."""
    def rows(start: int, stop: int) -> Tensor:
        band: Tensor = (tensor[start:stop] if len(shape_of(tensor)) else tensor).to(device)
        return band.to(dtype) if dtype is not None and band.is_floating_point() else band

    return rows


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, or of a slice of a file."""
    return tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)


# A loaded model


def live_weights(model: Any) -> list[Weight]:
    """Return every parameter and saved buffer of a model, with or without PEFT. LoRA's are left out; tied ones appear
    once."""
    weights: list[Weight] = []
    in_fp8 = {id(layer.weight): layer for layer in fp8_linears(model)}
    stacks = {id(stack.weight): stack for stack in expert_stacks(model)}
    scales = {id(layer.weight_scale) for layer in in_fp8.values()}
    for name, tensor in (*model.named_parameters(), *saved_buffers(model)):
        if ".lora_" not in name and id(tensor) not in scales:
            plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
            layer, stack = in_fp8.get(id(tensor)), stacks.get(id(tensor))
            if stack is not None:
                weights += expert_weights(plain, stack.frozen)
            else:
                weights.append(live_weight(plain, tensor) if layer is None else quantized_weight(plain, layer.frozen))
    return weights


def expert_weights(name: str, stack: FrozenStack) -> Iterator[Weight]:
    """Yield the matrices of each expert of a stack, under their names in checkpoints."""
    path, kind, _ = name.rsplit(".", 2)
    for number in range(stack.experts):
        whole = stack.expert(number)
        size = whole.shape[0] // len(STACKS[kind])
        for place, part in enumerate(STACKS[kind]):
            rows, own = slice(place * size, (place + 1) * size), f"{path}.{number}.{part}.weight"
            yield (live_weight(own, whole[rows]) if isinstance(whole, Tensor) else
                   quantized_weight(own, whole.rows(rows.start, rows.stop)))


def live_weight(name: str, tensor: Any) -> Weight:
    """Return a parameter or buffer, plain or in NF4, as a `Weight`."""
    if getattr(tensor, "quant_state", None) is not None:
        return quantized_weight(name, NF4Weight.from_bitsandbytes(tensor))
    plain = tensor.detach()
    return Weight(name, tuple(plain.shape), plain.dtype, lambda: plain_rows(plain, None, plain.device))


def quantized_weight(name: str, weight: QuantizedWeight) -> Weight:
    return Weight(name, weight.shape, weight.dtype, lambda: quantized_rows(weight), weight.row_unit)


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, buffer) for the buffers that a checkpoint of the model contains."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


# A stored model


def stored_weights(folder: Path, config: Any, form: str, dtype: torch.dtype, device: torch.device | str = "cpu",
                   names: dict[str, str] | None = None) -> list[Weight]:
    """Return every tensor of a stored model, with its values after loading in `dtype`. For a multimodal checkpoint,
    these are the tensors of its text model, renamed by `names`.

    Linear layers of a checkpoint in 16 or 32 bits get the values that they have in this form (NF4, FP8, ...).
    """
    places = tensor_files(folder)
    whole = {name for name in places if name.partition(PARTS)[0] == name}
    in_4_bit = {name for name in whole if f"{name}.absmax" in places}
    in_fp8 = {name: scale for name in whole if name.endswith(".weight") and (scale := scale_of(name, places))}
    beside = {*in_fp8.values(), *(name for name in whole if in_fp8 and name.endswith(OF_ACTIVATIONS))}
    modules = set() if form == BITS_16 or in_4_bit or in_fp8 else linears_to_quantize(config, dtype)
    block, experts = block_of(quantization_of(config) or {}), StoredExperts(places, dtype, device)
    weights = []
    for name in sorted(whole - beside):
        plain = text_name(name, names or {})
        if plain is None:
            continue
        if name in in_4_bit:
            weight = stored_in_4bit(name, places, dtype, device)
        elif name in in_fp8:
            weight = stored_in_fp8(name, places[name], (in_fp8[name], places[in_fp8[name]]), block, dtype, device)
        elif form == NF4 and has_experts(config) and (parts := EXPERT.fullmatch(name)):
            weight = experts.weight(name, parts[1], int(parts[2]), parts[3])
        else:
            quantize = plain.endswith(".weight") and plain.rpartition(".")[0] in modules
            weight = stored_weight(name, places[name], form if quantize else BITS_16, dtype, device)
        weights.append(replace(weight, name=plain))
    return weights


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return {tensor: its file}. OSError if the folder lacks safetensors files; pickled weights are never opened."""
    if (folder / INDEX).is_file():
        names: dict[str, str] = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
        if missing := sorted({file for file in names.values() if not (folder / file).is_file()}):
            raise OSError(f"{folder} is not a whole model: {missing[0]} is missing")
        return {name: folder / file for name, file in names.items()}
    if not (folder / SINGLE).is_file():
        raise OSError(f"{folder} holds no {SINGLE} and no {INDEX}; weights in other formats are not read. Save the "
                      "model again with transformers' save_pretrained")
    with safe_open(folder / SINGLE, "pt") as file:
        return dict.fromkeys(file.keys(), folder / SINGLE)


def stored_weight(name: str, file: Path, form: str, dtype: torch.dtype, device: torch.device | str) -> Weight:
    """Return a tensor stored in 16 or 32 bits, with the values that it has when loaded in `form`."""
    part = file_slice(file, name)
    shape = shape_of(part)
    if form == BITS_16:
        kept = INTEGERS.get(part.get_dtype(), dtype)
        return Weight(name, shape, kept, lambda: plain_rows(file_slice(file, name), dtype, device))

    def read() -> Rows:
        tensor = file_slice(file, name)[:].to(device, dtype)
        if form != NF4:
            return quantized_rows(fp8_quantize(tensor, BLOCK if form == FP8_BLOCK else None))
        param: Any = Params4bit(tensor, requires_grad=False, quant_type="nf4", compress_statistics=True, blocksize=64)
        return quantized_rows(NF4Weight.from_bitsandbytes(param.to(device)))

    return Weight(name, shape, dtype, read, BLOCK_ROWS)


class StoredExperts:
    """The experts of a checkpoint in 16 or 32 bits, with the values that they have in NF4. Scales are quantized for all
    experts of a stack at once, so whole stacks are quantized; the last stacks, those of one layer, are cached."""

    def __init__(self, places: dict[str, Path], dtype: torch.dtype, device: torch.device | str) -> None:
        self.places, self.dtype, self.device = places, dtype, device
        self.stack = lru_cache(len(STACKS))(self.quantized)

    def weight(self, name: str, path: str, number: int, part: str) -> Weight:
        """Return one matrix of one expert; opening it quantizes its whole stack."""
        shape = shape_of(file_slice(self.places[name], name))
        kind = next(kind for kind, parts in STACKS.items() if part in parts)
        start = STACKS[kind].index(part) * shape[0]

        def read() -> Rows:
            whole = self.stack(path, kind).expert(number)
            assert isinstance(whole, NF4Weight)
            return quantized_rows(whole.rows(start, start + shape[0]))

        return Weight(name, shape, self.dtype, read, BLOCK_ROWS)

    def quantized(self, path: str, kind: str) -> FrozenStack:
        """Read the matrices of all experts of a stack and quantize them like the loader."""
        count = sum(f"{path}.{number}.{STACKS[kind][0]}.weight" in self.places for number in range(len(self.places)))
        names = [[f"{path}.{number}.{part}.weight" for number in range(count)] for part in STACKS[kind]]
        tensors = [[file_slice(self.places[name], name)[:].to(self.device, self.dtype) for name in part]
                   for part in names]
        return FrozenStack(NF4Weight.from_bitsandbytes(quantized_stack(tensors, count)), count)


def stored_in_4bit(name: str, places: dict[str, Path], dtype: torch.dtype, device: torch.device | str) -> Weight:
    """Return a tensor that bitsandbytes quantized to 4 bits, with its scales stored beside it."""
    parts = [other for other in places if other.startswith(f"{name}.")]
    state = next(part for part in parts if STATE in part)
    described = json.loads(bytes(file_slice(places[state], state)[:].tolist()))

    def read() -> Rows:
        stats = {part.removeprefix(f"{name}."): file_slice(places[part], part)[:] for part in parts}
        stats = {f"weight.{key}": value for key, value in stats.items()}
        param = Params4bit.from_prequantized(file_slice(places[name], name)[:], stats, device=device)
        param.quant_state.dtype = dtype
        return quantized_rows(NF4Weight.from_bitsandbytes(param))

    return Weight(name, tuple(described["shape"]), dtype, read, described["blocksize"])


def stored_in_fp8(name: str, file: Path, scale: tuple[str, Path], block: tuple[int, int] | None, dtype: torch.dtype,
                  device: torch.device | str) -> Weight:
    """Return a tensor stored in FP8; `scale` is the name and file of its scales."""
    shape = shape_of(file_slice(file, name))

    def read() -> Rows:
        codes, scales = (file_slice(place, part)[...].to(device) for part, place in ((name, file), scale))
        return quantized_rows(stored_weight_in_fp8(codes, scales, block or (1, shape[1]), dtype))

    return Weight(name, shape, dtype, read)


def file_slice(file: Path, name: str) -> Any:
    """Return a lazy slice of a file's tensor, read when it is indexed (a scalar is read at once); the file is mapped,
    not loaded."""
    opened = safe_open(file, "pt")
    part = opened.get_slice(name)
    return part if part.get_shape() else opened.get_tensor(name)


def linears_to_quantize(config: Any, dtype: torch.dtype) -> set[str]:
    """Return the paths of the modules that loading quantizes, to 4 bit or FP8, found on a model on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    AutoHfQuantizer.from_config(nf4(dtype)).preprocess_model(model, device_map=None)
    return {path for path, module in model.named_modules() if isinstance(getattr(module, "weight", None), Params4bit)}
