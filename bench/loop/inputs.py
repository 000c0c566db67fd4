"""Inputs of all providers of the loop's benchmarks: a model, prompts, rewards, and the share of the card for vLLM.

Nothing here imports the package, or torch at the top, so that it also runs in a peer's environment.
"""

import json
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.rollout.shapes import LORA_RANK, SHAPES, Shape

GIB = 2**30
ROOM = 4 * GIB  # memory that a vLLM with its own weights needs beside weights and KV cache
NO_CARD = 64 * GIB  # bytes of which the share is taken on the CPU
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GENERATIONS = {"full": 8, "3b": 8, "tiny": 4}
TOKENS = {"full": (1024, 4096), "3b": (100, 202), "tiny": (24, 32)}  # per prompt, per completion
PACKAGE = Shape({}, prompts=32, n=8, prompt_tokens=192, completion_tokens=64)  # steps of the model in the package


def loop_shape(name: str, prompts: int = 1) -> Shape:
    """Return the model called `name` in bench/rollout/shapes.py with a step's sequences, all of one length."""
    prompt_tokens, completion_tokens = TOKENS[name]
    return replace(SHAPES[name], prompts=prompts, n=GENERATIONS[name], prompt_tokens=prompt_tokens,
                   completion_tokens=completion_tokens)


class RandomModel:
    """Random weights, in NF4 for our providers. Completions have the full length and are rewarded by their place."""

    four_bit, dtype, whole, checkpointing, learning_rate = True, "bfloat16", True, True, 1e-6
    lora = {"r": LORA_RANK, "lora_alpha": LORA_RANK}

    def __init__(self, size: Shape) -> None:
        self.size, self.reward = size, ByPlace(size.n)

    def rows(self, tokenizer: Any, steps: int) -> list[dict[str, Any]]:
        """Return the prompts of all steps: random digits, all with exactly `size.prompt_tokens` tokens."""
        source, rows, wanted = random.Random(0), [], self.size.prompt_tokens
        for _ in range(steps * self.size.prompts):
            text = "".join(f"{source.randrange(10)} " for _ in range(wanted))[:wanted]
            if (tokens := len(tokenizer(text)["input_ids"])) != wanted:
                raise ValueError(f"a prompt has {tokens} tokens, wanted {wanted}: this is another tokenizer")
            rows.append({"prompt": text})
        return rows


class PackageModel:
    """The model in the package, in float32 on a CPU, with problems from a file. Completions end where the model ends
    them; the learning rate is 0, so that they keep their lengths."""

    four_bit, whole, checkpointing, learning_rate = False, False, False, 0.0
    size, lora = PACKAGE, {"r": 16, "lora_alpha": 32}

    def __init__(self, problems: Path, device: str) -> None:
        self.problems, self.reward = problems, RightAnswer()
        self.dtype = "float32" if device == "cpu" else "bfloat16"

    def rows(self, tokenizer: Any, steps: int) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self.problems.read_text().splitlines()]
        if len(rows) < steps * self.size.prompts:
            raise ValueError(f"{self.problems} holds {len(rows)} prompts; {steps} steps need more")
        return rows[: steps * self.size.prompts]


class ByPlace:
    """A reward by the completion's place in its group. It differs within each group, and is the same for all providers,
    whatever a random model writes."""

    __name__ = "by_place"

    def __init__(self, n: int) -> None:
        self.n = n
        self.tokens: list[int] = []  # number of completion tokens in each call; there is one call per step

    def __call__(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self.tokens.append(sum(map(len, completion_ids)))
        return [place % self.n / (self.n - 1) for place in range(len(completion_ids))]


class RightAnswer:
    """The recipe's rewards: 1 for the right answer as the last integer, 0.1 for a last line `Answer: <integer>`."""

    __name__ = "right_answer"

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, completions: list[Any], answer: list[str], completion_ids: list[list[int]],
                 **columns: Any) -> list[float]:
        self.tokens.append(sum(map(len, completion_ids)))
        texts = [completion[-1]["content"] for completion in completions]
        return [self.pay(text, int(right)) for text, right in zip(texts, answer, strict=True)]

    def pay(self, text: str, right: int) -> float:
        numbers, last = re.findall(r"-?\d+", text), text.strip().rpartition("\n")[2]
        formed = last.startswith("Answer: ") and last.removeprefix("Answer: ").isdecimal()
        return float(bool(numbers) and int(numbers[-1]) == right) + 0.1 * formed


class Patience:
    """The time limit of a provider. A step that would not end in time is not begun."""

    def __init__(self, limit: float) -> None:
        self.began, self.limit = time.monotonic(), limit

    def another(self, steps: list[dict[str, dict[str, Any]]]) -> bool:
        """Return whether there is time for one more step like the last one, with a tenth of the limit to spare."""
        last = sum(steps[-1]["seconds"].values())
        return time.monotonic() - self.began + last < 0.9 * self.limit


def weight_bytes(shape: Shape, four_bit: bool) -> int:
    """Return the bytes of the model: 16 bits per number, or 4 bits and scales in quantized linear layers."""
    size = shape.config
    hidden, inner, head = size["hidden_size"], size["intermediate_size"], size["head_dim"]
    queries, keys = size["num_attention_heads"] * head, size["num_key_value_heads"] * head
    linears = size["num_hidden_layers"] * hidden * (2 * queries + 2 * keys + 3 * inner)
    return int(4 * size["vocab_size"] * hidden + linears * (0.52 if four_bit else 2))


def engine_share(size: Shape, four_bit: bool, gib: float | None) -> float:
    """Return the share of the card that a vLLM with its own weights needs: weights, our KV cache, working memory."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else NO_CARD
    wanted = weight_bytes(size, four_bit) + size.kv_bytes + ROOM
    return round(min(wanted, 0.95 * (gib * GIB if gib else total)) / total, 4)
