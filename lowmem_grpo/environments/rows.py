"""Dataset rows for environments that make their own tasks from a seed."""

import random
from typing import Any

HELD_OUT = 1 << 30  # the smallest seed of held-out rows


def seeded_rows(count: int, seed: int = 0, held_out: bool = False) -> list[dict[str, Any]]:
    """Return `count` rows, each with a `seed` that is passed to `reset(seed=...)`. All episodes of a group share the
    seed, so that they differ in play and not in luck. Held-out rows have seeds from HELD_OUT on, others smaller ones,
    so that the two never overlap, and tasks made from `seed % n` are of the same kind in both."""
    drawn, least = random.Random(f"{seed}-{held_out}"), HELD_OUT if held_out else 0
    return [{"prompt": [{"role": "user", "content": ""}], "seed": least + drawn.getrandbits(30)} for _ in range(count)]
