"""The frozen weights of a model one after the other, by rows and without loading the model: for merging.

`stored_weights` reads a checkpoint's safetensors files. A weight that a run held in 4 bit is quantized as the loader
quantizes it and read out of that: the adapter was trained on what quantization left. One tensor is held at a time.
`live_weights` reads a loaded model, whichever layout its weights have.
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

from lowmem_grpo.export.lora_pairs import PREFIX
from lowmem_grpo.kernels.nf4 import NF4Weight, aligned_rows, nf4_dequantize
from lowmem_grpo.models.pretrained import nf4

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PARTS = ".weight."  # of a 4-bit weight: `q_proj.weight.absmax` beside `q_proj.weight`
STATE = ".quant_state.bitsandbytes__"
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
            "BOOL": torch.bool}  # safetensors' names; the others float
Rows = Callable[[int, int], Tensor]  # (start, stop) -> (stop - start, ...)


@dataclass(frozen=True)
class Weight:
    """A tensor of a model. `open` gives its reader, which holds at most this one tensor while it lives."""

    name: str  # as in a checkpoint
    shape: tuple[int, ...]
    dtype: torch.dtype
    open: Callable[[], Rows]
    step: int = 1  # a reader starts at multiples of so many rows

    @property
    def module(self) -> str:
        """The module that holds it."""
        return self.name.rpartition(".")[0]


def nf4_rows(weight: NF4Weight) -> Rows:
    """A reader of 4-bit weights, in float32."""
    def rows(start: int, stop: int) -> Tensor:
        band = weight.rows(start, stop)
        return nf4_dequantize(band, torch.empty(band.shape, device=weight.packed.device))

    return rows


def plain_rows(tensor: Any, dtype: torch.dtype | None, device: torch.device | str) -> Rows:
    """A reader of a tensor, or of a slice of a file; floating values in `dtype` where one is given."""
    def rows(start: int, stop: int) -> Tensor:
        band: Tensor = (tensor[start:stop] if len(shape_of(tensor)) else tensor).to(device)
        return band.to(dtype) if dtype is not None and band.is_floating_point() else band

    return rows


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Of a tensor, or of a slice of a file."""
    return tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)


# of a loaded model


def live_weights(model: Any) -> list[Weight]:
    """Every parameter and saved buffer of a model (under PEFT, or bare), LoRA's own left out, tied ones once."""
    found = []
    for name, tensor in (*model.named_parameters(), *saved_buffers(model)):
        if ".lora_" not in name:
            plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
            found.append(live_weight(plain, tensor.detach() if not is_quantized(tensor) else tensor))
    return found


def live_weight(name: str, tensor: Any) -> Weight:
    """One of them."""
    if not is_quantized(tensor):
        return Weight(name, tuple(tensor.shape), tensor.dtype, lambda: plain_rows(tensor, None, tensor.device))
    weight = NF4Weight.from_bitsandbytes(tensor)
    return Weight(name, weight.shape, weight.dtype, lambda: nf4_rows(weight), aligned_rows(weight))


def is_quantized(tensor: Any) -> bool:
    """Whether bitsandbytes holds this tensor in 4 bits."""
    return getattr(tensor, "quant_state", None) is not None


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that belong into a checkpoint."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


# of a stored model


def stored_weights(
    folder: Path, config: Any, load_in_4bit: bool, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> list[Weight]:
    """Every tensor of a stored model as it is after loading in `dtype` (linear layers in NF4 with `load_in_4bit`)."""
    places = tensor_files(folder)
    whole = {name for name in places if name.partition(PARTS)[0] == name}
    in_4_bit = {name for name in whole if f"{name}.absmax" in places}
    modules = linears_to_quantize(config, dtype) if load_in_4bit and not in_4_bit else set()
    found = []
    for name in sorted(whole):
        if name in in_4_bit:
            found.append(stored_in_4bit(name, places, dtype, device))
        else:
            quantize = name.endswith(".weight") and name.rpartition(".")[0] in modules
            found.append(stored_weight(name, places[name], quantize, dtype, device))
    return found


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor; OSError where the folder holds no safetensors (pickled weights are never opened)."""
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


def stored_weight(name: str, file: Path, quantize: bool, dtype: torch.dtype, device: torch.device | str) -> Weight:
    """A tensor in 16 or 32 bits, which loading may quantize."""
    part = file_slice(file, name)
    shape = shape_of(part)
    if not quantize:
        kept = INTEGERS.get(part.get_dtype(), dtype)
        return Weight(name, shape, kept, lambda: plain_rows(file_slice(file, name), dtype, device))

    def read() -> Rows:
        tensor = file_slice(file, name)[:].to(device, dtype)
        param: Any = Params4bit(tensor, requires_grad=False, quant_type="nf4", compress_statistics=True, blocksize=64)
        return nf4_rows(NF4Weight.from_bitsandbytes(param.to(device)))

    return Weight(name, shape, dtype, read, 64)  # 64 rows of any width end where a block ends


def stored_in_4bit(name: str, places: dict[str, Path], dtype: torch.dtype, device: torch.device | str) -> Weight:
    """A tensor that bitsandbytes has quantized, with its scales beside it."""
    parts = [other for other in places if other.startswith(f"{name}.")]
    state = next(part for part in parts if STATE in part)
    described = json.loads(bytes(file_slice(places[state], state)[:].tolist()))

    def read() -> Rows:
        stats = {part.removeprefix(f"{name}."): file_slice(places[part], part)[:] for part in parts}
        stats = {f"weight.{key}": value for key, value in stats.items()}
        param = Params4bit.from_prequantized(file_slice(places[name], name)[:], stats, device=device)
        param.quant_state.dtype = dtype
        return nf4_rows(NF4Weight.from_bitsandbytes(param))

    return Weight(name, tuple(described["shape"]), dtype, read, described["blocksize"])


def file_slice(file: Path, name: str) -> Any:
    """A tensor of a file, read when it is sliced; the file is mapped, not loaded. A number is read at once."""
    opened = safe_open(file, "pt")
    part = opened.get_slice(name)
    return part if part.get_shape() else opened.get_tensor(name)


def linears_to_quantize(config: Any, dtype: torch.dtype) -> set[str]:
    """The modules that transformers puts in 4 bit when it loads such a model: asked of an empty one."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    AutoHfQuantizer.from_config(nf4(dtype)).preprocess_model(model, device_map=None)
    return {path for path, module in model.named_modules() if isinstance(getattr(module, "weight", None), Params4bit)}
