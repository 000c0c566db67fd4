"""Rows for environments that make their own tasks: a seed each."""

import random
from typing import Any


def seeded_rows(count: int, seed: int = 0, held_out: bool = False) -> list[dict[str, Any]]:
    """So many rows, each with a `seed` that `reset(seed=...)` gets. All episodes of a group have the same one, so that
    they differ in play and not in luck. Rows that are held out have odd seeds, the others even ones."""
    random_seeds = random.Random(f"{seed}-{held_out}")
    return [{"prompt": [{"role": "user", "content": ""}], "seed": 2 * random_seeds.getrandbits(30) + held_out}
            for _ in range(count)]
