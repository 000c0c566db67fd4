"""The models of the rollout benchmark, with the sequences of a step of the whole loop."""

from dataclasses import replace

from bench.rollout.shapes import SHAPES, Shape

TINY_TOKENS = (24, 32)  # of a prompt and of a completion
FULL_TOKENS = (1024, 4096)
GENERATIONS = {"full": 8, "tiny": 4}
TOKENS = {"full": FULL_TOKENS, "tiny": TINY_TOKENS}


def loop_shape(name: str, prompts: int = 1) -> Shape:
    """The model called `name` in bench/rollout/shapes.py, and a step's sequences, all of one length."""
    prompt_tokens, completion_tokens = TOKENS[name]
    return replace(
        SHAPES[name], prompts=prompts, n=GENERATIONS[name], prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )


def weight_bytes(shape: Shape, four_bit: bool) -> int:
    """Bytes of the model: 16 bits a number, or 4 and their scales where a linear layer is quantized."""
    size = shape.config
    hidden, inner, head = size["hidden_size"], size["intermediate_size"], size["head_dim"]
    queries, keys = size["num_attention_heads"] * head, size["num_key_value_heads"] * head
    linears = size["num_hidden_layers"] * hidden * (2 * queries + 2 * keys + 3 * inner)
    return int(4 * size["vocab_size"] * hidden + linears * (0.52 if four_bit else 2))
