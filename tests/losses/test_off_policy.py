"""Corrections for the sampler's mismatch and the off-policy mask, against loops in float64."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_loss import LENGTHS, LONGEST, STEP, close, close_with_gradients, example, mean, naive_loss, places_of
from tables import every_row
from torch import Tensor

from lowmem_grpo.losses.loss_types import LOSS_TYPES
from lowmem_grpo.losses.off_policy import (
    CORRECTIONS,
    MismatchWatch,
    correction_weights,
    k3_bound,
    mean_k3,
    off_policy_sequence_mask,
)
from lowmem_grpo.losses.policy_loss import grpo_loss

Bounds = tuple[float | None, float | None]
BOUNDS: dict[str, list[Bounds]] = {
    "token_truncate": [(None, 1.3), (0.8, 1.3), (0.8, None)], "token_mask": [(None, 1.3), (0.8, 1.3), (0.8, None)],
    "sequence_truncate": [(None, 1.5), (0.5, 1.5)], "sequence_mask": [(None, 1.5), (0.5, 1.5)],
    "geometric_mask": [(0.9, 1.1)], "k3_mask": [(None, 0.05)],
}
CASES = [(mode, bounds) for mode, several in BOUNDS.items() for bounds in several]
OPTIONS: dict[str, dict[str, Any]] = {
    "dapo": {"epsilon": 0.2, "delta": None}, "grpo": {"epsilon": 0.2, "delta": 1.9},
    "gspo": {"epsilon": 0.2, "epsilon_high": 0.3, "delta": None}, "cispo": {"epsilon_high": 1.2},
    "sapo": {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}, "gmpo": {"epsilon": 0.4}, "reinforce": {},
}
KL: dict[str, Any] = {"beta": 0.07, "kl_estimator": "k3", "use_bias_correction_kl": True}


def mismatches(tokens: dict[str, Tensor]) -> list[float]:
    return (tokens["old_logprobs"] - tokens["rollout_logprobs"]).tolist()


def within(value: float, bounds: Bounds) -> bool:
    low, high = bounds
    return (low is None or value >= low) and (high is None or value <= high)


def truncated(value: float, bounds: Bounds) -> float:
    low, high = bounds
    value = value if low is None else max(value, low)
    return value if high is None else min(value, high)


def weights_of(mode: str, own: list[float], bounds: Bounds) -> list[float]:
    """The weights of one sequence's tokens, from their mismatches."""
    ratios = [math.exp(d) for d in own]
    product = math.prod(ratios)
    if mode == "token_truncate":
        return [truncated(ratio, bounds) for ratio in ratios]
    if mode == "token_mask":
        return [ratio if within(ratio, bounds) else 0.0 for ratio in ratios]
    if mode == "sequence_truncate":
        return [truncated(product, bounds)] * len(own)
    if mode == "sequence_mask":
        return [product if within(product, bounds) else 0.0] * len(own)
    kept = product ** (1 / len(own)) if mode == "geometric_mask" else mean([r - math.log(r) - 1 for r in ratios])
    return [1.0 if within(kept, bounds) else 0.0] * len(own)


def naive_weights(mode: str, tokens: dict[str, Tensor], bounds: Bounds) -> list[float]:
    found, apart = [0.0] * len(tokens["sequence_ids"]), mismatches(tokens)
    for places in places_of(tokens["sequence_ids"]).values():
        for place, weight in zip(places, weights_of(mode, [apart[t] for t in places], bounds), strict=True):
            found[place] = weight
    return found


def correction(mode: str, bounds: Bounds) -> dict[str, Any]:
    return {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_min": bounds[0], "vllm_importance_sampling_clip_max": bounds[1]}


def ours(tokens: dict[str, Tensor], **options: Any) -> Any:
    return grpo_loss(**(tokens | {"max_completion_length": LONGEST} | STEP | options))


def weights(mode: str, apart: Tensor, ids: Tensor, bounds: Bounds) -> Tensor:
    return correction_weights(mode, apart, torch.zeros_like(apart), ids, torch.bincount(ids), bounds)


# The corrections


def test_every_correction_is_held_to_a_formula() -> None:
    assert set(BOUNDS) == set(CORRECTIONS)


def test_the_bounds_of_the_cases_bind_something() -> None:
    for mode, bounds in CASES:
        bound = [naive_weights(mode, example(seed), bounds) for seed in range(10)]
        free = [naive_weights(mode, example(seed), (None, None)) for seed in range(10)]
        assert bound != free, (mode, bounds)
        assert any(some not in (0.0, bounds[0], bounds[1]) for one in bound for some in one), (mode, bounds)


@settings(deadline=None, max_examples=40)
@given(case=st.sampled_from(CASES), order=st.permutations(range(sum(LENGTHS))))
def test_weights_do_not_depend_on_where_tokens_lie(case: tuple[str, Bounds], order: list[int]) -> None:
    tokens, places = example(), torch.tensor(order)
    apart, ids = tokens["old_logprobs"] - tokens["rollout_logprobs"], tokens["sequence_ids"]
    close(weights(case[0], apart[places], ids[places], case[1]), weights(case[0], apart, ids, case[1])[places])


@pytest.mark.parametrize(("mode", "inside"), [("token_mask", 2.0), ("sequence_mask", 2.0), ("geometric_mask", 1.0)])
def test_a_ratio_or_a_mean_k3_on_its_bound_is_kept(mode: str, inside: float) -> None:
    one = torch.zeros(1, dtype=torch.int64)
    ratio = torch.tensor([2.0], dtype=torch.float64).log()
    exactly, beyond = ratio.exp().item(), math.nextafter(ratio.exp().item(), 0)
    for bounds in ((None, exactly), (exactly, None), (exactly, exactly)):
        close(weights(mode, ratio, one, bounds), torch.tensor([inside], dtype=torch.float64))
    for bounds in ((None, beyond), (math.nextafter(exactly, 9), None)):
        assert weights(mode, ratio, one, bounds) == 0
    apart = torch.tensor([0.25], dtype=torch.float64)
    exactly = (torch.expm1(apart) - apart).item()
    assert weights("k3_mask", apart, one, (None, exactly)) == 1
    assert weights("k3_mask", apart, one, (None, math.nextafter(exactly, 0))) == 0


# In the loss


@every_row("loss_type", OPTIONS)
def test_a_corrected_loss_and_its_gradient_are_the_formulas(loss_type: str) -> None:
    tokens, case = example(), {"loss_type": loss_type} | OPTIONS[loss_type] | KL
    for mode, bounds in CASES:
        if mode == "token_mask" and loss_type in ("gspo", "gmpo"):
            continue  # refused: one ratio for the whole sequence
        result = ours(tokens, **case, **correction(mode, bounds))
        expected = naive_loss(tokens, case, False, naive_weights(mode, tokens, bounds))
        close_with_gradients(result.loss, expected, tokens["logprobs"])


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate", "token_mask"])
def test_vespo_takes_the_correction_into_its_weight(mode: str) -> None:
    tokens, bounds = example(), (0.8, 1.3)
    case = {"loss_type": "vespo", "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
            "vespo_lambda_neg": 2.0} | KL
    factors, extras = naive_weights(mode, tokens, bounds), {}
    for sequence, places in places_of(tokens["sequence_ids"]).items():
        own = [max(math.log(factors[t]) if factors[t] else -math.inf, math.log(1e-8)) for t in places]
        extras[sequence] = own[0] if mode == "sequence_truncate" else sum(own)
    result = ours(tokens, **case, **correction(mode, bounds))
    close_with_gradients(result.loss, naive_loss(tokens, case, False, extras=extras), tokens["logprobs"])
    assert not torch.equal(result.loss, ours(tokens, **case).loss)


def test_a_correction_does_not_weigh_the_kl_term() -> None:
    tokens = example() | {"advantages": torch.zeros(sum(LENGTHS)).double()}
    assert torch.equal(ours(tokens, **KL, **correction("token_truncate", (None, 1.3))).loss, ours(tokens, **KL).loss)


def test_nothing_is_corrected_that_nobody_asked_for() -> None:
    tokens = example()
    without = {name: value for name, value in tokens.items() if name != "rollout_logprobs"}
    unasked = ({}, {"vllm_importance_sampling_correction": False}, {"correct_mismatch": False})
    for loss_type, options in product(LOSS_TYPES, unasked):
        result = ours(tokens, loss_type=loss_type, **options)
        assert torch.equal(result.loss, ours(without, loss_type=loss_type).loss), (loss_type, options)
        assert "sampling/importance_sampling_ratio/mean" not in result.metrics


def test_a_trainers_decision_takes_the_settings_place() -> None:
    tokens, asked = example(), correction("token_mask", (0.8, 1.3))
    corrected, plain = ours(tokens, **asked), ours(tokens)
    undecided = asked | {"vllm_importance_sampling_correction": None}
    assert not torch.equal(corrected.loss, plain.loss)
    assert torch.equal(ours(tokens, **undecided, correct_mismatch=True).loss, corrected.loss)
    assert torch.equal(ours(tokens, **undecided).loss, plain.loss)
    assert torch.equal(ours(tokens, **asked, correct_mismatch=False).loss, plain.loss)


@pytest.mark.parametrize(("mode", "per_sequence"), [("token_truncate", False), ("sequence_truncate", True)])
def test_metrics_of_the_mismatch_are_those_of_tokens_or_of_sequences(mode: str, per_sequence: bool) -> None:
    tokens = example()
    metrics = ours(tokens, **correction(mode, (0.8, 1.3))).metrics
    found, name = naive_weights(mode, tokens, (0.8, 1.3)), "sampling/importance_sampling_ratio"
    if per_sequence:
        found = [found[places[0]] for places in places_of(tokens["sequence_ids"]).values()]
    apart = [abs(d) for d in mismatches(tokens)]
    expected = {f"{name}/min": min(found), f"{name}/mean": mean(found), f"{name}/max": max(found),
                "sampling/sampling_logp_difference/mean": mean(apart),
                "sampling/sampling_logp_difference/max": max(apart)}
    for key, value in expected.items():
        close(metrics[key].item(), value)


def test_on_policy_the_mismatch_is_against_the_policy_itself() -> None:
    tokens = example() | {"old_logprobs": None}
    mismatch = (tokens["logprobs"].detach() - tokens["rollout_logprobs"]).exp()
    result = ours(tokens, loss_type="reinforce", **correction("token_truncate", (None, 1.3)))
    close(result.samples["mismatch"], mismatch)
    (gradient,) = torch.autograd.grad(result.loss, tokens["logprobs"])
    close(gradient, -tokens["advantages"] * mismatch.clamp(max=1.3) / STEP["num_tokens_in_step"])


# The off-policy mask (OPSM)


@pytest.mark.parametrize("loss_type", [*OPTIONS, "gspo_token"])
@pytest.mark.every(2)
def test_masked_completions_are_the_bad_ones_that_drifted(loss_type: str) -> None:
    options, masked = OPTIONS | {"gspo_token": OPTIONS["gspo"]}, dict.fromkeys(product((True, False), (0.02, 0.2)), 0)
    for (sampled, threshold), seed in product(masked, range(4)):
        tokens, case = example(seed), {"loss_type": loss_type} | options[loss_type] | KL
        sampler, factors = tokens["rollout_logprobs" if sampled else "old_logprobs"], [1.0] * sum(LENGTHS)
        for places in places_of(tokens["sequence_ids"]).values():
            drift = mean([(sampler[t] - tokens["logprobs"][t]).item() for t in places])
            if tokens["advantages"][places[0]] < 0 and drift > threshold:
                masked[sampled, threshold] += len(places)
                factors = [0.0 if t in places else factor for t, factor in enumerate(factors)]
        given = tokens if sampled else tokens | {"rollout_logprobs": None}
        result = ours(given, **case, off_policy_mask_threshold=threshold)
        close_with_gradients(result.loss, naive_loss(tokens, case, False, factors), tokens["logprobs"])
        close(result.metrics["off_policy/masked_share"].item(), 1 - mean(factors))
    assert all(masked.values())


def test_the_off_policy_mask_keeps_good_completions_and_those_at_its_threshold() -> None:
    ids, policy = torch.tensor([0, 0]), torch.tensor([-1.0, -2.0])
    for advantage, drift, kept in ((1.0, 9.0, True), (0.0, 9.0, True), (-1.0, 9.0, False), (-1.0, 0.5, True),
                                   (-1.0, -9.0, True)):
        sampler = policy + torch.tensor([drift - 0.25, drift + 0.25])  # the mean counts, not a token
        found = off_policy_sequence_mask(policy, sampler, torch.full((2,), advantage), ids, torch.tensor([2]), 0.5)
        assert found.tolist() == [kept, kept], (advantage, drift)


def test_on_policy_the_off_policy_mask_drops_nothing() -> None:
    tokens = {name: value for name, value in example().items() if "old" not in name and "rollout" not in name}
    result = ours(tokens, off_policy_mask_threshold=1e-6)
    assert result.metrics["off_policy/masked_share"] == 0
    assert torch.equal(result.loss, ours(tokens).loss)


# When a correction is due


def test_a_correction_is_due_with_staleness_or_mismatch_and_only_then() -> None:
    ratio = torch.tensor([1.1, 0.9], dtype=torch.float64)
    expected = mean([r - math.log(r) - 1 for r in ratio.tolist()])
    assert mean_k3(ratio) == pytest.approx(expected, rel=1e-10) and mean_k3(torch.empty(0)) == 0
    broken = [mean_k3(torch.tensor([1.0, one])) for one in (math.nan, math.inf, 0.0)]
    assert not MismatchWatch(bound=1e-3).due(stale=False)
    for bound, k3, due in ((1e-3, expected, True), (1e-3, mean_k3(torch.tensor([1.01, 0.99])), False),
                           (0.01, 0.01, False), (0.01, 0.02, True), *((1e-3, one, True) for one in broken)):
        watch = MismatchWatch(bound=bound, last_k3=k3)
        assert watch.due(stale=False) is due and watch.due(stale=True)


@pytest.mark.parametrize(("dtype", "healthy", "wrong"), [
    (torch.bfloat16, (0.00095, 0.0023, 0.0013), 0.006), (torch.float16, (0.00002, 0.0001), 0.002),
    (torch.float32, (0.0, 1e-9), 0.002),
], ids=str)
def test_the_k3_of_a_healthy_run_calls_for_no_correction_and_values_near_the_bound_do_not_switch_it(
    dtype: torch.dtype, healthy: tuple[float, ...], wrong: float
) -> None:
    """The healthy values were measured on a published model."""
    watch, bound = MismatchWatch(k3_bound(dtype)), k3_bound(dtype)
    seen = []
    for k3 in (*healthy, wrong, 0.9 * bound, 1.1 * bound, 0.6 * bound, 0.5 * bound, 0.9 * bound, math.nan):
        watch.last_k3 = k3
        seen.append(watch.due(stale=False))
    assert seen == [*[False] * len(healthy), True, True, True, True, False, False, True]
