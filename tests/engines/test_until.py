"""Prompts that are finished before all of their sequences are: which are taken, what is told of the others."""

from typing import Any

import pytest
from memory import Failing
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Until
from lowmem_grpo.engines.speculation import Speculation
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.memory.bounds import RunMemory
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout

CONTEXT = 120
PROMPTS = [[17, 40, 9], [300, 25, 77, 12], [5, 6], [100]]
N, ENOUGH = 6, 4
ROUNDED = 2e-6  # log-probabilities are held in float32
PARAMS = SamplingParams(n=N, max_tokens=60, seed=3, temperature=1.5, stop_token_ids=list(range(0, 320, 17)))


@pytest.fixture
def engine(small_policy: Policy, tokenizer: PreTrainedTokenizerBase) -> TransformersEngine:
    return TransformersEngine(small_policy, tokenizer, CONTEXT)


def first_to_end(group: list[Rollout]) -> list[int]:
    """The rows of a group that end first, in order; of those that end together, the first."""
    order = sorted(range(N), key=lambda row: (len(group[row].completion_ids), row))
    return sorted(order[:ENOUGH])


def check_taken(found: list[list[Rollout]], full: list[list[Rollout]]) -> None:
    """Those that end first, with the tokens that they would have had anyway."""
    for ours, group in zip(found, full, strict=True):
        expected = [group[row] for row in first_to_end(group)]
        assert [one.completion_ids for one in ours] == [one.completion_ids for one in expected]
        for one, other in zip(ours, expected, strict=True):
            assert (one.finish_reason, one.text) == (other.finish_reason, other.text)
            assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=ROUNDED)


def reached(group: list[Rollout]) -> list[int]:
    """What the others had drawn when the last one that was taken ended."""
    taken = first_to_end(group)
    last = max(len(group[row].completion_ids) for row in taken)
    return [min(last, len(group[row].completion_ids)) for row in range(N) if row not in taken]


@pytest.fixture
def full(engine: TransformersEngine) -> list[list[Rollout]]:
    """All sequences to their ends; some end together, and the last ones much later."""
    groups = engine.generate(PROMPTS, PARAMS)
    lengths = [sorted(len(one.completion_ids) for one in group) for group in groups]
    assert any(own[-1] > own[ENOUGH - 1] for own in lengths)
    return groups


def test_the_first_to_end_are_taken_with_the_same_tokens_and_the_others_are_measured(
    engine: TransformersEngine, full: list[list[Rollout]]
) -> None:
    until, told, running = Until(ENOUGH), dict[int, list[Rollout]](), list[int]()
    found = engine.generate(PROMPTS, PARAMS, told.__setitem__, running.append, until)
    check_taken(found, full)
    assert {prompt: sorted(own) for prompt, own in until.dropped.items()} == {
        prompt: sorted(reached(group)) for prompt, group in enumerate(full)}
    assert all(told[prompt] is group for prompt, group in enumerate(found)) and len(told) == len(PROMPTS)
    assert running == sorted(running, reverse=True)
    steps = max(len(one.completion_ids) for group in found for one in group)
    assert engine.pace.take().spent["full"].tokens > 0 and len(running) <= steps
    assert engine.generate(PROMPTS, PARAMS, until=Until(ENOUGH))[0][0].text == found[0][0].text  # nobody listens


@pytest.mark.slow
def test_all_are_taken_where_all_are_enough(engine: TransformersEngine, full: list[list[Rollout]]) -> None:
    until = Until(N)
    found = engine.generate(PROMPTS, PARAMS, until=until)
    assert [[one.completion_ids for one in group] for group in found] == [
        [one.completion_ids for one in group] for group in full]
    assert until.dropped == {}


@pytest.mark.slow
@pytest.mark.parametrize("room", [2, 9])
def test_rows_that_wait_for_room_are_dropped_before_they_begin(
    engine: TransformersEngine, full: list[list[Rollout]], room: int
) -> None:
    engine.bound = RunMemory().rollout
    engine.bound.lowered = room
    until = Until(ENOUGH)
    found = engine.generate(PROMPTS, PARAMS, until=until)
    for ours, group in zip(found, full, strict=True):
        known = [one.completion_ids for one in group]
        assert len(ours) == ENOUGH and all(one.completion_ids in known for one in ours)
    assert all(len(own) == N - ENOUGH for own in until.dropped.values())
    assert room > 2 or 0 in [tokens for own in until.dropped.values() for tokens in own]


@pytest.mark.slow
def test_guesses_in_the_tail_take_as_many_with_the_same_tokens(
    engine: TransformersEngine, full: list[list[Rollout]]
) -> None:
    other, until = TransformersEngine(engine.policy, engine.tokenizer, CONTEXT), Until(ENOUGH)
    other.speculation = Speculation(comparing=False, left=1_000_000)  # it always guesses
    for prompt, group in zip(PROMPTS, full, strict=True):
        other.speculation.earlier.add(prompt, [one.completion_ids for one in group])
    found = other.generate(PROMPTS, PARAMS, until=until)
    assert other.speculation.counted.right > 0
    for ours, group in zip(found, full, strict=True):
        known = [one.completion_ids for one in group]
        assert len(ours) == ENOUGH and all(one.completion_ids in known for one in ours)
    assert all(len(own) == N - ENOUGH for own in until.dropped.values())


@pytest.mark.slow
@pytest.mark.parametrize("calls", [(0,), (9,), (3, 12)])
def test_memory_that_runs_out_leaves_the_same_tokens_and_reports_once(
    engine: TransformersEngine, full: list[list[Rollout]], calls: tuple[int, ...]
) -> None:
    engine.bound = RunMemory().rollout
    hook, told, until = Failing(*calls), list[int](), Until(ENOUGH)
    handle = engine.policy.backbone.norm.register_forward_hook(hook)
    try:
        found = engine.generate(PROMPTS, PARAMS, lambda prompt, group: told.append(prompt), until=until)
    finally:
        handle.remove()
    assert hook.raised == len(calls) and sorted(told) == list(range(len(PROMPTS)))
    for ours, group in zip(found, full, strict=True):
        known = [one.completion_ids for one in group]
        assert len(ours) == ENOUGH and all(one.completion_ids in known for one in ours)
    assert all(len(own) == N - ENOUGH for own in until.dropped.values())


@pytest.mark.slow
def test_an_error_of_the_caller_ends_the_call(engine: TransformersEngine) -> None:
    def fails(prompt: int, group: list[Any]) -> None:
        raise KeyError("no")

    with pytest.raises(KeyError):
        engine.generate(PROMPTS, PARAMS, fails, until=Until(ENOUGH))
    assert len(engine.generate(PROMPTS[:1], PARAMS, until=Until(ENOUGH))[0]) == ENOUGH
