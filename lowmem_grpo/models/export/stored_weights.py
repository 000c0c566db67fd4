"""The frozen weights of a stored model, read one tensor at a time, by rows, without loading the model.

Weights that were in 4 bit or FP8 in training are first quantized as in the loader, because the adapter was trained on
the quantized values.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from bitsandbytes.nn import Params4bit
from safetensors import safe_open
from torch import Tensor
from transformers.quantizers.auto import AutoHfQuantizer

from lowmem_grpo.kernels.fp8 import fp8_quantize
from lowmem_grpo.kernels.frozen import FrozenStack
from lowmem_grpo.kernels.frozen_weight import FrozenWeight, frozen_weight
from lowmem_grpo.kernels.mxfp4 import BLOCK, MXFP4Weight
from lowmem_grpo.kernels.nf4 import NF4Weight
from lowmem_grpo.kernels.nvfp4 import NVFP4Weight
from lowmem_grpo.memory.families import STORED_VISION, has_experts, reads_images
from lowmem_grpo.memory.layer_forms import BITS_16, FP8_BLOCK, NF4
from lowmem_grpo.models.expert_loading import quantized_stack
from lowmem_grpo.models.experts import STACKS
from lowmem_grpo.models.export.base_weights import (
    Parts,
    Weight,
    parts_of,
    plain_rows,
    quantized_rows,
    stack_weight,
)
from lowmem_grpo.models.fp8_layers import BLOCK as FP8_SIZES
from lowmem_grpo.models.fp8_layers import OF_ACTIVATIONS, scale_of
from lowmem_grpo.models.fp8_layers import stored_weight as stored_weight_in_fp8
from lowmem_grpo.models.gguf_file import GGUFTensor, gguf_tensors
from lowmem_grpo.models.nvfp4_layers import PACKED, PARTS_IN_NVFP4
from lowmem_grpo.models.pretrained import attention_of, class_of, nf4
from lowmem_grpo.models.stored_model import INDEX, SINGLE, block_of, quantization_of, text_name, weight_files
from lowmem_grpo.runs.expert_names import is_stack
from lowmem_grpo.utils import is_gguf, read_json

PARTS = ".weight."  # a 4-bit weight has `q_proj.weight.absmax` beside `q_proj.weight`
STATE = ".quant_state.bitsandbytes__"
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
            "BOOL": torch.bool}  # safetensors' names; all other dtypes are floating point
CODES, SCALES = "_blocks", "_scales"  # ends of the names of the two tensors of experts in MXFP4
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
BLOCK_ROWS = 64  # multiples of this many rows, of any width, end at an NF4 block's end


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a stored model, and the dtype and the device in which they are read."""

    places: Mapping[str, Path | GGUFTensor]  # tensor: its file, or the tensor of a GGUF file
    dtype: torch.dtype
    device: torch.device | str

    def slice(self, name: str) -> Any:
        """Return a lazy slice of a tensor, read when it is indexed; the file is mapped, not loaded."""
        place = self.places[name]
        return place if isinstance(place, GGUFTensor) else safe_open(place, "pt").get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the device, in the dtype in which it is stored."""
        place = self.places[name]
        if isinstance(place, GGUFTensor):
            return cast(Tensor, place[...].to(self.device))
        with safe_open(place, "pt") as file:
            tensor: Tensor = file.get_tensor(name).to(self.device)
        return tensor

    def plain(self, name: str) -> Weight:
        """Return a tensor that loading does not quantize. Floating-point values are cast to `self.dtype`."""
        part = self.slice(name)
        read = self.slice if part.get_shape() else self.read  # a scalar has no slices
        return Weight(name, self.shape(name), INTEGERS.get(part.get_dtype(), self.dtype),
                      lambda: plain_rows(read(name), self.dtype, self.device))

    def quantized(self, name: str, shape: tuple[int, ...], step: int, read: Callable[[], FrozenWeight]) -> Weight:
        return Weight(name, shape, self.dtype, lambda: quantized_rows(read()), step)

    def to_quantize(self, name: str, form: str) -> Weight:
        """Return a tensor that the checkpoint stores in 16 or 32 bits, quantized to NF4 or FP8 as the loader does."""
        def read() -> FrozenWeight:
            tensor = self.read(name).to(self.dtype)
            if form != NF4:
                return fp8_quantize(tensor, FP8_SIZES if form == FP8_BLOCK else None)
            param: Any = Params4bit(tensor, requires_grad=False, quant_type="nf4", compress_statistics=True,
                                    blocksize=64)
            return NF4Weight.from_bitsandbytes(param.to(self.device))

        return self.quantized(name, self.shape(name), BLOCK_ROWS, read)

    def in_4bit(self, name: str) -> Weight:
        """Return a tensor that is stored in 4 bits, as bitsandbytes writes it, with its scales in tensors beside it."""
        parts = [other for other in self.places if other.startswith(f"{name}.")]
        state = next((part for part in parts if STATE in part), name)
        try:
            described = read_json(bytes(self.read(state).tolist()))
            shape, step = tuple(map(int, described["shape"])), int(described["blocksize"])
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(f"{self.places[state]}: {state} does not describe a weight in 4 bits ({error}); fetch the "
                             "model again") from None

        def read() -> FrozenWeight:
            stats = {f"weight.{part.removeprefix(f'{name}.')}": self.read(part) for part in parts}
            param = Params4bit.from_prequantized(self.read(name), stats, device=self.device)
            param.quant_state.dtype = self.dtype
            return NF4Weight.from_bitsandbytes(param)

        return self.quantized(name, shape, step, read)

    def in_fp8(self, name: str, scale: str, block: tuple[int, int] | None) -> Weight:
        """Return a tensor stored in FP8; `scale` is the name of its scales."""
        shape = self.shape(name)
        return self.quantized(name, shape, 1, lambda: stored_weight_in_fp8(
            self.read(name), self.read(scale), block or (1, shape[1]), self.dtype))

    def in_mxfp4(self, name: str) -> Weight:
        """Return a stack of experts that is stored in MXFP4, in blocks of codes (E, out, in / 32, 16) and their scales
        (E, out, in / 32)."""
        experts, out, blocks = self.shape(f"{name}{SCALES}")

        def part(start: int, stop: int) -> MXFP4Weight:
            codes, scales = (self.slice(f"{name}{each}")[start:stop].to(self.device) for each in (CODES, SCALES))
            try:
                return MXFP4Weight.from_codes(codes.flatten(0, 1), scales.flatten(0, 1), self.dtype)
            except ValueError as error:
                raise ValueError(f"{self.places[name + CODES]}: {name}: {error}. Fetch the model again") from error

        return stack_weight(name, (experts, out, blocks * BLOCK), self.dtype, lambda: part, packed=True)

    def in_nvfp4(self, packed: str) -> Weight:
        """Return a weight that is stored in NVFP4; `packed` is the name of its codes."""
        path, (rows, size) = packed.removesuffix(PACKED), self.shape(packed)

        def read() -> FrozenWeight:
            codes, scales, divisor = (self.read(path + ending) for ending in PARTS_IN_NVFP4)
            return NVFP4Weight.from_codes(codes, scales, divisor, self.dtype)

        return self.quantized(f"{path}.weight", (rows, 2 * size), 1, read)

    def stack_to_quantize(self, name: str) -> Weight:
        """Return a stack of experts (E, in, out) that the checkpoint stores in 16 or 32 bits, in NF4 as the loader
        quantizes it."""
        experts, columns, out = self.shape(name)

        def quantized() -> Parts:
            matrices = [*self.read(name).to(self.dtype).mT]
            return parts_of(FrozenStack(frozen_weight(quantized_stack([matrices], experts)), experts))

        return stack_weight(name, (experts, out, columns), self.dtype, quantized, packed=False)

    def expert(self, name: str, stack: Callable[[str, str], FrozenStack]) -> Weight:
        """Return one matrix of one expert with its NF4 values, from `stack(path of the experts, kind)`."""
        path, number, part, _ = name.rsplit(".", 3)
        kind = next(kind for kind, parts in STACKS.items() if part in parts)
        shape = self.shape(name)
        start = STACKS[kind].index(part) * shape[0]

        def read() -> FrozenWeight:
            return stack(path, kind).expert(int(number)).rows(start, start + shape[0])

        return self.quantized(name, shape, BLOCK_ROWS, read)

    def expert_stack(self, path: str, kind: str) -> FrozenStack:
        """Read the matrices of all experts of a stack and quantize them together, as the loader does."""
        count = sum(f"{path}.{number}.{STACKS[kind][0]}.weight" in self.places for number in range(len(self.places)))
        tensors = [[self.read(f"{path}.{number}.{part}.weight").to(self.dtype) for number in range(count)]
                   for part in STACKS[kind]]
        return FrozenStack(frozen_weight(quantized_stack(tensors, count)), count)


def stored_weights(folder: Path, config: Any, form: str, dtype: torch.dtype, device: torch.device | str = "cpu",
                   names: dict[str, str] | None = None) -> list[Weight]:
    """Return every tensor of a stored model, with its values after loading in `dtype`. If the checkpoint is in 16 or 32
    bits, linear layers get the values that they have in `form` (NF4, FP8, ...). For a multimodal checkpoint, these are
    the tensors of its text model, renamed by `names`."""
    files = TensorFiles(gguf_tensors(folder, dtype) if is_gguf(folder) else tensor_files(folder), dtype, device)
    whole = {name for name in files.places if name.partition(PARTS)[0] == name}
    in_4_bit = {name for name in whole if f"{name}.absmax" in files.places}
    in_fp8 = {name: scale for name in whole if name.endswith(".weight") and (scale := scale_of(name, files.places))}
    in_mxfp4 = {name.removesuffix(SCALES) for name in whole if f"{name.removesuffix(SCALES)}{CODES}" in whole}
    in_nvfp4 = {name for name in whole if name.endswith(PACKED)}
    beside = {*in_fp8.values(), *(name for name in whole if (in_fp8 or in_nvfp4) and name.endswith(OF_ACTIVATIONS)),
              *(f"{name}{part}" for name in in_mxfp4 for part in (CODES, SCALES)),
              *(f"{name.removesuffix(PACKED)}{part}" for name in in_nvfp4 for part in PARTS_IN_NVFP4[1:])}
    quantized = form == BITS_16 or in_4_bit or in_fp8 or (in_mxfp4 and form != NF4) or in_nvfp4
    modules = set() if quantized else linears_to_quantize(config, dtype)
    names = names or (STORED_VISION if config is not None and reads_images(config) else {})
    stack = lru_cache(len(STACKS))(files.expert_stack)  # keeps the last stacks, those of one layer
    weights = []
    for name in sorted(whole - beside | in_mxfp4):
        plain = text_name(name, names)
        if plain is None:
            continue
        if name in in_4_bit:
            weight = files.in_4bit(name)
        elif name in in_fp8:
            weight = files.in_fp8(name, in_fp8[name], block_of(quantization_of(config) or {}))
        elif name in in_mxfp4:
            weight = files.in_mxfp4(name)
        elif name in in_nvfp4:
            weight, plain = files.in_nvfp4(name), plain.removesuffix("_packed")
        elif form == NF4 and has_experts(config) and is_stack(name):
            weight = files.stack_to_quantize(name)
        elif form == NF4 and has_experts(config) and EXPERT.fullmatch(name):
            weight = files.expert(name, stack)
        elif plain.endswith(".weight") and plain.rpartition(".")[0] in modules:
            weight = files.to_quantize(name, form)
        else:
            weight = files.plain(name)
        weights.append(replace(weight, name=plain))
    return weights


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return {tensor: its file}. OSError if the folder lacks safetensors files; pickled weights are never opened."""
    files, _ = weight_files(folder)
    if not files or files[0].suffix != ".safetensors":
        raise OSError(f"{folder} holds no {SINGLE} and no {INDEX}; weights in other formats are not read. Save the "
                      "model again with transformers' save_pretrained")
    places: dict[str, Path] = {}
    for path in files:  # a later file's tensor replaces an earlier one's, as in transformers
        with safe_open(path, "pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    return places


def empty_model(config: Any) -> Any:
    """Return the model that a config describes, without memory for its weights."""
    with torch.device("meta"):
        return class_of(config).from_config(config, attn_implementation=attention_of(config), trust_remote_code=False)


def linears_to_quantize(config: Any, dtype: torch.dtype) -> set[str]:
    """Return the paths of the modules that loading quantizes, to 4 bit or FP8."""
    model = empty_model(config)
    AutoHfQuantizer.from_config(nf4(dtype, config)).preprocess_model(model, device_map=None)
    return {path for path, module in model.named_modules() if isinstance(getattr(module, "weight", None), Params4bit)}
