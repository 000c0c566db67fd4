"""The models and sequences that are sampled, for a card and for a CPU."""

from dataclasses import dataclass
from typing import Any

LORA_RANK = 16
BLOCK = 128  # most tokens of a block of vLLM's KV cache


@dataclass(frozen=True)
class Shape:
    """A Llama with random weights, and the sequences of one call: `prompts` x `n`, all of the same length."""

    config: dict[str, Any]
    prompts: int
    n: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.n

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def kv_bytes(self) -> int:
        """Bytes of a 16-bit KV cache for all sequences, with two blocks to spare for each."""
        config = self.config
        per_token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        return per_token * self.sequences * (self.context + 2 * BLOCK)


SHAPES = {
    "full": Shape(  # Llama 3.1 8B
        {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072},
        prompts=8, n=8, prompt_tokens=128, completion_tokens=1024,
    ),
    "3b": Shape(  # Qwen2.5 3B, but for its biases
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
         "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768,
         "tie_word_embeddings": True},
        prompts=8, n=8, prompt_tokens=100, completion_tokens=202,
    ),
    "tiny": Shape(
        {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 4096},
        prompts=2, n=8, prompt_tokens=16, completion_tokens=48,
    ),
}
