"""Prompts that vLLM finishes before all of their sequences have ended: tokens, what is dropped, what stays behind."""

from typing import Any

import pytest
from vllm_models import NEEDS_VLLM, SAME, differences, dying, ids_of

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Until
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.engines.vllm.lent_layers import LAYERS
from lowmem_grpo.engines.vllm.steps import Steps
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout

pytestmark = [*NEEDS_VLLM, pytest.mark.slow]
N, ENOUGH = 6, 4
PARAMS = SamplingParams(n=N, max_tokens=50, seed=3, temperature=1.5, stop_token_ids=list(range(0, 320, 17)))


def first_to_end(group: list[Rollout]) -> list[list[int]]:
    """The completions that end first, in the order of their rows."""
    order = sorted(range(N), key=lambda row: (len(group[row].completion_ids), row))
    return [group[row].completion_ids for row in sorted(order[:ENOUGH])]


def test_the_first_to_end_are_taken_with_the_same_tokens(
    engine: VLLMEngine, policy: Policy, prompts: list[list[int]]
) -> None:
    prompts = prompts[:1]  # all of whose sequences run together
    full = engine.generate(prompts, PARAMS)
    until, told, running = Until(ENOUGH), dict[int, list[Rollout]](), list[int]()
    found = engine.generate(prompts, PARAMS, told.__setitem__, running.append, until)
    assert ids_of(found) == [first_to_end(group) for group in full]
    assert all(told[prompt] is group for prompt, group in enumerate(found)) and len(told) == len(prompts)
    assert running == sorted(running, reverse=True) and running[-1] > 0
    assert differences(policy, prompts, found, PARAMS.temperature).abs().mean() < SAME
    for prompt, group in enumerate(full):
        last = max(map(len, first_to_end(group)))
        others = sorted(len(one.completion_ids) for one in group)[ENOUGH:]
        assert sorted(until.dropped[prompt]) == [min(last, length) for length in others]
    assert not engine.unfinished and not engine.outdated, "what was taken back is gone"


def test_the_next_call_finds_nothing_of_what_was_dropped(engine: VLLMEngine, prompts: list[list[int]]) -> None:
    expected = ids_of(engine.generate(prompts, PARAMS))
    llm = engine.llm
    engine.generate(prompts, PARAMS, until=Until(1))
    engine.on_policy_update(1)  # prefixes are dropped, which vLLM refuses while it holds requests
    assert ids_of(engine.generate(prompts, PARAMS)) == expected
    assert engine.llm is llm


def test_stop_strings_end_sequences_as_without(engine: VLLMEngine, prompts: list[list[int]]) -> None:
    params = SamplingParams(n=3, max_tokens=40, seed=5, stop=["1", "e"])
    full, found = engine.generate(prompts, params), engine.generate(prompts, params, until=Until(3))
    assert ids_of(found) == ids_of(full)
    assert [[one.text for one in group] for group in found] == [[one.text for one in group] for group in full]


def test_a_prompt_is_computed_once_for_its_sequences(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    layer = next(iter(LAYERS.values()))
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: rows.append(len(x)) or forward(x))
    long = [number % 500 + 3 for number in range(300)]
    engine.generate([long], SamplingParams(n=8, max_tokens=1, seed=1), until=Until(8))
    assert len(long) <= sum(rows) <= len(long) + 7 * (len(long) % 32)


def test_an_engine_that_dies_is_replaced_and_finished_prompts_are_kept(
    engine: VLLMEngine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, until = ids_of(engine.generate(prompts, PARAMS, until=Until(ENOUGH))), Until(ENOUGH)
    told: list[int] = []
    dying(monkeypatch, RuntimeError("the device is gone"))
    found = engine.generate(prompts, PARAMS, lambda prompt, group: told.append(prompt), until=until)
    assert ids_of(found) == expected
    assert sorted(told) == list(range(len(prompts)))
    assert all(len(own) == N - ENOUGH for own in until.dropped.values())


def test_steps_take_back_nothing_where_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        llm_engine: Any = None

    Steps(Engine(), None).abort([])  # type: ignore[arg-type]
