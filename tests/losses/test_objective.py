"""Means over micro-batches, weighted by their tokens."""

import pytest
from torch import tensor

from lowmem_grpo.losses.objective import Reducer


def test_means_over_micro_batches_are_weighted_by_their_tokens() -> None:
    reducer = Reducer()
    reducer.add({"kl": tensor(1.0)}, 3)
    reducer.add({"kl": tensor(5.0)}, 1)
    assert reducer.result() == {"kl": pytest.approx(2.0)}


def test_minima_and_maxima_are_extremes_and_not_means() -> None:
    reducer = Reducer()
    for low, high in ((1.0, 5.0), (0.5, 9.0), (2.0, 3.0)):
        reducer.add({"ratio/min": tensor(low), "ratio/max": tensor(high)}, 10)
    assert reducer.result() == {"ratio/min": 0.5, "ratio/max": 9.0}


def test_a_metric_that_only_some_micro_batches_have_is_weighted_by_those() -> None:
    reducer = Reducer()
    reducer.add({"entropy": tensor(1.0)}, 2)
    reducer.add({"entropy": tensor(4.0), "kl": tensor(3.0)}, 1)
    assert reducer.result() == {"entropy": pytest.approx(2.0), "kl": pytest.approx(3.0)}


def test_nothing_added_and_no_weight_give_no_error() -> None:
    assert Reducer().result() == {}
    reducer = Reducer()
    reducer.add({"kl": tensor(0.0)}, 0)
    assert reducer.result() == {"kl": 0.0}
