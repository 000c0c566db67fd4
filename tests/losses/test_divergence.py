"""Divergences over a few tokens, against sums over the whole vocabulary in float64."""

from itertools import product

import pytest
import torch
from torch import Tensor

from lowmem_grpo.losses.divergence import (
    clipped_ratio,
    generalized_divergence,
    sampled_token_loss,
    top_k_divergence,
)

ALPHAS = (0.0, 0.3, 0.5, 1.0)


def distributions(rows: int = 7, size: int = 11, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits (rows, size) of a student, and log-probabilities of a teacher."""
    torch.manual_seed(seed)
    student = (3 * torch.randn(rows, size, dtype=torch.float64)).requires_grad_()
    return student, (3 * torch.randn(rows, size, dtype=torch.float64)).log_softmax(-1)


def by_hand(p: Tensor, q: Tensor, alpha: float) -> Tensor:
    """From probabilities, event by event."""
    def kl(first: Tensor, second: Tensor) -> Tensor:
        return (first * (first / second).log()).sum(-1)

    mixed = (1 - alpha) * p + alpha * q
    return kl(q, p) if alpha == 0 else kl(p, q) if alpha == 1 else alpha * kl(q, mixed) + (1 - alpha) * kl(p, mixed)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_forward_reverse_and_mixed_divergences_would_be_exchanged_or_weighed_otherwise(alpha: float) -> None:
    student, teacher = distributions()
    found = generalized_divergence(student.log_softmax(-1), teacher, alpha)
    torch.testing.assert_close(found, by_hand(student.softmax(-1), teacher.exp(), alpha), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("alpha", "tail"), [*product(ALPHAS, (True, False))])
def test_the_mass_beyond_the_k_tokens_would_be_lost_or_counted_twice(alpha: float, tail: bool) -> None:
    student, teacher = distributions()
    ids = student.topk(4).indices
    found = top_k_divergence(student.log_softmax(-1).gather(-1, ids), teacher.gather(-1, ids), alpha, tail)
    p, q = (each.gather(-1, ids) for each in (student.softmax(-1), teacher.exp()))
    if tail:
        p, q = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1) for each in (p, q))
    else:
        p, q = (each / each.sum(-1, keepdim=True) for each in (p, q))
    torch.testing.assert_close(found, by_hand(p, q, alpha), rtol=1e-6, atol=1e-7)
    for mine, wanted in zip(torch.autograd.grad(found.sum(), student, retain_graph=True),
                            torch.autograd.grad(by_hand(p, q, alpha).sum(), student), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-7)


def test_the_expected_gradient_of_sampled_tokens_would_not_be_that_of_the_reverse_kl() -> None:
    student, teacher = distributions(rows=1)
    logprobs = student.log_softmax(-1)[0]
    expected = (logprobs.exp().detach() * sampled_token_loss(logprobs, teacher[0])).sum()
    (found,) = torch.autograd.grad(expected, student, retain_graph=True)
    (wanted,) = torch.autograd.grad(by_hand(student.softmax(-1), teacher.exp(), 1.0).sum(), student)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_values_and_gradients_would_not_be_finite_where_k_tokens_have_all_of_the_mass() -> None:
    student = torch.tensor([[90.0, 0.0, -90.0]], requires_grad=True)
    teacher = torch.tensor([[-90.0, 0.0, 90.0]]).log_softmax(-1)
    for alpha in ALPHAS:
        found = top_k_divergence(student.log_softmax(-1)[:, :2], teacher[:, :2], alpha, tail=True)
        (gradient,) = torch.autograd.grad(found.sum(), student)
        assert found.isfinite().all() and gradient.isfinite().all()


def test_a_token_that_became_much_likelier_would_count_without_a_bound() -> None:
    now, then = torch.tensor([-0.1, -2.0, -50.0, -1.0]), torch.tensor([-90.0, -1.0, -1.0, -1.0])
    torch.testing.assert_close(clipped_ratio(now, then, 2.0),
                               torch.tensor([2.0, torch.e**-1, torch.e**-49, 1.0]))
