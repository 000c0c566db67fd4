"""What all providers of the loop benchmark get: prompts, the reward, and the share of the card for vLLM."""

import random
import time
from typing import Any

from bench.loop.shapes import weight_bytes
from bench.rollout.shapes import Shape

GIB = 2**30
ROOM = 4 * GIB  # that a vLLM with its own weights needs beside these and the cache
NO_CARD = 64 * GIB  # what the share refers to on the CPU


def prompt_rows(tokenizer: Any, size: Shape, steps: int) -> list[dict[str, str]]:
    """The prompts of all steps: random digits, all with exactly `size.prompt_tokens` tokens."""
    source, rows = random.Random(0), []
    for _ in range(steps * size.prompts):
        text = "".join(f"{source.randrange(10)} " for _ in range(size.prompt_tokens))[: size.prompt_tokens]
        found = len(tokenizer(text)["input_ids"])
        if found != size.prompt_tokens:
            raise ValueError(f"a prompt has {found} tokens, wanted {size.prompt_tokens}: this is another tokenizer")
        rows.append({"prompt": text})
    return rows


class Patience:
    """How long a provider may take. A step that would not end in time is not begun."""

    def __init__(self, limit: float) -> None:
        self.began, self.limit = time.monotonic(), limit

    def another(self, steps: list[dict[str, dict[str, Any]]]) -> bool:
        """Whether there is time for one more step like the last one, and a tenth to spare."""
        last = sum(steps[-1]["seconds"].values())
        return time.monotonic() - self.began + last < 0.9 * self.limit


class ByPlace:
    """A reward by the completion's place in its group. It differs within each group, and is the same for all providers,
    whatever a random model writes."""

    __name__ = "by_place"

    def __init__(self, n: int) -> None:
        self.n = n
        self.tokens: list[int] = []  # of the completions of each call, which is one a step

    def __call__(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self.tokens.append(sum(map(len, completion_ids)))
        return [place % self.n / (self.n - 1) for place in range(len(completion_ids))]


def engine_share(size: Shape, four_bit: bool, gib: float | None) -> float:
    """The share of the card that a vLLM with weights of its own needs: weights, our cache, and room to work in."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else NO_CARD
    wanted = weight_bytes(size, four_bit) + size.kv_bytes + ROOM
    return round(min(wanted, 0.95 * (gib * GIB if gib else total)) / total, 4)
