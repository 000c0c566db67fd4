"""Drawing tokens of known probabilities, so that we can count them; the random numbers of rows and places; where a
completion ends; and turns of episodes by a caller's own engine, which only has `generate`."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from episodes import Talk
from tables import every_row
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines import decoding
from lowmem_grpo.engines.base import check_own_engine
from lowmem_grpo.engines.decoding import HELD, STEPS, StopCriteria, cut_at_stop, draw, shared_numbers
from lowmem_grpo.types import Rollout

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


@pytest.mark.parametrize("stop", ["END", "\n\n", "日本語の終わり", "🙂🙂🙂"])
def test_a_stop_string_is_seen_however_many_tokens_it_takes(tokenizer: PreTrainedTokenizerBase, stop: str) -> None:
    completion = tokenizer("Some text before. " + stop)["input_ids"]
    criteria = StopCriteria(tokenizer, SamplingParams(stop=stop), [2], torch.device("cpu"))
    for ids, ends in ((completion, True), (completion[:-1], False)):
        assert bool(criteria.ends(torch.tensor([ids[-1:]]), lambda count, of=ids: [of[-count:]])) is ends


def test_end_tokens_and_stop_tokens_end_a_row_unless_they_are_ignored(tokenizer: PreTrainedTokenizerBase) -> None:
    for params, expected in ((SamplingParams(stop_token_ids=[9]), [True, True, False]),
                             (SamplingParams(ignore_eos=True), [False, False, False])):
        criteria = StopCriteria(tokenizer, params, [2], torch.device("cpu"))
        assert criteria.ends(torch.tensor([[2, 9, 7]]), lambda count: []).tolist() == [expected]


def test_a_number_depends_on_its_seed_row_and_place_and_on_nothing_else() -> None:
    places = torch.tensor([[0, 1, (HELD + 3) * STEPS]]).expand(8, 3)  # the first block is dropped by the last place
    numbers, other = (shared_numbers(seed, 8, torch.device("cpu")) for seed in (1, 2))
    drawn = torch.cat([numbers(torch.arange(8), places), other(torch.arange(8), places)])
    assert len(drawn.unique()) == drawn.numel() and float(drawn.min()) >= 0 and float(drawn.max()) < 1
    for place in range(0, (HELD + 3) * STEPS, STEPS):
        numbers(torch.arange(8), torch.full((8, 1), place))
    assert torch.equal(numbers(torch.tensor([7, 3]), places[:2, [2, 0]]), drawn[[7, 3]][:, [2, 0]])


# A caller's own engine


class Plain:
    """Repeats the last token of a prompt, as often as a call allows. With `on_group` the last prompt is finished first.
    """

    name = "plain"

    def __init__(self, *capabilities: str) -> None:
        self.calls: list[tuple[int, SamplingParams]] = []
        self.capabilities = capabilities

    def generate(self, prompts: list[list[int]], params: SamplingParams, on_group: Any = None) -> list[list[Rollout]]:
        self.calls.append((len(prompts), params))
        most = params.max_tokens
        found = [[Rollout(prompt[-1:] * most, [-1.0] * most, "stop", "all of it")] for prompt in prompts]
        for index in reversed(range(len(prompts) if on_group else 0)):
            on_group(index, found[index])
        return found


@pytest.mark.parametrize(("capabilities", "order"), [((), [0, 1, 2]), (("on_group",), [2, 1, 0])])
def test_an_engine_without_converse_decodes_rounds_and_one_warning_says_so(
    capabilities: tuple[str, ...], order: list[int], tokenizer: PreTrainedTokenizerBase,
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoding.warn_of_rounds.cache_clear()
    engine = Plain(*capabilities)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            played = Talk([[5], [6, 7], [8]], 2, max_tokens=lambda key, turn: 2 + key + turn)
            decoding.converse(engine, played, SamplingParams(temperature=0.7, n=4), tokenizer)
            assert played.given == order * 2
            assert {len(r.ids) for r in played.asked if r.key == 1} == {2, 2 + 3 + 3}
    assert caplog.text.count("the engine plain has no converse(conversation, params)") == 1
    assert [(count, p.n, p.max_tokens, p.temperature, p.seed) for count, p in engine.calls[:2]] == [
        (3, 1, 4, 0.7, 0), (3, 1, 5, 0.7, 1)
    ]
    first = played.drawn[0][0]
    assert (first.completion_ids, first.rollout_logprobs, first.finish_reason) == ([5, 5], [-1.0] * 2, "length")
    assert first.text == tokenizer.decode([5, 5])
    longest = played.drawn[2][0]
    assert (longest.completion_ids, longest.finish_reason, longest.text) == ([8] * 4, "stop", "all of it")


def test_an_engine_with_converse_is_asked_itself(tokenizer: PreTrainedTokenizerBase) -> None:
    asked: list[Any] = []
    own = SimpleNamespace(capabilities={"converse"}, converse=lambda *given: asked.append(given))
    played, params = Talk([[5]]), SamplingParams()
    decoding.converse(own, played, params, tokenizer)
    assert asked == [(played, params)] and not played.takes


def test_an_engine_that_lacks_what_a_run_uses_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"engine is a Plain without kv_bytes, on_policy_update, sleep; an engine has"):
        check_own_engine(Plain())
