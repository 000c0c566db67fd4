"""Rows for environments that make their own tasks: a seed each."""

import random
from typing import Any

HELD_OUT = 1 << 30  # the smallest seed of rows that are held out


def seeded_rows(count: int, seed: int = 0, held_out: bool = False) -> list[dict[str, Any]]:
    """So many rows, each with a `seed` that `reset(seed=...)` gets. All episodes of a group have the same one, so that
    they differ in play and not in luck. Seeds of rows that are held out are HELD_OUT or more, the others are less, so
    that tasks made of `seed % n` are of the same kind in both."""
    drawn, least = random.Random(f"{seed}-{held_out}"), HELD_OUT if held_out else 0
    return [{"prompt": [{"role": "user", "content": ""}], "seed": least + drawn.getrandbits(30)} for _ in range(count)]
