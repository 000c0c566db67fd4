"""Advantages against numbers worked out by hand, loops over groups and subsets, and TRL's lines."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import every_row, not_refused
from torch import Tensor

from lowmem_grpo.losses.advantages import (
    ESTIMATORS,
    SCALE_REWARDS,
    AdvantageSettings,
    advantages_of,
    assign_advantages,
    combine_rewards,
    of_group,
)
from lowmem_grpo.losses.regularization import put_kl_in_reward, take_kl_from_rewards
from lowmem_grpo.types import Rollout, RolloutGroup

NAN = float("nan")
REWARDS = torch.tensor([[1.0, 3.0], [0.0, 4.0]])  # means 2 and 2; std sqrt(2) and sqrt(8); of the batch sqrt(10 / 3)
GROUPS = [[1.0, 0.0, 0.0, 2.5], [0.5, 0.5, 0.5, 0.5], [NAN, 1.0, 3.0, 0.0], [NAN, NAN, 0.7, NAN], [NAN] * 4,
          [NAN, 0.1, 0.1, 0.1]]
OF_GROUPS = ("grpo", "rloo", "reinforce++_baseline", "passk")  # estimators that compare within a group
WITHOUT_BASELINE = [name for name in ESTIMATORS if name != "remax"]
COMPARED = [name for name in WITHOUT_BASELINE if name != "gae"]  # whose rewards a critic's values are taken from later


def table(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def estimate(
    rows: list[list[float]] | Tensor, name: str, baselines: list[float] | None = None, **options: Any
) -> Tensor:
    """Advantages (P, G) of a single reward function."""
    rewards = rows if isinstance(rows, Tensor) else table(rows)
    chosen = AdvantageSettings(advantage_estimator=name, **options)
    greedy = None if baselines is None else torch.tensor(baselines, dtype=torch.float64)
    return advantages_of(rewards[..., None], chosen, greedy)


def close(actual: Tensor, expected: Any) -> None:
    wanted = expected if isinstance(expected, Tensor) else table(expected)
    torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12)


def present(values: list[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def std(values: list[float]) -> float:
    """Unbiased; 0 for a single value."""
    return math.sqrt(sum((value - mean(values)) ** 2 for value in values) / max(len(values) - 1, 1))


def or_zero(function: Any, rows: list[list[float]]) -> list[list[float]]:
    """`function(value, row)` for each value that is there, 0 for others."""
    return [[0.0 if math.isnan(value) else function(value, present(row)) for value in row] for row in rows]


# GRPO's


@pytest.mark.parametrize(("scale", "expected"), [
    ("none", [[-1.0, 1.0], [-2.0, 2.0]]),
    ("group", [[-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4)], [-2 / (8**0.5 + 1e-4), 2 / (8**0.5 + 1e-4)]]),
    ("batch", [[-1 / ((10 / 3) ** 0.5 + 1e-4), 1 / ((10 / 3) ** 0.5 + 1e-4)],
               [-2 / ((10 / 3) ** 0.5 + 1e-4), 2 / ((10 / 3) ** 0.5 + 1e-4)]]),
])
def test_hand_worked_numbers(scale: str, expected: list[list[float]]) -> None:
    torch.testing.assert_close(of_group(REWARDS, scale, None, 0), torch.tensor(expected))
    close(estimate(REWARDS.double(), "grpo", scale_rewards=scale), expected)


@pytest.mark.parametrize("scale", SCALE_REWARDS)
def test_missing_rewards_are_left_out_and_get_no_advantage(scale: str) -> None:
    everything = [value for row in GROUPS for value in present(row)]
    divisor = {"group": std, "batch": lambda row: std(everything), "none": lambda row: 1 - 1e-4}[scale]
    expected = or_zero(lambda value, row: (value - mean(row)) / (divisor(row) + 1e-4), GROUPS)
    close(estimate(GROUPS, "grpo", scale_rewards=scale), expected)


# The other estimators


def test_rloo_is_the_reward_less_the_mean_of_the_others() -> None:
    expected = [[0.0] * 4 for _ in GROUPS]
    for p, row in enumerate(GROUPS):
        for i, value in enumerate(row):
            others = present(row[:i] + row[i + 1:])
            if others and not math.isnan(value):
                expected[p][i] = value - mean(others)
    close(estimate(GROUPS, "rloo"), expected)


def test_rloo_rewards_are_clipped_and_advantages_normalised_over_the_generation() -> None:
    clipped = [[min(max(value, 0.2), 1.5) for value in row] for row in GROUPS]
    plain = estimate(clipped, "rloo")
    close(estimate(GROUPS, "rloo", reward_clip_range=(0.2, 1.5)), plain)
    rows = [[1.0, 0.0, 2.5], [0.5, 0.0, 0.5]]
    each = [value for row in estimate(rows, "rloo").tolist() for value in row]
    wanted = [(value - mean(each)) / (std(each) + 1e-4) for value in each]
    close(estimate(rows, "rloo", normalize_advantages=True).flatten()[None], [wanted])


def test_rloo_takes_the_kl_of_a_whole_completion_from_its_reward() -> None:
    """R - beta sum(log pi - log ref), less the mean of the others'; without a reference the KL is 0, and a completion
    without a reward counts nowhere."""
    policy, reference = [[-1.0, -2.0], [-0.5], [-1.0], [-1.0]], [[-1.5, -1.0], [-2.5], None, [-9.0]]
    rollouts = [Rollout([7] * len(logps), logps, "stop", reward=reward, ref_logprobs=None if ref is None else
                        torch.tensor(ref)) for logps, ref, reward in zip(policy, reference, (3.0, 1.0, 2.0, None),
                                                                         strict=True)]
    settings = AdvantageSettings(advantage_estimator="rloo")
    for _ in range(2):  # as after a shortage of memory
        take_kl_from_rewards([RolloutGroup({}, [1], rollouts), RolloutGroup({}, [1], [])], 0.1, settings)
    paid = [3.0 - 0.1 * (0.5 - 1.0), 1.0 - 0.1 * 2.0, 2.0]
    wanted = [paid[0] - mean(paid[1:]), paid[1] - mean([paid[0], paid[2]]), paid[2] - mean(paid[:2]), 0.0]
    assert [one.advantage for one in rollouts] == pytest.approx(wanted)


def test_reinforce_plus_plus_is_normalised_over_the_batch() -> None:
    everything = [value for row in GROUPS for value in present(row)]
    expected = or_zero(lambda value, row: (value - mean(everything)) / (std(everything) + 1e-4), GROUPS)
    close(estimate(GROUPS, "reinforce++"), expected)
    assert estimate(GROUPS, "reinforce++")[1].any()  # a group without spread is told from others


def test_missing_rewards_are_not_in_the_scale_of_reinforce_plus_plus_with_baseline() -> None:
    """The scale is the std of centered rewards that are there, also where the rest of a group are equal."""
    left = [value - mean(present(row)) for row in GROUPS for value in present(row)]
    assert len(left) == 15
    expected = or_zero(lambda value, row: (value - mean(row)) / (std(left) + 1e-4), GROUPS)
    close(estimate(GROUPS, "reinforce++_baseline"), expected)


def test_remax_is_the_reward_less_the_greedy_completions() -> None:
    rows = [[1.0, 0.0, NAN], [0.5, 0.5, 2.0], [1.0, 2.0, 3.0]]
    close(estimate(rows, "remax", [0.25, 1.0, NAN]), [[0.75, -0.25, 0.0], [-0.5, -0.5, 1.0], [0.0, 0.0, 0.0]])
    with pytest.raises(ValueError, match="remax needs the reward of a greedy completion of each prompt"):
        estimate(rows, "remax")


@pytest.mark.parametrize("name", OF_GROUPS)
def test_equal_rewards_give_exactly_zero(name: str) -> None:
    scales = ESTIMATORS[name].scales or (None,)
    for case in itertools.product((0.1, 1 / 3, 1e6 + 0.1), (3, 7), (torch.float32, torch.float64), scales):
        value, size, dtype, scale = case
        rewards = torch.tensor([[value] * size, list(range(size)), [NAN] + [value] * (size - 1)], dtype=dtype)
        advantages = estimate(rewards, name, scale_rewards=scale)
        assert not advantages[[0, 2]].any() and advantages[1].any(), case


@every_row("name", COMPARED)
def test_a_batch_without_spread_or_without_rewards_has_no_advantages(name: str) -> None:
    for rows in ([[0.1] * 3, [0.1] * 3], [[NAN] * 3, [NAN] * 3], [[0.1, NAN, NAN], [NAN] * 3]):
        assert not estimate(rows, name).any()


@every_row("name", WITHOUT_BASELINE)
def test_a_group_without_any_reward_changes_no_other(name: str) -> None:
    rows = [[1.0, 0.0, 2.0], [0.5, NAN, 3.0]]
    advantages = estimate([*rows, [NAN] * 3], name)
    assert not advantages[2].any()
    close(advantages[:2], estimate(rows, name))


@pytest.mark.parametrize("name", WITHOUT_BASELINE)
@settings(deadline=None, max_examples=25)
@given(order=st.permutations(range(4)), groups=st.permutations(range(len(GROUPS))))
def test_the_order_of_completions_and_of_groups_does_not_matter(name: str, order: list[int], groups: list[int]) -> None:
    moved = [[GROUPS[p][i] for i in order] for p in groups]
    close(estimate(moved, name), estimate(GROUPS, name)[groups][:, order])


# Pass@k


def best_of(row: list[float], k: int, scaled: bool) -> list[float]:
    """From all subsets of size k of the completions that have a reward."""
    scored = [i for i, value in enumerate(row) if not math.isnan(value)]
    if len(scored) < 2:
        return [0.0] * len(row)
    subsets = list(itertools.combinations(scored, min(k, len(scored))))
    best = {subset: max(row[i] for i in subset) for subset in subsets}
    center = mean(list(best.values()))
    spread = math.sqrt(mean([(value - center) ** 2 for value in best.values()]))
    found = [0.0] * len(row)
    for i in scored:
        found[i] = mean([value for subset, value in best.items() if i in subset]) - center
    return [value / (spread + 1e-4) if scaled else value for value in found]


VALUES = st.one_of(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.5, 0.5, 2.0, NAN]), st.floats(-3, 3, width=16))


@settings(deadline=None, max_examples=150)
@given(row=st.lists(VALUES, min_size=2, max_size=8), k=st.integers(1, 7), scaled=st.booleans())
def test_pass_at_k_is_the_mean_over_subsets(row: list[float], k: int, scaled: bool) -> None:
    found = estimate([row], "passk", pass_at_k=k, scale_rewards="group" if scaled else "none")
    expected = table([best_of(row, k, scaled)])
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)  # of a std that is nearly 0
    if not scaled:
        close(found, expected)


def test_pass_at_k_is_the_published_closed_form() -> None:
    """arXiv 2508.10751, eq. 11 to 15, with N = 8 completions of which some are right."""
    for k in (1, 2, 3, 5):
        for right in range(9):
            wrong = 8 - right
            center = 1 - math.comb(wrong, k) / math.comb(8, k)
            spread = math.sqrt(center * (1 - center)) + 1e-4
            good = (1 - center) / spread
            bad = (1 - center - math.comb(wrong - 1, k - 1) / math.comb(7, k - 1)) / spread if wrong else 0.0
            row = [1.0] * right + [0.0] * wrong
            found = estimate([row], "passk", pass_at_k=k)
            torch.testing.assert_close(found, table([[good if value else bad for value in row]]), rtol=1e-7, atol=1e-7)


def test_a_prompt_that_any_k_solve_has_no_signal() -> None:
    solved = ((6, 4), (7, 2), (3, 7), (1, 8), (8, 3))
    for (right, k), scale, offset in itertools.product(solved, ("group", "none"), (0.0, 0.1, 1e6 + 0.1)):
        row = [offset + 1] * right + [offset] * (8 - right)
        assert not estimate([row], "passk", pass_at_k=k, scale_rewards=scale).any(), (right, k, scale, offset)


@pytest.mark.parametrize("count", [64, 1000])
def test_pass_at_k_of_large_groups_keeps_its_digits(count: int) -> None:
    row = [1.0] + [0.0] * (count - 1)  # among half of them in half of the cases
    found = estimate([row], "passk", scale_rewards="none")[0]
    torch.testing.assert_close(found[0].item(), 0.5, rtol=1e-9, atol=0.0)
    torch.testing.assert_close(found[1:], torch.full((count - 1,), -0.5 / (count - 1)).double(), rtol=1e-6, atol=0.0)


def test_the_usual_k_is_half_of_the_group_and_a_large_offset_changes_nothing() -> None:
    rows = [[1.0, 0.0, 0.5, 2.0, 0.0, 0.25]]
    close(estimate(rows, "passk"), estimate(rows, "passk", pass_at_k=3))
    close(estimate(rows, "passk", scale_rewards="none", pass_at_k=1), [[x - 0.625 for x in rows[0]]])
    close(estimate([[value + 2.0**20 for value in rows[0]]], "passk"), estimate(rows, "passk"))


# Several rewards


def trls_gdpo(rewards: Tensor, weights: Tensor) -> Tensor:
    """TRL 1.16's lines for `normalize_then_sum`, with rewards (P, G, R)."""
    unscorable = torch.isnan(rewards.flatten(0, 1)).all(dim=1)

    def nanstd(values: Tensor, dim: int) -> Tensor:
        center = torch.nanmean(values, dim=dim, keepdim=True)
        variance = torch.nanmean((values - center) ** 2, dim=dim, keepdim=True)
        count = torch.sum(~torch.isnan(values), dim=dim, keepdim=True).double()  # TRL's is rounded to float32
        correction = count / (count - 1)
        return torch.sqrt(variance * torch.where(count > 1, correction, torch.full_like(correction, NAN)))

    each = (rewards - torch.nanmean(rewards, dim=1, keepdim=True)) / (nanstd(rewards, 1) + 1e-4)
    summed = (each.flatten(0, 1) * weights).nansum(dim=1)
    summed[unscorable] = torch.nan
    advantages = (summed - torch.nanmean(summed)) / (nanstd(summed, 0) + 1e-4)
    return torch.nan_to_num(advantages, nan=0.0).view(rewards.shape[:2])


@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 2.0], [1.0, 0.0, -1.0]])
def test_gdpo_is_trls(weights: list[float] | None) -> None:
    for missing, seed in itertools.product((0.0, 0.2, 0.6), range(20)):
        generator = torch.Generator().manual_seed(seed)
        rewards = torch.randn(5, 6, 3, generator=generator, dtype=torch.float64)
        rewards[0], rewards[1, :, 1] = 0.3, 1.0  # a group without spread, and one reward without
        rewards[torch.rand(5, 6, 3, generator=generator) < missing] = NAN
        rewards[2, 0] = NAN  # a completion that nothing scored
        rewards[3, :, 0], rewards[3, 1, 1:] = NAN, NAN
        chosen = AdvantageSettings(multi_objective_aggregation="normalize_then_sum", reward_weights=weights)
        expected = trls_gdpo(rewards, torch.tensor(weights or [1.0] * 3, dtype=torch.float64))
        found = advantages_of(rewards, chosen)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        assert not found[0].any() and found[2, 0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_without_spread_get_exactly_zero_from_gdpo(dtype: torch.dtype) -> None:
    chosen = AdvantageSettings(multi_objective_aggregation="normalize_then_sum")
    for seed in range(20):
        rewards = torch.randn(6, 7, 3, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        rewards[0], rewards[3] = 0.1, 1 / 3
        assert not advantages_of(rewards, chosen)[[0, 3]].any()


def test_rewards_are_weighted_and_summed() -> None:
    rewards = torch.tensor([[[1.0, 2.0], [NAN, 2.0]], [[1.0, NAN], [NAN, NAN]]])
    combined = combine_rewards(rewards, torch.tensor([10.0, 1.0]))
    torch.testing.assert_close(combined, torch.tensor([[12.0, 2.0], [10.0, NAN]]), equal_nan=True)


# Rollouts


def rollout(**rewards: float | None) -> Rollout:
    return Rollout([1, 2], [0.0, 0.0], "stop", rewards=rewards)


def test_rollouts_get_the_rewards_and_advantages_of_the_table() -> None:
    groups = [RolloutGroup({}, [1], [rollout(a=1.0, b=0.0), rollout(a=3.0, b=None)]),
              RolloutGroup({}, [1], [rollout(a=None, b=None), rollout(a=0.0, b=1.0)])]
    groups[0].rollouts[0].token_advantages = torch.ones(2)  # of an update before
    assign_advantages(groups, ["a", "b"], AdvantageSettings(scale_rewards="none", reward_weights=[1.0, 4.0]))
    assert [[r.reward for r in group.rollouts] for group in groups] == [[1.0, 3.0], [None, 4.0]]
    assert [[r.advantage for r in group.rollouts] for group in groups] == [[-1.0, 1.0], [0.0, 0.0]]
    assert groups[0].rollouts[0].token_advantages is None


def test_remax_takes_the_groups_baseline() -> None:
    groups = [RolloutGroup({}, [1], [rollout(a=1.0), rollout(a=3.0)], baseline=2.5),
              RolloutGroup({}, [1], [rollout(a=1.0), rollout(a=3.0)])]  # whose greedy completion had no reward
    assign_advantages(groups, ["a"], AdvantageSettings(advantage_estimator="remax"))
    assert [[r.advantage for r in group.rollouts] for group in groups] == [[-1.5, 0.5], [0.0, 0.0]]


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_kl_term_in_the_reward_is_the_loop_over_tokens(recomputed: bool) -> None:
    generator, beta = torch.Generator().manual_seed(0), 0.3
    rollouts = []
    for length, reward in ((3, 1.0), (1, 0.0), (5, 2.0), (4, None), (0, 1.0)):
        policy, ref, sampler = torch.randn(3, length, generator=generator, dtype=torch.float64)
        rollouts.append(Rollout([7] * length, sampler.tolist(), "stop", reward=reward, advantage=5.0,
                                old_logprobs=policy if recomputed else None, ref_logprobs=ref))
    returns = []
    for r in rollouts:
        if r.reward is not None:
            policy = r.old_logprobs.tolist() if recomputed else torch.tensor(r.rollout_logprobs).tolist()  # type: ignore[union-attr]
            apart = [p - q for p, q in zip(policy, r.ref_logprobs.tolist(), strict=True)]  # type: ignore[union-attr]
            returns.append([r.reward - beta * sum(apart[t:]) for t in range(len(apart))])
    flat = [value for row in returns for value in row]
    put_kl_in_reward(rollouts, beta)
    for r, row in zip([rollouts[0], rollouts[1], rollouts[2]], returns, strict=False):
        expected = torch.tensor([(value - mean(flat)) / (std(flat) + 1e-4) for value in row])
        torch.testing.assert_close(r.token_advantages, expected)
        assert r.advantages is r.token_advantages
    assert rollouts[3].token_advantages is None and rollouts[3].advantages == 5.0
    put_kl_in_reward([rollouts[3]], beta)  # nothing is scored
    assert rollouts[3].token_advantages is None


def test_the_kl_term_in_the_reward_is_that_of_the_drawn_tokens_whatever_lies_between_them() -> None:
    drawn = Rollout([7, 8, 9], [-1.0, -2.0, -0.5], "stop", reward=1.0, ref_logprobs=torch.tensor([-1.5, -1.0, -0.25]))
    other = Rollout([7], [-1.0], "stop", reward=0.0, ref_logprobs=torch.zeros(1))
    episode = Rollout([7, 1, 8, 9, 1], [-1.0, NAN, -2.0, -0.5, NAN], "stop", reward=1.0,
                      trained=[True, False, True, True, False], ref_logprobs=torch.tensor([-1.5, 0, -1.0, -0.25, 0]))
    put_kl_in_reward([drawn, other], 0.3)
    put_kl_in_reward([episode, other], 0.3)
    assert drawn.token_advantages is not None and episode.token_advantages is not None
    assert episode.token_advantages.tolist() == [*drawn.token_advantages[:1].tolist(), 0,
                                                 *drawn.token_advantages[1:].tolist(), 0]


# Options


def test_a_scale_that_an_estimator_does_not_use_is_refused() -> None:
    refused = []
    for name, scale in itertools.product(ESTIMATORS, (*SCALE_REWARDS, True, False)):
        said = {True: "group", False: "none"}.get(scale, scale)  # type: ignore[call-overload]
        if said in ESTIMATORS[name].scales:
            assert AdvantageSettings(advantage_estimator=name, scale_rewards=scale).scale == said
        else:
            words = (f"scale_rewards is '{said}', which advantage_estimator '{name}'", "does not use")
            refused.append(({"advantage_estimator": name, "scale_rewards": scale}, words))
    assert refused and not_refused(lambda given: AdvantageSettings(**given), refused) == []


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"advantage_estimator": "gea"}, "advantage_estimator is 'gea'; it must be one of grpo, rloo, reinforce"),
    ({"scale_rewards": "both"}, "scale_rewards is 'both'; it must be one of group, batch, none"),
    ({"multi_objective_aggregation": "sum"},
     "multi_objective_aggregation is 'sum'; it must be one of sum_then_normalize, normalize_then_sum"),
    ({"pass_at_k": 4}, "pass_at_k is 4, and advantage_estimator 'grpo' does not use it"),
    ({"multi_objective_aggregation": "normalize_then_sum", "advantage_estimator": "rloo"},
     "which is an estimator by itself (GDPO); leave advantage_estimator='rloo' out"),
    ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch"}, "it takes no value: leave it"),
    ({"advantage_estimator": "passk", "scale_rewards": "batch"}, "it takes group or none"),
]


def test_unknown_and_contradictory_options_are_refused() -> None:
    assert not_refused(lambda given: AdvantageSettings(**given), CONTRADICTIONS) == []


@every_row(("rewards", "weights", "message"), [
    (torch.ones(2, 3), None, r"expected rewards \(P, G, R\) of a floating dtype; got torch.float32, \(2, 3\)"),
    (torch.ones(2, 3, 1).long(), None, "got torch.int64"), ([[[1.0]]], None, "expected rewards"),
    (torch.ones(2, 3, 1), [1.0, 2.0], "reward_weights has 2 numbers for 1 rewards"),
])
def test_rewards_of_another_shape_and_weights_of_another_number_are_refused(
    rewards: Any, weights: list[float] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        advantages_of(rewards, AdvantageSettings(reward_weights=weights))
