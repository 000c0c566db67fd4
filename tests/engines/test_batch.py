"""Rows that enter as others are done: the same completions as with room for all, in every family."""

from itertools import chain
from typing import Any

import pytest
from different_ends import CONTEXT, PARAMS, PROMPTS, check_same
from memory import failing
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines import batch, decoding
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout


@pytest.fixture
def engine(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> TransformersEngine:
    return TransformersEngine(policy, tokenizer, CONTEXT)


@pytest.fixture(scope="module")
def expected(small_policy: Policy, tokenizer: PreTrainedTokenizerBase) -> list[list[Rollout]]:
    """With room for all rows."""
    return TransformersEngine(small_policy, tokenizer, CONTEXT).generate(PROMPTS, PARAMS)


def bounded(engine: TransformersEngine, rows: int) -> TransformersEngine:
    """The same with room for so many rows, by a plan."""
    other = TransformersEngine(engine.policy, engine.tokenizer, engine.max_seq_length)
    other.bound.planned = rows
    return other


@pytest.mark.every(2)
def test_completions_are_the_same_with_room_for_fewer_rows(engine: TransformersEngine) -> None:
    expected = engine.generate(PROMPTS, PARAMS)
    told: list[int] = []
    found = bounded(engine, 5).generate(PROMPTS, PARAMS, lambda prompt, group: told.append(prompt))
    check_same(found, expected)
    assert sorted(told) == list(range(len(PROMPTS)))


@pytest.mark.parametrize("stop", [["e"], ["1", "st"]])
def test_stop_strings_and_end_tokens_are_seen_where_rows_are_at_different_places(
    small_policy: Policy, tokenizer: PreTrainedTokenizerBase, stop: list[str]
) -> None:
    engine = TransformersEngine(small_policy, tokenizer, CONTEXT)
    params = SamplingParams(n=4, max_tokens=34, seed=5, stop=stop)
    prompts = [tokenizer(f"What is {n} + {n}?")["input_ids"] for n in range(5)]
    expected = engine.generate(prompts, params)
    assert len({len(rollout.completion_ids) for rollout in chain(*expected)}) > 2  # places at which they end
    check_same(bounded(engine, 6).generate(prompts, params), expected)


def test_rows_enter_before_the_last_one_of_the_batch_is_done(
    small_policy: Policy, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine = bounded(TransformersEngine(small_policy, tokenizer, CONTEXT), 4)
    seen: list[int] = []  # the rows of each pass
    engine.policy.backbone.register_forward_pre_hook(
        lambda module, args, named: seen.append(len(named["input_ids"])), with_kwargs=True)
    engine.generate(PROMPTS, PARAMS)
    longest = [min(34, CONTEXT - len(prompt)) for prompt in PROMPTS]
    in_turn = sum(max(longest[first : first + 2]) for first in (0, 2, 4))  # two prompts a round
    assert sum(longest) * 2 / 4 < len(seen) < 0.85 * in_turn
    assert max(seen) == 4 and engine.bound.failures == 0


def test_prompts_whose_earlier_answers_were_longest_are_begun_first(
    small_policy: Policy, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine = TransformersEngine(small_policy, tokenizer, CONTEXT)
    expected = engine.generate(PROMPTS, PARAMS)
    engine.bound.lowered = 2
    told: list[int] = []
    found = engine.generate(PROMPTS, PARAMS, lambda prompt, group: told.append(prompt))
    check_same(found, expected)
    assert told == [1, 5, 3, 0, 2, 4]  # one prompt at a time, as two rows run
    assert sorted(told, key=lambda prompt: len(PROMPTS[prompt])) == told


@pytest.mark.parametrize("calls", [(2,), (20,), (5, 30)])
def test_a_shortage_among_rows_at_different_places_changes_nothing_and_each_prompt_is_told_once(
    small_policy: Policy, tokenizer: PreTrainedTokenizerBase, expected: list[list[Rollout]], calls: tuple[int, ...]
) -> None:
    other, told = bounded(TransformersEngine(small_policy, tokenizer, CONTEXT), 6), list[tuple[int, list[Rollout]]]()
    with failing(other, *calls) as hook:
        found = other.generate(PROMPTS, PARAMS, lambda prompt, group: told.append((prompt, group)))
    check_same(found, expected)
    assert hook.raised == len(calls) and other.bound.lowered == 6 // 2 ** len(calls)
    assert sorted(prompt for prompt, _ in told) == list(range(len(PROMPTS)))
    assert all(group is found[prompt] for prompt, group in told)


def test_random_numbers_of_far_places_are_each_rows_own(
    small_policy: Policy, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "STEPS", 8)  # the last places are behind all blocks that are held
    monkeypatch.setattr(batch, "AHEAD", 16)
    engine = TransformersEngine(small_policy, tokenizer, 60)
    params = SamplingParams(n=1, max_tokens=50, seed=9, ignore_eos=True)
    prompts = [[5] * 40, [6] * 10, [7] * 15]
    expected = engine.generate(prompts, params)
    check_same(bounded(engine, 2).generate(prompts, params), expected)
