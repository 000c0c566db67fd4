"""The loss against formulas written out sequence by sequence in float64."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowmem_grpo.losses import LOSS_TYPES, grpo_loss

LENGTHS = [3, 1, 6, 4]
LONGEST = 10  # max_completion_length
STEP = {"num_sequences_in_step": len(LENGTHS), "num_tokens_in_step": sum(LENGTHS), "max_completion_length": LONGEST}
CASES = list(itertools.product(
    LOSS_TYPES, [None, 1.9], [None, 0.35], [0.0, 0.07], [False, True], [False, True],
))  # loss_type, delta, epsilon_high, beta, use_bias_correction_kl, on-policy


def example(seed: int = 0) -> dict[str, Tensor]:
    """Tokens of LENGTHS in float64, far enough off-policy that every kind of clipping happens."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    logprobs = -1 + normal(0.3)
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return {
        "logprobs": logprobs.requires_grad_(), "advantages": torch.tensor([1.5, -0.7, -1.1, 0.4]).double()[ids],
        "sequence_ids": ids, "old_logprobs": logprobs.detach() + normal(0.6), "ref_logprobs": -1 + normal(0.5),
    }


def naive(tokens: dict[str, Tensor], case: tuple[Any, ...], epsilon: float = 0.2) -> Tensor:
    """The step's loss, token by token."""
    loss_type, delta, epsilon_high, beta, corrected, on_policy = case
    upper = 1 + (epsilon if epsilon_high is None else epsilon_high)
    sequences: list[list[Tensor]] = [[] for _ in LENGTHS]
    for t, sequence in enumerate(tokens["sequence_ids"].tolist()):
        logp, advantage, ref = tokens["logprobs"][t], tokens["advantages"][t], tokens["ref_logprobs"][t]
        old = logp.detach() if on_policy else tokens["old_logprobs"][t]
        ratio = (logp - old).exp()
        clipped = ratio.detach().clamp(1 - epsilon, upper) if not 1 - epsilon <= ratio <= upper else ratio
        bounded = torch.tensor(delta).double() if delta is not None and ratio > delta else ratio
        first, second = bounded * advantage, clipped * advantage
        kl = (ref - logp).exp() - (ref - logp) - 1
        policy_loss = -(min(second, first))
        sequences[sequence].append(policy_loss + beta * kl * (ratio if corrected else 1))
    totals = torch.stack([torch.stack(sequence).sum() for sequence in sequences])
    if loss_type == "grpo":
        return (totals / torch.tensor(LENGTHS)).mean()
    return totals.sum() / (sum(LENGTHS) if loss_type in ("bnpo", "dapo") else len(LENGTHS) * LONGEST)


def ours(tokens: dict[str, Tensor], case: tuple[Any, ...], **changes: Any) -> Any:
    """grpo_loss of the same case."""
    loss_type, delta, epsilon_high, beta, corrected, on_policy = case
    given = tokens | ({"old_logprobs": None} if on_policy else {})
    options = {"loss_type": loss_type, "delta": delta, "epsilon_high": epsilon_high, "beta": beta,
               "use_bias_correction_kl": corrected}
    return grpo_loss(**(given | options | STEP | changes))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradient_follow_the_formula(case: tuple[Any, ...]) -> None:
    tokens = example()
    expected, result = naive(tokens, case), ours(tokens, case).loss
    torch.testing.assert_close(result, expected)
    gradients = [torch.autograd.grad(loss, tokens["logprobs"])[0] for loss in (result, expected)]
    torch.testing.assert_close(*gradients)


def test_the_example_clips_on_every_side() -> None:
    metrics = ours(example(), ("dapo", 1.9, 0.35, 0.07, True, False)).metrics
    assert metrics["clip_ratio/low_mean"] > 0 and metrics["clip_ratio/high_mean"] > 0 and metrics["kl"] > 0
    tokens = example()
    beyond = (tokens["logprobs"] - tokens["old_logprobs"]).exp() > 1.9
    assert (beyond & (tokens["advantages"] < 0)).any()


@settings(deadline=None, max_examples=60)
@given(
    case=st.sampled_from(CASES), order=st.permutations(range(len(LENGTHS))), first=st.integers(1, len(LENGTHS) - 1)
)
def test_micro_batches_and_their_order_do_not_change_the_gradient(
    case: tuple[Any, ...], order: list[int], first: int
) -> None:
    tokens = example()
    whole = torch.autograd.grad(ours(tokens, case).loss, tokens["logprobs"])[0]
    shares = []
    for part in (order[:first], order[first:]):
        places = torch.cat([(tokens["sequence_ids"] == sequence).nonzero().squeeze(-1) for sequence in part])
        ids = torch.arange(len(part)).repeat_interleave(torch.tensor([LENGTHS[sequence] for sequence in part]))
        shares.append(ours({name: value[places] for name, value in tokens.items()} | {"sequence_ids": ids}, case).loss)
    torch.testing.assert_close(sum(shares), ours(tokens, case).loss)
    torch.testing.assert_close(torch.autograd.grad(sum(shares), tokens["logprobs"])[0], whole)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_the_ratio_is_exactly_one(loss_type: str) -> None:
    tokens = example()
    result = ours(tokens, (loss_type, None, None, 0.0, False, True))
    assert not any(value.any() for value in result.metrics.values())
    (gradient,) = torch.autograd.grad(result.loss, tokens["logprobs"])
    weights = gradient / -tokens["advantages"]
    expected = {"grpo": 1 / (len(LENGTHS) * torch.tensor(LENGTHS).double()[tokens["sequence_ids"]]),
                "dr_grpo": torch.full_like(weights, 1 / (len(LENGTHS) * LONGEST))}
    torch.testing.assert_close(weights, expected.get(loss_type, torch.full_like(weights, 1 / sum(LENGTHS))))


def test_on_policy_equals_old_logprobs_given() -> None:
    tokens = example()
    given = ours(tokens, ("dapo", None, None, 0.07, True, False), old_logprobs=tokens["logprobs"].detach())
    assert torch.equal(given.loss, ours(tokens, ("dapo", None, None, 0.07, True, True)).loss)


@pytest.mark.parametrize("epsilon_high", [None, 0.05, 0.9])
def test_clip_metrics_count_the_tokens_whose_gradient_is_gone(epsilon_high: float | None) -> None:
    tokens = example()
    result = ours(tokens, ("bnpo", None, epsilon_high, 0.0, False, False))
    (gradient,) = torch.autograd.grad(result.loss, tokens["logprobs"])
    torch.testing.assert_close(result.metrics["clip_ratio/region_mean"], (gradient == 0).double().mean())
    low, high = (result.metrics[f"clip_ratio/{side}_mean"] for side in ("low", "high"))
    torch.testing.assert_close(result.metrics["clip_ratio/region_mean"], low + high)


def test_advantage_zero_has_no_gradient() -> None:
    tokens = example() | {"advantages": torch.zeros(sum(LENGTHS), dtype=torch.float64)}
    (gradient,) = torch.autograd.grad(ours(tokens, ("dapo", 1.9, None, 0.0, False, False)).loss, tokens["logprobs"])
    assert not gradient.any()


def test_kl_is_zero_at_the_reference_and_never_negative() -> None:
    tokens = example()
    same = tokens | {"ref_logprobs": tokens["logprobs"].detach()}
    assert ours(same, ("dapo", None, None, 0.07, True, True)).metrics["kl"] == 0
    assert ours(tokens, ("dapo", None, None, 0.07, False, True)).metrics["kl"] > 0


def test_metrics_hold_no_graph() -> None:
    metrics = ours(example(), ("grpo", 1.9, 0.35, 0.07, True, False)).metrics
    assert not any(value.requires_grad for value in metrics.values())


def test_unknown_loss_types_are_refused() -> None:
    with pytest.raises(ValueError, match="loss_type is 'ppo'; allowed are grpo, bnpo, dr_grpo, dapo"):
        ours(example(), ("ppo", None, None, 0.0, False, True))


def test_a_kl_term_without_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=r"beta is 0\.04, which needs ref_logprobs"):
        ours(example(), ("grpo", None, None, 0.04, False, True), ref_logprobs=None)
