"""A small random gpt-oss, stored as the published one: experts in MXFP4, Harmony's special tokens and template."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GptOssConfig, GptOssForCausalLM, Mxfp4Config

STACKS = ("gate_up_proj", "down_proj")
MARKS = ["<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"]


def gpt_oss_config(layers: int = 2, experts: int = 32, window: int = 128, **options: Any) -> GptOssConfig:
    """Return a config with a window on every other layer, and YaRN that stretches 128 positions to 1,024."""
    fields: dict[str, Any] = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": experts,
        "num_experts_per_tok": min(4, experts), "sliding_window": window, "max_position_embeddings": 1024,
        "pad_token_id": 0, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 128}}
    return GptOssConfig(**(fields | options))


def gpt_oss_model(seed: int = 0, **options: Any) -> GptOssForCausalLM:
    """Return transformers' model in float32 with random weights, biases and sinks."""
    torch.manual_seed(seed)
    model = GptOssForCausalLM(gpt_oss_config(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 1.0 if "sinks" in name else 0.15)
    return model.eval()


def gpt_oss_tokenizer() -> Any:
    """Return the tokenizer of the package's tiny model with Harmony's special tokens and TRL's template for gpt-oss."""
    tokenizer = AutoTokenizer.from_pretrained(str(files("lowmem_grpo") / "assets" / "tiny"))
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS, "eos_token": "<|return|>"})
    tokenizer.chat_template = (files("trl") / "chat_templates" / "gptoss.jinja").read_text()
    return tokenizer


def gpt_oss_folder(folder: Path, experts_in: str = "mxfp4", dtype: torch.dtype = torch.bfloat16,
                   **options: Any) -> Path:
    """Write the model to `folder`, with experts in "mxfp4" or "16bit", and return the folder."""
    tokenizer = gpt_oss_tokenizer()
    ends = tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    model = gpt_oss_model(**({"vocab_size": 384, "eos_token_id": ends[0],
                              "pad_token_id": tokenizer.pad_token_id} | options)).to(dtype)
    model.generation_config.update(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if experts_in == "mxfp4":
        store_in_mxfp4(folder)
    return folder


def store_in_mxfp4(folder: Path) -> None:
    """Replace each stack of experts (E, in, out) by random codes (E, out, in / 32, 16) and scales (E, out, in / 32)."""
    torch.manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(STACKS)]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, (experts, rows, columns // 32), dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


def plain_gpt_oss(folder: Path, dtype: torch.dtype = torch.float32) -> GptOssForCausalLM:
    """Return transformers' own model of a folder, with eager attention and its experts decoded to `dtype`."""
    stored = json.loads((folder / "config.json").read_text()).get("quantization_config")
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if stored else {}
    model = GptOssForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **options)
    return model.to(dtype).eval().requires_grad_(False)
