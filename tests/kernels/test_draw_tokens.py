"""Tokens by inverse CDF: the kernels in the interpreter and on a card, against float64."""

from collections.abc import Callable

import pytest
import torch
from accuracy import interpreted
from card import gpu
from torch import Tensor

from lowmem_grpo.kernels import draw_tokens as module
from lowmem_grpo.kernels.draw_tokens import MOST_BLOCKS, draw_tokens, draw_tokens_triton
from lowmem_grpo.kernels.triton_utils import Launch

CLOSE = 1e-6  # probability by which the ends of a token may lie elsewhere than in float64
Draw = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def problem(size: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Rows of logits: random, ties, one allowed token, few allowed tokens far apart; each for several u."""
    generator = torch.Generator().manual_seed(size)
    random = 4 * torch.randn(3, size, generator=generator)
    one, few = torch.full((2, size), -torch.inf)
    one[size // 2] = -7.0
    few[[0, size // 3, size - 1]] = torch.tensor([1.0, 2.0, 1.5])
    random[2, : size // 2] = -torch.inf
    logits = torch.stack([*random, torch.full((size,), 3.0), one, few])
    u = torch.tensor([0.0, 1e-12, 0.25, 0.5, 0.999, 1 - 1e-9, 1 - 2**-53], dtype=torch.float64)
    return logits.repeat_interleave(len(u), 0).to(device), u.repeat(len(logits))[:, None].to(device)


def assert_right(draw: Draw, logits: Tensor, u: Tensor, temperature: float) -> None:
    """u lies between the ends of its token, whose log-probability is that of float64."""
    tokens, logprobs = draw(logits, u, temperature)
    expected = (logits.double() / temperature).log_softmax(-1)
    ends = expected.exp().cumsum(-1)
    ends /= ends[:, -1:].clone()
    at = tokens[:, None]
    end, share = (part.gather(1, at) for part in (ends, expected.exp()))
    assert tokens.dtype == torch.int64 and (share > 0).all(), "a token of probability 0 was drawn"
    assert ((end - share - CLOSE <= u) & (u <= end + CLOSE)).all()
    torch.testing.assert_close(logprobs.double(), expected.gather(1, at)[:, 0], rtol=1e-6, atol=4e-6 / temperature)


@interpreted
@pytest.mark.parametrize("size", [5, 64, 200])
@pytest.mark.parametrize("temperature", [1.0, 0.01, 2.5])
@pytest.mark.every(2)
def test_each_token_is_that_of_u_in_float64(size: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAUNCH", Launch({"BLOCK_V": 64}))
    assert_right(draw_tokens_triton, *problem(size), temperature)
    assert_right(draw_tokens_triton, *(part[4:5] for part in problem(64 * MOST_BLOCKS - 7)), temperature)


@interpreted
@pytest.mark.slow
def test_tokens_of_two_blocks_are_drawn_as_often_as_their_probabilities_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAUNCH", Launch({"BLOCK_V": 4}))
    shares, count = torch.tensor([0.05, 0.3, 0.1, 0.15, 0.2, 0.2]), 300
    u = torch.rand(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    tokens, _ = draw_tokens_triton(shares.log().expand(count, -1), u, 1.0)
    drawn = tokens.bincount(minlength=6)
    assert ((drawn - count * shares) ** 2 / (count * shares)).sum() < 20.5  # 5 degrees of freedom: 1 in 1,000


@interpreted
def test_nan_is_not_hidden_and_gives_a_token_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAUNCH", Launch({"BLOCK_V": 64}))
    logits, u = problem(200)
    logits[:, 150] = torch.nan
    tokens, logprobs = draw_tokens_triton(logits, u, 1.0)
    assert logprobs.isnan().all() and ((tokens >= 0) & (tokens < 200)).all()


def test_logits_that_the_kernel_does_not_take_are_drawn_from_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAUNCH", Launch({"BLOCK_V": 1}))
    logits, u = problem(MOST_BLOCKS + 1)
    for given in (logits, logits.double(), logits.T.contiguous().T, logits[:0]):
        tokens, logprobs = draw_tokens_triton(given, u[: len(given)], 0.7)
        assert torch.equal(tokens, draw_tokens(given, u[: len(given)], 0.7)[0]) and logprobs.dtype == given.dtype


@gpu
@pytest.mark.parametrize("rows", [1, 512])
def test_gpu_draws_as_float64_does(rows: int) -> None:
    for size in (5, 4096, 151_936):
        logits, u = problem(size, "cuda")
        again = -(-rows // len(logits))
        assert_right(draw_tokens, logits.repeat(again, 1)[:rows], u.repeat(again, 1)[:rows], 0.7)
