"""The losses of the Tinker protocol against loops over single tokens, in float64, values and gradients."""

import math
from itertools import product

import pytest
import torch
from tables import every_row, not_refused
from torch import Tensor

from lowmem_grpo.losses.token_losses import LOSSES, checked_settings, token_losses

IDS = torch.tensor([0, 0, 0, 1, 1, 2])


def clip(ratio: float, settings: dict[str, float]) -> float:
    return min(max(ratio, settings["clip_low_threshold"]), settings["clip_high_threshold"])


def by_hand(name: str, p: list[float], values: dict[str, list[float]], settings: dict[str, float]
            ) -> tuple[list[float], list[float]]:
    """(loss, its derivative by p) of every token, of which gspo's derivative counts the whole sequence's."""
    losses, slopes = [], [0.0] * len(p)
    for t in range(len(p)):
        if name == "cross_entropy":
            losses.append(-values["weights"][t] * p[t])
            slopes[t] -= values["weights"][t]
            continue
        a, q = values["advantages"][t], values["logprobs"][t]
        r = math.exp(p[t] - q)
        if name == "importance_sampling":
            losses.append(-r * a)
            slopes[t] -= r * a
        elif name == "cispo":
            losses.append(-clip(r, settings) * a * p[t])
            slopes[t] -= clip(r, settings) * a
        elif name == "dro":
            losses.append(-(a * p[t] - settings["beta"] / 2 * (p[t] - q) ** 2))
            slopes[t] -= a - settings["beta"] * (p[t] - q)
        else:
            same = [s for s in range(len(p)) if IDS[s] == IDS[t]] if name == "gspo" else [t]
            mask = {s: values["sequence_ratio_mask"][s] if name == "gspo" else 1.0 for s in same}
            weight = sum(mask.values()) or 1.0
            r = math.exp(sum(mask[s] * (p[s] - values["logprobs"][s]) for s in same) / weight)
            losses.append(-min(r * a, clip(r, settings) * a))
            if r * a <= clip(r, settings) * a:
                for s in same:
                    slopes[s] -= r * a * mask[s] / weight
    return losses, slopes


def problem() -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    draw = torch.randn(4, 6, dtype=torch.float64)
    return -draw[0].exp(), {
        "weights": draw[1], "advantages": draw[2], "logprobs": -draw[0].exp() + 0.3 * draw[3],
        "sequence_ratio_mask": torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)}


@every_row("name", LOSSES)
def test_values_and_gradients_are_those_of_a_loop_over_tokens(name: str) -> None:
    logprobs, values = problem()
    settings = checked_settings(name, {})
    logprobs.requires_grad_()
    found = token_losses(name, logprobs, values, settings, IDS, 3)
    found.sum().backward()
    losses, slopes = by_hand(name, logprobs.tolist(), {key: one.tolist() for key, one in values.items()}, settings)
    assert found.tolist() == pytest.approx(losses, rel=1e-12, abs=1e-14)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(slopes, rel=1e-12, abs=1e-14)


def test_the_problem_meets_both_bounds_of_the_ratio_and_both_signs_of_the_advantage() -> None:
    logprobs, values = problem()
    ratio = (logprobs - values["logprobs"]).exp()
    assert (ratio < 0.8).any() and (ratio > 1.2).any()
    assert (values["advantages"] < 0).any() and (values["advantages"] > 0).any()


def test_what_is_not_offered_is_refused_by_name() -> None:
    assert not_refused(lambda given: checked_settings(*given), [
        (("stable_reinforce", {}), "importance_sampling"), (("custom", {}), "forward_backward_custom"),
        (("dpo", {}), "cross_entropy, importance_sampling, ppo"), (("ppo", {"epsilon": 0.2}), "'epsilon'"),
        (("cispo", {"clip_low_threshold": 1.5}), "both are ratios"), (("dro", {"beta": "high"}), "'high'"),
        (("dro", {"beta": float("nan")}), "nan"), (("cross_entropy", {"beta": 1.0}), "no settings"),
    ]) == []


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_ratio_that_overflows_is_no_nan_where_its_bound_or_an_advantage_of_zero_holds(name: str) -> None:
    for change, advantage, dtype in product((-1000.0, -200.0, 200.0, 1000.0), (1.0, 0.0, -1.0),
                                            (torch.float32, torch.float64)):
        if change > 0 and (advantage < 0 or (advantage > 0 and name == "importance_sampling")) and name != "cispo":
            continue  # the loss itself is infinite there
        logprobs = torch.full((2,), -1.0, dtype=dtype, requires_grad=True)
        values = {"advantages": torch.tensor([advantage, 0.5], dtype=dtype),
                  "logprobs": torch.tensor([-1.0 - change, -1.0], dtype=dtype), "sequence_ratio_mask": torch.ones(2)}
        found = token_losses(name, logprobs, values, checked_settings(name, {}), torch.tensor([0, 1]), 2)
        found.sum().backward()
        assert logprobs.grad is not None and found.isfinite().all() and logprobs.grad.isfinite().all()
        ratio = {True: 1.2, False: 0.8 if advantage < 0 or name == "cispo" else 0.0}[change > 0]
        expected = -ratio * advantage * (-1.0 if name == "cispo" else 1.0)
        assert found[0].item() == pytest.approx(0.0 if name == "importance_sampling" else expected, abs=1e-6)
        assert logprobs.grad[0].item() == pytest.approx(-ratio * advantage if name == "cispo" else 0.0, abs=1e-6)
        assert logprobs.grad[1].item() == pytest.approx(-0.5)


def test_a_bound_of_zero_holds_too() -> None:
    settings = checked_settings("ppo", {"clip_low_threshold": 0.0, "clip_high_threshold": 0.0})
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    values = {"advantages": torch.tensor([1.0, -1.0]), "logprobs": torch.tensor([-1.0, -1.0])}
    found = token_losses("ppo", logprobs, values, settings, torch.tensor([0, 1]), 2)
    found.sum().backward()
    assert found.tolist() == [0.0, 1.0] and logprobs.grad is not None and logprobs.grad.tolist() == [0.0, 1.0]
