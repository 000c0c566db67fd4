"""Drawing tokens of known probabilities, so that we can count them; and cutting text at a stop string."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tables import every_row
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.decoding import StopCriteria, cut_at_stop, draw

PROBS = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05, 0.0])
LOGITS = PROBS.log()
TRUNCATIONS = [
    ({"top_k": 2}, [0, 1]), ({"top_k": 100}, [0, 1, 2, 3, 4]), ({"top_p": 0.6}, [0, 1]), ({"top_p": 0.7}, [0, 1, 2]),
    ({"top_p": 0.3}, [0]), ({"min_p": 0.3}, [0, 1, 2]), ({"top_k": 3, "top_p": 0.7}, [0, 1]),
    ({"top_k": 4, "min_p": 0.6}, [0, 1]), ({}, [0, 1, 2, 3, 4]), ({"temperature": 0.5, "top_p": 0.55}, [0]),
    ({"temperature": 2.0}, [0, 1, 2, 3, 4]), ({"temperature": 0.5, "min_p": 0.2}, [0, 1, 2]),
]


def test_text_is_cut_at_the_first_stop_string() -> None:
    params = SamplingParams(stop=["b", "cd"])
    assert cut_at_stop("acdb", params) == "a"
    assert cut_at_stop("acdb", replace(params, include_stop_str_in_output=True)) == "acd"
    assert cut_at_stop("xyz", params) == "xyz"


def draws(count: int, seed: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities of `count` independent draws from PROBS."""
    return draw(LOGITS.expand(count, -1), SamplingParams(**options), numbers(count, seed))


def numbers(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@every_row(("options", "kept"), TRUNCATIONS)
def test_frequencies_and_logprobs_are_those_of_what_is_kept(options: dict[str, Any], kept: list[int]) -> None:
    tokens, logprobs = draws(20000, **options)
    assert set(tokens.tolist()) == set(kept)
    expected = torch.zeros_like(PROBS)
    expected[kept] = PROBS[kept] ** (1 / options.get("temperature", 1.0))
    expected /= expected.sum()
    torch.testing.assert_close(logprobs.exp(), expected[tokens])
    counts = torch.bincount(tokens, minlength=len(PROBS))
    chi_square = ((counts - 20000 * expected).square() / (20000 * expected))[kept].sum()
    assert chi_square < 25  # 4 degrees of freedom at most: exceeded once in 20000 seeds


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((50000, 7), -torch.inf)
    logits[:, [2, 4]] = torch.tensor([0.0, -30.0])
    tokens, logprobs = draw(logits, SamplingParams(), numbers(50000))
    assert set(tokens.tolist()) <= {2, 4} and logprobs.isfinite().all()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_a_possible_token(uniform: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, 50, generator=generator)
    logits[:, [0, 1, 48, 49]] = -torch.inf
    tokens, logprobs = draw(logits, SamplingParams(), torch.full((1000, 1), uniform, dtype=torch.float64))
    assert tokens.min() >= 2 and tokens.max() < 48 and logprobs.isfinite().all()


def test_greedy_takes_the_most_likely_token_and_its_logprob_at_temperature_one() -> None:
    tokens, logprobs = draws(3, temperature=0)
    assert tokens.tolist() == [0, 0, 0]
    torch.testing.assert_close(logprobs, LOGITS[:1].expand(3))


def test_rows_are_drawn_independently() -> None:
    tokens, _ = draws(20000)
    first, second = tokens[::2], tokens[1::2]
    assert abs(torch.corrcoef(torch.stack([first, second]).double())[0, 1]) < 0.04


@pytest.mark.parametrize("stop", ["END", "\n\n", "日本語の終わり", "🙂🙂🙂"])
def test_a_stop_string_is_seen_however_many_tokens_it_takes(tokenizer: PreTrainedTokenizerBase, stop: str) -> None:
    completion = tokenizer("Some text before. " + stop)["input_ids"]
    criteria = StopCriteria(tokenizer, SamplingParams(stop=stop), [2], torch.device("cpu"))
    for ids, ends in ((completion, True), (completion[:-1], False)):
        assert bool(criteria.ends(torch.tensor(ids[-1:]), lambda count, of=ids: [of[-count:]])) is ends


def test_end_tokens_and_stop_tokens_end_a_row_unless_they_are_ignored(tokenizer: PreTrainedTokenizerBase) -> None:
    for params, expected in ((SamplingParams(stop_token_ids=[9]), [True, True, False]),
                             (SamplingParams(ignore_eos=True), [False, False, False])):
        criteria = StopCriteria(tokenizer, params, [2], torch.device("cpu"))
        assert criteria.ends(torch.tensor([2, 9, 7]), lambda count: []).tolist() == expected
