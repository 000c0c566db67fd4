"""Means over micro-batches, weighted by their tokens."""

from math import nan

import pytest
from tables import every_row
from torch import tensor

from lowmem_grpo.losses.objective import Reducer


@every_row(("added", "expected"), [
    ([({"kl": 1.0}, 3), ({"kl": 5.0}, 1)], {"kl": 2.0}),
    ([({"low/min": low, "high/max": high}, 10) for low, high in ((1.0, 5.0), (0.5, 9.0), (2.0, 3.0))],
     {"low/min": 0.5, "high/max": 9.0}),
    ([({"entropy": 1.0}, 2), ({"entropy": 4.0, "kl": 3.0}, 1)], {"entropy": 2.0, "kl": 3.0}),  # of those that have it
    ([], {}), ([({"kl": 0.0}, 0)], {"kl": 0.0}), ([({"kl": nan}, 0), ({"kl": 3.0}, 2)], {"kl": 3.0}),
])
def test_means_are_weighted_by_tokens_and_extremes_are_not(
    added: list[tuple[dict[str, float], float]], expected: dict[str, float]
) -> None:
    reducer = Reducer()
    for metrics, weight in added:
        reducer.add({name: tensor(value) for name, value in metrics.items()}, weight)
    assert reducer.result() == pytest.approx(expected)
