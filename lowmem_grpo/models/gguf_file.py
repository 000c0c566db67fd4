"""Read a model from a GGUF file, as llama.cpp's converter writes it: its config, and its tensors under the names that
they have in a checkpoint. The file is mapped; a tensor is decoded when it is indexed, a band of rows at a time."""

import hashlib
import re
import struct
from dataclasses import dataclass
from math import isclose, pi
from pathlib import Path
from typing import Any

from lowmem_grpo.memory.config_rules import OF_CONFIG, check_fields
from lowmem_grpo.models.gguf_header import GGUFHeader, gguf_header, type_of
from lowmem_grpo.utils import is_gguf, torch

LAYER = re.compile(r"blk\.(\d{1,4})\.")
MOST_EXPERTS = 2**17  # matrices; published models have 40,000
MOST_HEAD = 2**12
BAND = 2**22  # weights that are decoded together, in float32


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp: transformers' model_type, and what the converter changes."""

    model_type: str
    names: tuple[tuple[str, str], ...] = ()  # of tensors that are not in NAMES, or mean another there
    interleaved: bool = False  # the rows of q and k, for llama.cpp's RoPE
    norm_offset: float = 0.0  # added to the weights of norms
    biases: bool = False  # of q, k and v
    defaults: tuple[tuple[str, Any], ...] = ()  # config fields that no file has


HEAD_NORMS = (("attn_q_norm", "self_attn.q_norm"), ("attn_k_norm", "self_attn.k_norm"))
EXPERTS = tuple((f"ffn_{part}_exps", f"mlp.experts.{{}}.{part}_proj") for part in ("gate", "up", "down"))
ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True),  # Mistral too
    "qwen2": Architecture("qwen2", biases=True),
    "qwen3": Architecture("qwen3", HEAD_NORMS),
    "qwen3moe": Architecture("qwen3_moe", (*HEAD_NORMS, *EXPERTS, ("ffn_gate_inp", "mlp.gate")),
                             defaults=(("norm_topk_prob", True),)),
    "gemma3": Architecture("gemma3_text", (
        *HEAD_NORMS, ("post_attention_norm", "post_attention_layernorm"), ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm")), norm_offset=1.0),
    "phi3": Architecture("phi3", (("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj"))),
}
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
ROPED = {"attn_q.weight": "attention.head_count", "attn_k.weight": "attention.head_count_kv"}
EMBEDDING, HEAD, FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
FIELDS = {  # the first five are needed
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim", "attention.sliding_window": "sliding_window", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
}


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a mapped file, with the methods of a slice of safetensors. Indexing it decodes these rows."""

    packed: Any  # numpy's uint8 (..., bytes of a row)
    kind: Any  # gguf's GGMLQuantizationType
    shape: tuple[int, ...]
    dtype: Any  # torch's, to which values are rounded once
    heads: int = 0  # whose rows are interleaved; 0: none are
    offset: float = 0.0  # subtracted from the values

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, key: Any) -> Any:
        from gguf.quants import dequantize

        packed = self.packed if self.packed.ndim > 1 else self.packed[None]
        if self.heads:  # (heads, half, 2, bytes) to (heads, 2, half, bytes)
            packed = packed.reshape(self.heads, -1, 2, packed.shape[-1]).swapaxes(1, 2).reshape(packed.shape)
        packed = packed[key] if self.packed.ndim > 1 else packed
        out = torch.empty((*packed.shape[:-1], self.shape[-1]), dtype=self.dtype)
        step = max(1, BAND // self.shape[-1])
        for first in range(0, len(packed), step):
            values = dequantize(packed[first : first + step].copy(), self.kind)
            out[first : first + step] = torch.from_numpy(values) - self.offset
        return out if self.packed.ndim > 1 else out[0][key]


def digest_of(path: str | Path) -> str | None:
    """Return the sha256 of a GGUF file; None for another path."""
    if not is_gguf(path):
        return None
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def gguf_tensors(path: str | Path, dtype: Any) -> dict[str, GGUFTensor]:
    """Return the tensors of a GGUF file by their names in a checkpoint; each expert's matrices are tensors."""
    import numpy as np

    header, tensors = gguf_header(path), dict[str, GGUFTensor]()
    known, mapped = ARCHITECTURES[header.architecture], np.memmap(path, np.uint8, "r")
    for stored, place in header.places.items():
        if stored == FACTORS:
            continue
        name, heads = checkpoint_name(header, stored), heads_of(header, stored) if known.interleaved else 0
        packed = mapped[place.start : place.end].reshape(*place.shape[:-1], place.row_bytes)
        tensor = GGUFTensor(packed, type_of(place.number)[0], place.shape, dtype, heads,
                            known.norm_offset if "norm" in stored else 0.0)
        if "{}" not in name:
            tensors[name] = tensor
        else:
            tensors |= {name.format(number): GGUFTensor(rows, tensor.kind, place.shape[1:], dtype)
                        for number, rows in enumerate(packed)}
    return tensors


def checkpoint_name(header: GGUFHeader, stored: str) -> str:
    """Return a tensor's name in a checkpoint, with {} for the number of an expert. ValueError if it has none."""
    known = ARCHITECTURES[header.architecture]
    within_layer = LAYER.match(stored)
    layer = "" if within_layer is None else within_layer[1]
    part, _, kind = stored.removeprefix(f"blk.{layer}." if layer else "").rpartition(".")
    name = (NAMES | dict(known.names)).get(part)
    if name is None or kind not in ("weight", *(["bias"] if known.biases and part[5:] in ("q", "k", "v") else [])):
        raise refusal(header, f"has the tensor {stored:.80}, for which {known.model_type} has no place here")
    return f"model.layers.{layer}.{name}.{kind}" if layer else f"{name}.{kind}"


def check_place(header: GGUFHeader, stored: str) -> None:
    """Raise ValueError for a tensor without a place in the model, or of other experts or heads than the model has."""
    shape, own = header.places[stored].shape, f"{header.architecture}."
    if "{}" in checkpoint_name(header, stored):
        experts, used = (header.settings.get(f"{own}{name}") for name in ("expert_count", "expert_used_count"))
        if len(shape) != 3 or shape[0] != experts or not isinstance(used, int) or not 0 < used <= experts:
            raise refusal(header, f"has {stored} of the shape {shape}; expert_count is {experts!r:.40}, and must be "
                                  f"the first size; expert_used_count {used!r:.40}, and must be 1 to that")
    heads = heads_of(header, stored)
    if not isinstance(heads, int) or heads < 0 or (heads and shape[0] % (2 * heads)):
        raise refusal(header, f"has {stored} of the shape {shape} for {heads!r:.40} heads")


def heads_of(header: GGUFHeader, stored: str) -> Any:
    """Return the number of heads in the rows of q or k, as the file states it; 0 for other tensors."""
    part = ROPED.get(stored.split(".", 2)[-1])
    settings, own = header.settings, f"{header.architecture}."
    return 0 if part is None else settings.get(f"{own}{part}", settings.get(f"{own}attention.head_count"))


def gguf_config(path: str | Path) -> dict[str, Any]:
    """Return the fields that the config.json of a GGUF file's model would have. ValueError for an architecture, a
    tensor or a setting that is not read."""
    header = gguf_header(path)
    known, places = ARCHITECTURES.get(header.architecture), header.places
    if known is None:
        raise refusal(header, f"is of the architecture {header.architecture:.40}; read are {', '.join(ARCHITECTURES)}")
    for name in sorted(places.keys() - {FACTORS}):
        check_place(header, name)
    if (experts := sum(place.shape[0] for place in places.values() if len(place.shape) == 3)) > MOST_EXPERTS:
        raise refusal(header, f"has {experts:,} matrices of experts; at most {MOST_EXPERTS:,} are read")
    try:
        check_fields(header.path, fields := fields_of(header, known), OF_CONFIG)
        return fields
    except (LookupError, TypeError, ArithmeticError, struct.error) as error:
        raise refusal(header, f"has settings that no model has ({error!r})") from error


def fields_of(header: GGUFHeader, known: Architecture) -> dict[str, Any]:
    """Return what `gguf_config` returns; whatever a wrong type or a zero raises for settings that no model has."""
    settings, places = header.settings, header.places
    parts = settings.get("split.count", 1)
    if not isinstance(parts, int) or parts > 1:
        raise refusal(header, f"is one of {parts!r:.40} parts (llama-gguf-split --merge joins them)")
    own = {name.removeprefix(f"{header.architecture}."): value for name, value in settings.items()}
    missing = [name for name in list(FIELDS)[:5] if not isinstance(own.get(name), int)]
    if missing or EMBEDDING not in places:
        raise refusal(header, f"has no {missing[0] if missing else EMBEDDING}, or not one number")
    layers = len({found[1] for name in places if (found := LAYER.match(name)) is not None})
    if own["block_count"] > layers:
        raise refusal(header, f"has weights of {layers} layers, and block_count is {own['block_count']}")
    fields = dict(known.defaults) | {name: own[key] for key, name in FIELDS.items() if own.get(key)}
    fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    ids = {name: settings.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    if wrong := [f"{name}_token_id is {each!r:.40}" for name, each in ids.items() if not isinstance(each, int | None)]:
        raise refusal(header, f"has no number where {wrong[0]}")
    ends = sorted({each for each in (ids["eos"], ids["eot"]) if each is not None})
    return fields | position_fields(header, own, fields) | {
        "model_type": known.model_type, "vocab_size": places[EMBEDDING].shape[0],
        "tie_word_embeddings": HEAD not in places, "bos_token_id": ids["bos"], "pad_token_id": ids["padding"],
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None)}


def position_fields(header: GGUFHeader, own: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of RoPE, and of the scale of Gemma 3's scores. ValueError for a RoPE that is not read."""
    kind, size = own.get("rope.scaling.type", "none"), fields["head_dim"]
    turned = own.get("rope.dimension_count", size)
    if not isinstance(turned, int) or not isinstance(size, int):
        raise refusal(header, f"has the head size {size!r:.40} and the rope.dimension_count {turned!r:.40}; whole "
                              "numbers are needed")
    rope = {"rope_theta": own.get("rope.freq_base", 1e4), "rope_type": "default"}
    if kind not in ("none", "linear") or (kind == "linear" and FACTORS in header.places):
        raise refusal(header, f"scales positions in the way {kind!r:.40}, which is not read")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": own["rope.scaling.factor"]}
    if FACTORS in header.places:
        rope |= llama3(header, rope["rope_theta"], size)
    if turned != size:
        rope["partial_rotary_factor"] = turned / size
    if header.architecture != "gemma3":
        return {"rope_parameters": rope}
    if own["block_count"] == 62:  # 27B, where llama.cpp also scales in this way
        size = fields["hidden_size"] // fields["num_attention_heads"]
    return {"query_pre_attn_scalar": size, "rope_parameters": {
        "full_attention": rope, "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}}


def llama3(header: GGUFHeader, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the settings of Llama 3's RoPE that give the stored factors. ValueError if none do."""
    place = header.places[FACTORS]
    if place.shape != (head_dim // 2,) or not 2 <= head_dim <= MOST_HEAD or type_of(place.number)[0].name != "F32":
        raise refusal(header, f"has {FACTORS} of the shape {place.shape} and the type {place.number} for heads of "
                              f"{head_dim}; numbers in F32, for heads of {MOST_HEAD:,} at most, are read")
    with header.path.open("rb") as file:
        file.seek(place.start)
        factors = struct.unpack(f"<{head_dim // 2}f", file.read(2 * head_dim))
    context, most = 8192, max(factors)  # Llama 3's in pretraining, and the factor of the lowest frequencies
    for number, factor in enumerate(factors):
        turns = context / (2 * pi * theta ** (2 * number / head_dim))
        smooth = min(max((turns - 1) / 3, 0.0), 1.0)
        if not isclose(factor, 1 / ((1 - smooth) / most + smooth), rel_tol=1e-3):
            raise refusal(header, f"scales positions by {FACTORS}, which are not Llama 3's, and not read")
    return {"rope_type": "llama3", "factor": most, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": context}


def refusal(header: GGUFHeader, why: str) -> ValueError:
    return ValueError(f"{header.path} {why}. Take the model's checkpoint in 16 bits, in safetensors")
