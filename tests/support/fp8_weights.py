"""FP8 weights: random, in every kind of block, and with every code; and checkpoints as other projects write them, made
of a small random model."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from small_models import TINY, random_model
from torch import Tensor, nn
from transformers import AutoTokenizer

from lowmem_grpo.kernels.fp8 import FP8Weight, fp8_dequantize, fp8_quantize, scales_shape
from lowmem_grpo.models.fp8_layers import FP8Linear

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
    return FP8Weight.from_codes(codes, scales, block, dtype)


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


WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors, activations quantized too (which is ignored)."""
    group = {"targets": ["Linear"], "weights": WEIGHTS | {"strategy": strategy} | more,
             "input_activations": WEIGHTS | {"strategy": "token", "dynamic": True}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None}


# The quantization_config of each kind of checkpoint, the ending of its scales, their block, and how they are stored.
CHECKPOINTS: dict[str, tuple[dict[str, Any], str, Any, Any]] = {
    "compressed-tensors by row": (compressed("channel"), "_scale", None, lambda scales: scales.bfloat16()),
    "compressed-tensors, one scale": (compressed("tensor"), "_scale", "all", lambda scales: scales.reshape(1)),
    "compressed-tensors by block": (compressed("block", block_structure=[16, 20]), "_scale", (16, 20), Tensor.float),
    "compressed-tensors by group": (compressed("group", group_size=16), "_scale", (1, 16), Tensor.float),
    "fine-grained": ({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                      "weight_block_size": [20, 16]}, "_scale_inv", (20, 16), Tensor.bfloat16),
    "fine-grained, one scale": ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
                                "_scale_inv", "all", lambda scales: scales.reshape(())),
}


def save_16_bit(folder: Path, family: str = "Llama", **sizes: Any) -> Path:
    """A random model of a family with a tokenizer, in float32."""
    random_model(family, **sizes).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def save_in_fp8(folder: Path, kind: str) -> dict[str, Tensor]:
    """Write a checkpoint of this kind; returns what its tensors stand for, in float32, under their names. The first
    o_proj stays in 16 bits."""
    return rewrite_in_fp8(save_16_bit(folder), kind)


def store_in_fp8(source: Path, folder: Path, kind: str, of: str) -> Path:
    """A copy of a checkpoint with the linear layers of one part in FP8."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    rewrite_in_fp8(folder, kind, of)
    return folder


def rewrite_in_fp8(folder: Path, kind: str, of: str = "") -> dict[str, Tensor]:
    """Quantize what is stored there, where a name begins with `of`; returns what its tensors stand for."""
    config, ending, block, as_stored = CHECKPOINTS[kind]
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        linear = "_proj.weight" in name and not name.endswith("layers.0.self_attn.o_proj.weight")
        values[name] = tensor
        if not linear or not name.startswith(of):
            continue
        weight = fp8_quantize(tensor, tuple(tensor.shape) if block == "all" else block)
        scales = as_stored(weight.scales)
        wide = scales.float().reshape(weight.scales.shape)
        weight = FP8Weight.from_codes(weight.codes, wide, weight.block, torch.float32)
        values[name] = fp8_dequantize(weight)
        tensors |= {name: weight.codes.view(torch.float8_e4m3fn), f"{name}{ending}": scales,
                    f"{name.removesuffix('weight')}input_scale": torch.ones(1)}
    if kind != "fine-grained, one scale":
        tensors = {name: tensor for name, tensor in tensors.items() if "input_scale" not in name}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | {"quantization_config": config}))
    return values


def dequantized(model: nn.Module) -> nn.Module:
    """The model with plain layers in place of FP8 ones, which hold the same values."""
    for path, module in list(model.named_modules()):
        if isinstance(module, FP8Linear):
            plain = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            plain.weight = nn.Parameter(fp8_dequantize(module.frozen), requires_grad=False)
            plain.bias = module.bias
            model.set_submodule(path, plain)
    return model
