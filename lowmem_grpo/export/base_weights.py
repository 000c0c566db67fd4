"""The frozen weights that are merged with an adapter. They are read one tensor at a time, by rows.

`stored_weights` reads a checkpoint's safetensors files, without loading the model. A weight that a run held in 4 bit or
in FP8 is first quantized as the loader does it, because the adapter was trained on the quantized values.
`live_weights` reads a loaded model, in any layout of its weights.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Params4bit
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AutoHfQuantizer

from lowmem_grpo.kernels.fp8 import fp8_quantize
from lowmem_grpo.kernels.frozen import QuantizedWeight
from lowmem_grpo.kernels.nf4 import NF4Weight
from lowmem_grpo.memory.model_shape import BITS_16, FP8_BLOCK, NF4
from lowmem_grpo.models.fp8_linear import fp8_linears
from lowmem_grpo.models.fp8_linear import stored_weight as stored_weight_in_fp8
from lowmem_grpo.models.fp8_loading import BLOCK, SCALES, path_of
from lowmem_grpo.models.pretrained import nf4
from lowmem_grpo.models.stored_form import block_of, quantization_of
from lowmem_grpo.runs.adapter_file import PREFIX

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PARTS = ".weight."  # of a 4-bit weight: `q_proj.weight.absmax` beside `q_proj.weight`
STATE = ".quant_state.bitsandbytes__"
ACTIVATIONS = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale")  # beside FP8; not used
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
            "BOOL": torch.bool}  # safetensors' names; all others are floating point
Rows = Callable[[int, int], Tensor]  # (start, stop) -> (stop - start, ...)


@dataclass(frozen=True)
class Weight:
    """A tensor of a model. `open` returns a reader, which holds no other tensor."""

    name: str  # as in a checkpoint
    shape: tuple[int, ...]
    dtype: torch.dtype
    open: Callable[[], Rows]
    step: int = 1  # a reader can only start at multiples of this many rows

    @property
    def module(self) -> str:
        """The module that holds it."""
        return self.name.rpartition(".")[0]


def quantized_rows(weight: QuantizedWeight) -> Rows:
    """A reader of weights in 4 bits or FP8, in float32."""
    def rows(start: int, stop: int) -> Tensor:
        band = torch.empty(stop - start, weight.shape[1], device=weight.device)
        weight.fill(band, row=start)
        return band

    return rows


def plain_rows(tensor: Any, dtype: torch.dtype | None, device: torch.device | str) -> Rows:
    """A reader of a tensor or of a slice of a file. It gives floating values in `dtype`, if there is one."""
    def rows(start: int, stop: int) -> Tensor:
        band: Tensor = (tensor[start:stop] if len(shape_of(tensor)) else tensor).to(device)
        return band.to(dtype) if dtype is not None and band.is_floating_point() else band

    return rows


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape of a tensor, or of a slice of a file."""
    return tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)


# of a loaded model


def live_weights(model: Any) -> list[Weight]:
    """Every parameter and saved buffer of a model, with or without PEFT. LoRA's are left out; tied ones come once."""
    found, in_fp8 = [], {id(layer.weight): layer for layer in fp8_linears(model)}
    scales = {id(layer.weight_scale) for layer in in_fp8.values()}
    for name, tensor in (*model.named_parameters(), *saved_buffers(model)):
        if ".lora_" not in name and id(tensor) not in scales:
            plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
            layer = in_fp8.get(id(tensor))
            found.append(live_weight(plain, tensor) if layer is None else quantized_weight(plain, layer.frozen))
    return found


def live_weight(name: str, tensor: Any) -> Weight:
    """The Weight of a parameter or buffer."""
    if is_quantized(tensor):
        return quantized_weight(name, NF4Weight.from_bitsandbytes(tensor))
    plain = tensor.detach()
    return Weight(name, tuple(plain.shape), plain.dtype, lambda: plain_rows(plain, None, plain.device))


def quantized_weight(name: str, weight: QuantizedWeight) -> Weight:
    """The Weight of codes and scales."""
    return Weight(name, weight.shape, weight.dtype, lambda: quantized_rows(weight), weight.row_unit)


def is_quantized(tensor: Any) -> bool:
    """Whether bitsandbytes holds this tensor in 4 bits."""
    return getattr(tensor, "quant_state", None) is not None


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a checkpoint contains."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


# of a stored model


def stored_weights(
    folder: Path, config: Any, form: str, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> list[Weight]:
    """Every tensor of a stored model, with the values that it has when loaded in `dtype`.

    The linear layers of a checkpoint in 16 or 32 bits have the values that this form (NF4, FP8, ...) gives them.
    """
    places = tensor_files(folder)
    whole = {name for name in places if name.partition(PARTS)[0] == name}
    in_4_bit = {name for name in whole if f"{name}.absmax" in places}
    in_fp8 = {name: scale for name in whole if (scale := scale_of(name, places)) is not None}
    beside = {*in_fp8.values(), *(name for name in whole if in_fp8 and name.endswith(ACTIVATIONS))}
    modules = set() if form == BITS_16 or in_4_bit or in_fp8 else linears_to_quantize(config, dtype)
    block = block_of(quantization_of(config) or {})
    found = []
    for name in sorted(whole - beside):
        if name in in_4_bit:
            found.append(stored_in_4bit(name, places, dtype, device))
        elif name in in_fp8:
            found.append(stored_in_fp8(name, places[name], (in_fp8[name], places[in_fp8[name]]), block, dtype, device))
        else:
            quantize = name.endswith(".weight") and name.rpartition(".")[0] in modules
            found.append(stored_weight(name, places[name], form if quantize else BITS_16, dtype, device))
    return found


def scale_of(name: str, places: dict[str, Path]) -> str | None:
    """The tensor with the scales of a weight that is stored in FP8; None where there is none."""
    scales = (path_of(name) + suffix for suffix in SCALES)
    return next((scale for scale in scales if scale in places), None) if name.endswith(".weight") else None


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor. OSError if the folder has no safetensors files: pickled weights are never opened."""
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
    """A tensor that is stored in 16 or 32 bits; `form` is the one in which loading holds it."""
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

    return Weight(name, shape, dtype, read, 64)  # 64 rows of any width end where a block ends


def stored_in_4bit(name: str, places: dict[str, Path], dtype: torch.dtype, device: torch.device | str) -> Weight:
    """A tensor that bitsandbytes has quantized; its scales are stored beside it."""
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


def stored_in_fp8(
    name: str, file: Path, scale: tuple[str, Path], block: tuple[int, int] | None, dtype: torch.dtype,
    device: torch.device | str,
) -> Weight:
    """A tensor that is stored in FP8, with the name and file of its scales."""
    shape = shape_of(file_slice(file, name))

    def read() -> Rows:
        codes, scales = (file_slice(place, part)[...].to(device) for part, place in ((name, file), scale))
        return quantized_rows(stored_weight_in_fp8(codes, scales, block or (1, shape[1]), dtype))

    return Weight(name, shape, dtype, read)


def file_slice(file: Path, name: str) -> Any:
    """A tensor of a file. It is read when it is sliced (a scalar at once); the file is mapped, not loaded."""
    opened = safe_open(file, "pt")
    part = opened.get_slice(name)
    return part if part.get_shape() else opened.get_tensor(name)


def linears_to_quantize(config: Any, dtype: torch.dtype) -> set[str]:
    """The modules that are quantized, to 4 bit or FP8, when such a model is loaded. An empty model is asked."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    AutoHfQuantizer.from_config(nf4(dtype)).preprocess_model(model, device_map=None)
    return {path for path, module in model.named_modules() if isinstance(getattr(module, "weight", None), Params4bit)}
