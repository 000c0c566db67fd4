"""Guesses in the tail: the same tokens and log-probabilities as without them, in every family."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from episodes import Talk
from mixtures import mixture_folder, policy_and_twin
from small_models import load_model, with_adapter
from transformers import PreTrainedTokenizerBase
from vllm_models import differences

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.speculation import Speculation
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout

CONTEXT = 120
LONG = [[(7 * place + index) % 300 + 5 for place in range(110)] for index in range(12)]
# the long ones leave room for 10 tokens, so that the answers to the short ones are the tail
PROMPTS = [[17, 40, 9], [300, 25, 77], *LONG]
PARAMS = SamplingParams(n=2, max_tokens=80, seed=3, ignore_eos=True)
ROUNDED = 2e-6  # log-probabilities are held in float32


@pytest.fixture
def plain(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> TransformersEngine:
    """An engine without guesses, of every family that can take tokens back."""
    engine = TransformersEngine(policy, tokenizer, CONTEXT)
    if policy.base.config.model_type.startswith("qwen3_5"):
        pytest.skip("its states cannot be taken back")
    return engine


def guessing(engine: TransformersEngine, answers: list[list[Rollout]]) -> TransformersEngine:
    """An engine of the same model that always guesses. It knows answers, but for every ninth token."""
    other = TransformersEngine(engine.policy, engine.tokenizer, engine.max_seq_length)
    other.speculate(PARAMS)
    other.speculation = Speculation(comparing=False, left=1_000_000)
    for prompt, group in zip(PROMPTS, answers, strict=True):
        known = [[5 if place % 9 == 8 else token for place, token in enumerate(rollout.completion_ids)]
                 for rollout in group]
        other.speculation.earlier.add(prompt, known)
    return other


def ids_of(groups: list[list[Rollout]]) -> list[list[list[int]]]:
    return [[rollout.completion_ids for rollout in group] for group in groups]


def check_same(found: list[list[Rollout]], expected: list[list[Rollout]]) -> None:
    """The same tokens, ends, texts, and log-probabilities but for rounding."""
    assert ids_of(found) == ids_of(expected)
    for ours, theirs in zip(chain(*found), chain(*expected), strict=True):
        assert (ours.finish_reason, ours.text) == (theirs.finish_reason, theirs.text)
        assert ours.rollout_logprobs == pytest.approx(theirs.rollout_logprobs, abs=ROUNDED)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{}, {"temperature": 0.0, "n": 1}, {"temperature": 0.7, "top_p": 0.9}])
def test_guesses_change_no_token(plain: TransformersEngine, change: dict[str, float]) -> None:
    params = replace(PARAMS, **change)
    expected = plain.generate(PROMPTS, params)
    engine = guessing(plain, expected)
    check_same(engine.generate(PROMPTS, params), expected)
    assert engine.speculation is not None
    counted = engine.speculation.counted
    assert 20 < counted.right < counted.guesses  # some are wrong, and are taken back
    assert counted.passes < 70


@pytest.mark.slow
def test_sampled_logprobs_are_those_the_trainer_computes(plain: TransformersEngine) -> None:
    engine = guessing(plain, plain.generate(PROMPTS, PARAMS))
    found = differences(engine.policy, PROMPTS, engine.generate(PROMPTS, PARAMS), 1.0)
    assert engine.speculation is not None and engine.speculation.counted.right
    assert found.abs().max() <= ROUNDED


def tiny(tokenizer: PreTrainedTokenizerBase, policy: Policy) -> TransformersEngine:
    return TransformersEngine(policy, tokenizer, CONTEXT)


@pytest.mark.slow
def test_stop_strings_and_end_tokens_among_guesses_end_a_row(
    small_policy: Policy, tokenizer: PreTrainedTokenizerBase
) -> None:
    plain = tiny(tokenizer, small_policy)
    free = plain.generate(PROMPTS, replace(PARAMS, temperature=1.5))
    text = tokenizer.decode(free[0][0].completion_ids)
    for change in ({"stop": text[60:63]}, {"stop_token_ids": [free[1][1].completion_ids[40]]}):
        params = replace(PARAMS, temperature=1.5, **change)
        expected = plain.generate(PROMPTS, params)
        assert any(rollout.finish_reason == "stop" for rollout in chain(*expected[:2]))
        check_same(guessing(plain, free).generate(PROMPTS, params), expected)


def test_groups_are_reported_once_and_what_is_said_in_between_counts_rows(
    small_policy: Policy, tokenizer: PreTrainedTokenizerBase
) -> None:
    plain = tiny(tokenizer, small_policy)
    engine, told, running = guessing(plain, plain.generate(PROMPTS, PARAMS)), list[int](), list[int]()
    groups = engine.generate(PROMPTS, PARAMS, lambda index, rollouts: told.append(index), running.append)
    assert sorted(told) == list(range(len(PROMPTS)))
    assert running == sorted(running, reverse=True) and running[-1] > 0
    check_same(groups, plain.generate(PROMPTS, PARAMS))


def test_a_model_with_states_is_refused_by_name(tokenizer: PreTrainedTokenizerBase) -> None:
    engine = TransformersEngine(Policy(with_adapter(load_model("Qwen3_5"))), tokenizer, CONTEXT)
    with pytest.raises(ValueError, match=r'speculation="lookup" takes wrong guesses back.*Qwen3_5.*leave speculation'):
        engine.speculate(PARAMS)


@pytest.mark.slow
def test_routes_of_experts_are_those_of_the_tokens_that_stayed(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    plain = tiny(tokenizer, policy_and_twin(mixture_folder(tmp_path), torch.float64)[0])
    expected = plain.generate(PROMPTS, PARAMS)
    engine = guessing(plain, expected)
    found = engine.generate(PROMPTS, PARAMS)
    check_same(found, expected)
    assert engine.speculation is not None and engine.speculation.counted.right > 20
    for ours, theirs in zip(chain(*found), chain(*expected), strict=True):
        assert ours.routes is not None and theirs.routes is not None
        assert torch.equal(torch.cat(ours.routes.parts), torch.cat(theirs.routes.parts))


@pytest.mark.slow
def test_rows_that_are_resumed_after_a_shortage_have_the_same_tokens(
    small_policy: Policy, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tiny(tokenizer, small_policy)
    expected = plain.generate(PROMPTS, PARAMS)
    engine = guessing(plain, expected)
    calls, real = [], engine.passes.guessed

    def fails_once(*given: torch.Tensor) -> torch.Tensor:
        calls.append(given)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("pretended")
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.passes, "guessed", fails_once)
    check_same(engine.generate(PROMPTS, PARAMS), expected)
    assert len(calls) > 4


@pytest.mark.slow
def test_turns_with_guesses_are_the_same_and_their_next_turns_go_on_from_what_is_held(
    small_policy: Policy, tokenizer: PreTrainedTokenizerBase
) -> None:
    plain = tiny(tokenizer, small_policy)
    engine = guessing(plain, [[] for _ in PROMPTS])
    assert engine.speculation is not None

    def talk() -> Talk:
        return Talk([[17, 40, 9 + key] for key in range(12)], turns=3,
                    max_tokens=lambda key, turn: 20 if (key + turn) % 6 == 0 else 3)

    expected, found = talk(), talk()
    plain.converse(expected, PARAMS)
    turns: dict[int, int] = {}
    for request in expected.asked:
        turn = turns[request.key] = turns.get(request.key, -1) + 1
        engine.speculation.earlier.add(request.ids, [expected.drawn[request.key][turn].completion_ids])
    engine.converse(found, PARAMS)
    assert found.ids == expected.ids
    assert [[turn.cached_tokens for turn in found.drawn[key]] for key in range(12)] == \
           [[turn.cached_tokens for turn in expected.drawn[key]] for key in range(12)]
    assert engine.speculation.counted.right > 10
