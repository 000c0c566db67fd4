"""A part of the attack on numbers, and that it sees what it looks for."""

import pytest
import torch

from tests.attacks import numbers


@pytest.mark.slow
@pytest.mark.attack
def test_no_loss_metric_or_gradient_leaves_its_digits_where_float32_overflows_or_cancels() -> None:
    found = list(numbers.verdicts(quick=True))
    assert len(found) > 5000 and not [verdict for verdict in found if not verdict.held]


def test_the_attack_sees_nan_zero_in_place_of_infinity_and_lost_digits() -> None:
    truth = torch.tensor([1.0, -2.0, 1e40])
    right = torch.tensor([1.0, -2.0, torch.inf])
    assert not numbers.differs(right, truth, 1e-6, may_overflow=False)
    for place, wrong in ((0, torch.nan), (0, torch.inf), (1, -2.001), (2, 0.0)):
        ours = right.clone()
        ours[place] = wrong
        assert numbers.differs(ours, truth, 1e-6, may_overflow=False)
        assert bool(numbers.differs(ours, truth, 1e-6, may_overflow=True)) == ours[place].isfinite()
