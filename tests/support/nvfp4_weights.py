"""NVFP4 weights and checkpoints as compressed-tensors writes them, and what they stand for by its own decoding."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import NVFP4, NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from fp8_weights import save_16_bit
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lowmem_grpo.kernels.nvfp4 import NVFP4Weight

SCHEMES = {"W4A16": NVFP4A16, "W4A4": NVFP4}


def packed(weight: Tensor, scheme: str = "W4A16") -> dict[str, Tensor]:
    """The tensors that compressed-tensors stores for a weight, without its path."""
    groups = weight.unflatten(1, (-1, 16))
    whole = generate_gparam(weight.min(), weight.max())
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), NVFP4A16["weights"], whole)
    return dict(NVFP4PackedCompressor.compress(
        {"weight": weight, "weight_scale": scale, "weight_global_scale": whole},
        QuantizationScheme(targets=["Linear"], **SCHEMES[scheme])))


def decoded(tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """What `packed` tensors stand for, by compressed-tensors: in float32, then rounded."""
    codes = tensors["weight_packed"]
    values = unpack_fp4_from_uint8(codes, len(codes), 2 * codes.shape[1], torch.float32)
    return dequantize(values, tensors["weight_scale"].view(torch.float8_e4m3fn).float(), dtype=torch.float32,
                      global_scale=tensors["weight_global_scale"]).to(dtype)


def random_parts(rows: int, columns: int) -> dict[str, Tensor]:
    """Random codes, with scales of all finite values."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 127, (rows, columns // 16), dtype=torch.uint8, generator=generator)
    return {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": torch.tensor([1234.567])}


def in_nvfp4(rows: int, columns: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> NVFP4Weight:
    return NVFP4Weight.from_codes(*(part.to(device) for part in random_parts(rows, columns).values()), dtype)


def quantization_config(scheme: str = "W4A16", **weights: Any) -> dict[str, Any]:
    scheme_of = QuantizationScheme(targets=["Linear"], format="nvfp4-pack-quantized", **SCHEMES[scheme])
    group = scheme_of.model_dump(mode="json")
    group["weights"] |= weights
    return {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"group_0": group},
            "quantization_status": "compressed", "ignore": ["lm_head"]}


def save_in_nvfp4(folder: Path, scheme: str = "W4A16", family: str = "Llama", **sizes: Any) -> dict[str, Tensor]:
    """Write a checkpoint of a small random model; returns what its tensors stand for, in float32, under the names of a
    16-bit checkpoint. The first o_proj stays in 16 bits."""
    return rewrite_in_nvfp4(save_16_bit(folder, family, **sizes), scheme)


def rewrite_in_nvfp4(folder: Path, scheme: str = "W4A16") -> dict[str, Tensor]:
    """Store the linear layers of a checkpoint but the first o_proj in NVFP4; returns what its tensors stand for."""
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        values[name] = tensors[name] = tensor + 0.1 if name.endswith("bias") else tensor
        if "_proj.weight" in name and not name.endswith("layers.0.self_attn.o_proj.weight"):
            parts, path = packed(tensors.pop(name), scheme), name.removesuffix("weight")
            values[name] = decoded(parts)
            tensors |= {path + part: value.contiguous() for part, value in parts.items()}
            if scheme == "W4A4":
                tensors[f"{path}input_global_scale"] = torch.tensor([3.5])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | {"quantization_config": quantization_config(scheme)}))
    return values


def plain_model(folder: Path, values: dict[str, Tensor], place: Path) -> Any:
    """Plain transformers in float32 with these values, for the config and tokenizer of a checkpoint in NVFP4."""
    shutil.copytree(folder, place, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((place / "config.json").read_text())
    del config["quantization_config"]
    (place / "config.json").write_text(json.dumps(config))
    save_file(values, place / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, attn_implementation="eager")
