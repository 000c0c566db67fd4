"""KL estimates per token, at a point and on average, with their gradients; which tokens a mask over entropies keeps,
how strong the bonus is, and what it adds to the gradient."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_loss import LENGTHS, LONGEST, STEP, close, close_with_gradients, example, kl_of, naive_loss, places_of
from tables import every_row
from torch import Tensor

from lowmem_grpo.losses.loss_settings import LossSettings
from lowmem_grpo.losses.policy_loss import grpo_loss
from lowmem_grpo.losses.regularization import KL_ESTIMATORS, EntropyControl, top_entropy_mask

SHARES = (0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
COUNT = sum(LENGTHS)
CASE: dict[str, Any] = {"loss_type": "grpo", "epsilon": 0.2, "delta": None, "beta": 0.0}


def entropies(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(3).to(dtype)


def ours(tokens: dict[str, Tensor], **options: Any) -> Any:
    return grpo_loss(**(tokens | {"max_completion_length": LONGEST} | CASE | STEP | options))


# KL


def distributions() -> tuple[Tensor, Tensor]:
    """Logits (V,) of a policy, with gradient, and log-probabilities (V,) of a reference."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), reference.log_softmax(-1)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_an_estimate_and_its_gradient_are_the_formula(name: str) -> None:
    logp = torch.tensor([-1.0, -0.2, -3.0, -0.7], dtype=torch.float64).requires_grad_()
    ref = torch.tensor([-1.5, -0.1, -1.0, -0.7], dtype=torch.float64)
    expected = torch.stack([kl_of(name, one, other) for one, other in zip(logp, ref, strict=True)])
    found = KL_ESTIMATORS[name](logp, ref)
    close(found, expected)
    close(*(torch.autograd.grad(values.sum(), logp)[0] for values in (found, expected)))


def test_estimates_are_zero_at_the_reference_and_k2_and_k3_never_below() -> None:
    same = torch.linspace(-9, 0, 20)
    assert all(not estimate(same, same).any() for estimate in KL_ESTIMATORS.values())
    apart = same + torch.linspace(-3, 3, 20)
    assert (KL_ESTIMATORS["k2"](same, apart) >= 0).all() and (KL_ESTIMATORS["k3"](same, apart) >= 0).all()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_an_unbiased_estimate_is_the_kl_on_average(name: str) -> None:
    logits, ref = distributions()
    logp = logits.log_softmax(-1).detach()
    close((logp.exp() * KL_ESTIMATORS[name](logp, ref)).sum(), (logp.exp() * (logp - ref)).sum())


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_weighed_by_the_ratio_the_gradient_is_the_kls_own(name: str) -> None:
    logits, ref = distributions()
    logp = logits.log_softmax(-1)
    weighed = (logp.detach().exp() * (logp - logp.detach()).exp() * KL_ESTIMATORS[name](logp, ref)).sum()
    exact = (logp.exp() * (logp - ref)).sum()
    close(*(torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (weighed, exact)))


def test_k2_as_a_loss_has_the_gradient_of_k1_in_the_reward_and_k1_has_none() -> None:
    logits, ref = distributions()
    logp = logits.log_softmax(-1)
    chance, cost = logp.detach().exp(), (logp - ref).detach()

    def gradient(per_token: Tensor) -> Tensor:
        return torch.autograd.grad((chance * per_token).sum(), logits, retain_graph=True)[0]

    close(gradient(KL_ESTIMATORS["k2"](logp, ref)), gradient(cost * logp))
    close(gradient(KL_ESTIMATORS["k1"](logp, ref)), torch.zeros(7).double())
    assert math.isclose(chance.sum().item(), 1)


# Masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mask_keeps_its_share_of_tokens(dtype: torch.dtype) -> None:
    """Those from the quantile on: of n, the ones whose rank from 0 is at least (1 - share)(n - 1)."""
    for count, share, seed in product((1, 7, 11, 100, 1001), SHARES, range(5)):
        entropy = entropies(count, seed, dtype)
        kept = top_entropy_mask(entropy, share)
        ranks = range(math.ceil(round((1 - share) * (count - 1), 9)), count)
        lowest = entropy.sort().values[ranks[0]]
        assert torch.equal(kept, entropy >= lowest), (count, share)
        assert int(kept.sum()) == len(ranks) or dtype is torch.bfloat16, (count, share)  # where some are equal
        assert kept[entropy.argmax()], (count, share)


@settings(deadline=None, max_examples=60)
@given(
    entropy=st.lists(st.sampled_from([0.0, 0.1, 0.5, 1 / 3]), min_size=1, max_size=30), share=st.sampled_from(SHARES)
)
def test_tokens_of_equal_entropy_stay_together_and_higher_ones_are_kept(entropy: list[float], share: float) -> None:
    kept = top_entropy_mask(torch.tensor(entropy), share).tolist()
    taken = {value for value, keep in zip(entropy, kept, strict=True) if keep}
    assert max(entropy) in taken and sum(kept) >= share * (len(entropy) - 1)
    assert all(keep == (value >= min(taken)) for value, keep in zip(entropy, kept, strict=True))


def test_all_tokens_or_none_are_masked_right() -> None:
    assert top_entropy_mask(torch.zeros(5), 1.0).tolist() == [True] * 5
    assert top_entropy_mask(torch.zeros(5), 0.1).tolist() == [True] * 5  # all are equal
    assert top_entropy_mask(torch.empty(0), 0.2).shape == (0,)
    assert ours(with_entropy(), policy_mask=torch.zeros(COUNT).bool(), entropy_coef=0.1).loss == 0


# Masks and bonus in the loss


def naive(tokens: dict[str, Tensor], coef: float, mask: list[bool] | None, count: float | None = None) -> Tensor:
    """The loss with its bonus: the mean entropy of the tokens that take part."""
    kept = [True] * COUNT if mask is None else mask
    bonus = sum(tokens["entropy"][t] for t in range(COUNT) if kept[t]) / (count or sum(kept))
    return naive_loss(tokens, CASE, False, [float(keep) for keep in kept]) - coef * bonus


def with_entropy(seed: int = 0) -> dict[str, Tensor]:
    return example(seed) | {"entropy": entropies(COUNT, seed, torch.float64).requires_grad_()}


@every_row("count", [None, 23.0])
@every_row("mask", [None, [t % 3 == 0 for t in range(COUNT)], [False] * 8 + [True] * 6])
def test_the_bonus_and_its_gradient_are_the_mean_entropys(mask: list[bool] | None, count: float | None) -> None:
    tokens = with_entropy()
    given = None if mask is None else torch.tensor(mask)
    result = ours(tokens, entropy_coef=0.03, policy_mask=given, num_policy_tokens_in_step=count)
    close_with_gradients(result.loss, naive(tokens, 0.03, mask, count), tokens["logprobs"], tokens["entropy"])
    kept = [True] * COUNT if mask is None else mask
    close(result.policy_loss, naive_loss(tokens, CASE, False, [float(keep) for keep in kept]).detach())


def test_an_infinite_entropy_of_a_token_that_takes_no_part_changes_nothing() -> None:
    tokens, mask = with_entropy(), [t % 3 == 0 for t in range(COUNT)]
    wild = tokens | {"entropy": torch.where(torch.tensor(mask), tokens["entropy"], torch.inf)}
    result = ours(wild, entropy_coef=0.03, policy_mask=torch.tensor(mask))
    close_with_gradients(result.loss, naive(tokens, 0.03, mask), tokens["logprobs"], tokens["entropy"])


def test_a_trainers_coefficient_takes_the_settings_place() -> None:
    tokens, chosen = with_entropy(), LossSettings(loss_type="grpo", epsilon=0.2, entropy_coef=0.5)
    for coef, expected in ((None, 0.5), (0.2, 0.2)):
        result = grpo_loss(**tokens, **STEP, settings=chosen, entropy_coef=coef)
        close_with_gradients(result.loss, naive(tokens, expected, None), tokens["logprobs"], tokens["entropy"])
    off = grpo_loss(**(tokens | {"entropy": None}), **STEP, settings=chosen, entropy_coef=0.0)
    close(off.loss, naive_loss(tokens, CASE, False))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_only_the_tokens_of_the_highest_entropy_count(share: float) -> None:
    for seed in range(3):
        tokens = with_entropy(seed)
        ordered = sorted(tokens["entropy"].tolist())
        lowest = ordered[math.ceil(round((1 - share) * (COUNT - 1), 9))]
        mask = [value >= lowest for value in tokens["entropy"].tolist()]
        result = ours(tokens, entropy_coef=0.03, top_entropy_quantile=share)
        close_with_gradients(result.loss, naive(tokens, 0.03, mask), tokens["logprobs"], tokens["entropy"])


def test_a_masked_token_keeps_its_kl_term() -> None:
    tokens, mask = with_entropy(), torch.arange(COUNT) % 2 == 0
    case = CASE | {"beta": 0.07, "kl_estimator": "k3", "use_bias_correction_kl": True}
    result = ours(tokens, **case, policy_mask=mask)
    close_with_gradients(result.loss, naive_loss(tokens, case, False, mask.double().tolist()), tokens["logprobs"])
    assert torch.autograd.grad(result.loss, tokens["logprobs"])[0].all()


@settings(deadline=None, max_examples=40)
@given(order=st.permutations(range(len(LENGTHS))), first=st.integers(1, len(LENGTHS) - 1), seed=st.integers(0, 9))
def test_a_bonus_and_a_mask_do_not_depend_on_micro_batches(order: list[int], first: int, seed: int) -> None:
    tokens, mask = with_entropy(seed), entropies(COUNT, seed + 1) > 1
    counts = {"entropy_coef": 0.03, "num_policy_tokens_in_step": float(mask.sum())}
    shares, places = [], places_of(tokens["sequence_ids"])
    for part in (order[:first], order[first:]):
        own = torch.tensor([t for sequence in part for t in places[sequence]])
        batch = {name: value[own] for name, value in tokens.items()}
        batch["sequence_ids"] = batch["sequence_ids"].unique(return_inverse=True)[1]
        shares.append(ours(batch, policy_mask=mask[own], **counts).loss)
    whole = ours(tokens, policy_mask=mask, **counts).loss
    close_with_gradients(shares[0] + shares[1], whole, tokens["logprobs"], tokens["entropy"])


# Control


def test_a_fixed_coefficient_stays_and_an_adaptive_one_recovers_from_zero() -> None:
    control = EntropyControl(0.01)
    for entropy in (0.0, 5.0):
        assert control.applied == 0.01 and control.enabled
        control.update(entropy)
    assert not EntropyControl(0.0).enabled and EntropyControl(0.0).applied == 0
    adaptive = EntropyControl(0.0, adaptive=True)
    assert adaptive.enabled and adaptive.applied == 0
    adaptive.update(0.1)
    assert adaptive.applied == 0.005


def test_adaptive_control_is_the_hand_worked_sequence() -> None:
    control = EntropyControl(0.02, adaptive=True, lowest=0.01, highest=0.03, delta=0.005, target=0.2)
    seen = []
    for entropy in (0.5, 0.2, 0.1, 0.1, 0.1, 0.3, 0.3, 0.3, 0.3, 0.3, 0.2, 0.2):
        seen.append((round(control.applied, 9), round(control.coef, 9)))  # in the step, before it is measured
        control.update(entropy)
    assert seen == [
        (0.0, 0.02),  # nothing is known before the first step
        (0.0, 0.015),  # 0.5 was above the target: lowered, and not applied
        (0.02, 0.02),  # 0.2 was at the target: raised, and applied
        (0.025, 0.025), (0.03, 0.03), (0.03, 0.03),  # 0.03 is the highest
        (0.0, 0.025), (0.0, 0.02), (0.0, 0.015), (0.0, 0.01), (0.0, 0.01),  # 0.01 is the lowest
        (0.015, 0.015),
    ]


def test_a_resumed_control_goes_on_and_old_checkpoints_can_be_resumed() -> None:
    control = EntropyControl(0.02, adaptive=True)
    control.update(0.1)
    resumed = EntropyControl(0.02, adaptive=True)
    resumed.restore(control.state())
    for entropy in (0.5, 0.1, 0.1):
        assert resumed.state() == control.state() and resumed.applied == control.applied
        control.update(entropy)
        resumed.update(entropy)
    fresh = EntropyControl(0.02, adaptive=True)
    fresh.restore(None)
    assert fresh == EntropyControl(0.02, adaptive=True)
    fresh.restore(EntropyControl(0.03, adaptive=True).state())
    assert (fresh.coef, fresh.last_entropy) == (0.03, None)
