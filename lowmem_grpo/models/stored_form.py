"""Read from a config the form in which a checkpoint stores its weights: 16 or 32 bits, NF4, FP8, or an unsupported one.

No torch is imported here, so that an unsupported checkpoint is refused at once.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowmem_grpo.memory.families import check_family, check_float16
from lowmem_grpo.memory.layer_forms import FP8, NF4
from lowmem_grpo.memory.named_configs import read_config

PLAIN_ONE = ("take the model's checkpoint in 16 bits (in its name there is no {0}), and load it with load_in_4bit=True "
             "or load_in_fp8=True")
LABELS = {  # transformers' quant_method, or a format of compressed-tensors -> its common name
    "mxfp4": "MXFP4", "gptq": "GPTQ", "awq": "AWQ", "nvfp4": "NVFP4", "mxfp8": "MXFP8", "fbgemm_fp8": "FBGEMM FP8",
    "nvfp4-pack-quantized": "NVFP4", "mxfp4-pack-quantized": "MXFP4", "mxfp8-quantized": "MXFP8",
    "pack-quantized": "packed integers (INT4, W4A16)", "int-quantized": "INT8", "marlin-24": "sparse INT4",
    "modelopt": "ModelOpt", "auto-round": "AutoRound", "bitsandbytes": "bitsandbytes, 8 bits",
}


def check_stored(folder: str, name: str, dtype: Any, max_seq_length: int | None = None) -> None:
    """Raise ValueError for a refused family, an unsupported form of weights, a float16 run of a model that overflows in
    it, and a context longer than the model's. Only a folder is checked; a name on the hub is checked when it is
    loaded."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        return
    fields = read_config(file)
    check_family(fields, name)
    stored_form(fields, name)
    refuse_longer(max_seq_length, (fields.get("text_config") or fields).get("max_position_embeddings"))
    if str(dtype).removeprefix("torch.") == "float16":
        check_float16(fields)


def refuse_longer(max_seq_length: int | None, longest: int | None) -> None:
    """Raise ValueError if `max_seq_length` exceeds the model's `longest` context, in tokens; None means unknown."""
    if longest is not None and (max_seq_length or 0) > longest:
        raise ValueError(f"max_seq_length is {max_seq_length}; this model's context is {longest}")


def stored_form(config: Any, name: str) -> str | None:
    """Return NF4 or FP8, the form in which a config says weights are stored; None for 16 or 32 bits. ValueError for any
    other form."""
    quantization = quantization_of(config)
    if quantization is None:
        return None
    method = str(quantization.get("quant_method", "bitsandbytes"))
    if method == "bitsandbytes" and quantization.get("load_in_4bit", quantization.get("_load_in_4bit")):
        return NF4
    if method == "fp8":
        check_scale_format(quantization, name)
        return FP8
    if method == "compressed-tensors":
        check_groups(quantization, name)
        return FP8
    raise refusal(name, LABELS.get(method, method))


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return the quantization_config of a model's config (transformers' object, or the fields of config.json) or of its
    text part; None if there is none."""
    if isinstance(config, Mapping):
        parts = [fields.get("quantization_config") for fields in (config, config.get("text_config") or {})]
    else:
        parts = [getattr(whole, "quantization_config", None) for whole in (config, config.get_text_config())]
    stored = next((part for part in parts if part is not None), None)
    return None if stored is None else dict(stored if isinstance(stored, Mapping) else stored.to_dict())


def block_of(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the block (h, w) that shares a scale, from the config; None for scales per row or one for all."""
    block = quantization.get("weight_block_size")
    for group in (quantization.get("config_groups") or {}).values():
        weights = group["weights"]
        size = weights.get("group_size")
        block = weights.get("block_structure") or ([1, size] if size and size > 0 else None)
    return None if block is None else (int(block[0]), int(block[1]))


def check_scale_format(quantization: Mapping[str, Any], name: str) -> None:
    """Raise ValueError for 8-bit floats other than e4m3."""
    kind = quantization.get("fmt", quantization.get("weight_format", "e4m3"))
    if kind not in ("e4m3", "e4m3fn", "float8_e4m3fn"):
        raise refusal(name, f"FP8 of the kind {kind}")


def check_groups(quantization: Mapping[str, Any], name: str) -> None:
    """Raise ValueError unless every group of a compressed-tensors config has weights in FP8 with static scales, in
    blocks of one shape."""
    groups = list((quantization.get("config_groups") or {}).values())
    if not any(group.get("weights") for group in groups):
        raise refusal(name, "compressed-tensors without quantized weights (activations or the key-value cache only)")
    kinds = [str(group.get("format") or quantization.get("format")) for group in groups]
    for group, kind in zip(groups, kinds, strict=True):
        weights = group.get("weights") or {}
        if kind not in ("float-quantized", "naive-quantized") or weights.get("type") != "float" \
                or weights.get("num_bits") != 8 or not weights.get("symmetric", True):
            raise refusal(name, LABELS.get(kind, f"compressed-tensors, {kind}"))
    blocks = {block_of({"config_groups": {"one": group}}) for group in groups}
    if len(blocks) != 1 or (quantization.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise refusal(name, "compressed-tensors with several kinds of blocks, or sparse")


def refusal(name: str, label: str) -> ValueError:
    """Return the error for an unsupported stored form, which names the supported forms and what to load instead."""
    return ValueError(
        f"{name!r} is stored in {label}, which is not trained here. Allowed are checkpoints in 16 or 32 bits, in 4 "
        "bits of bitsandbytes, and in FP8 (e4m3, of compressed-tensors or fine-grained): "
        + PLAIN_ONE.format(label.partition(" ")[0])
    )
