"""A model of many shards on disk."""

from pathlib import Path

import torch
from small_models import TINY
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


def save_large(folder: Path) -> tuple[int, int]:
    """A random model in bfloat16, in several files; its bytes, and those of its largest matrix."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=1536, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=True, dtype="bfloat16",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="90MB")
    finally:
        torch.set_default_dtype(before)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(sizes) >= 4
    return sum(sizes), 2 * config.hidden_size * config.intermediate_size
