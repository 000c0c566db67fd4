"""What the trainer asks of any engine: seeds, room in the context, and a listener that hears of each prompt."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import TINY, load_model, with_adapter
from transformers import AutoTokenizer
from vllm_models import CONTEXT, NEEDS_VLLM, engine_on, ids_of

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.engines.vllm.lent_layers import LAYERS
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=NEEDS_VLLM)])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each engine on the embedded model, with the same context."""
    policy = Policy(with_adapter(load_model("tiny")))
    if request.param == "vllm":
        with engine_on(policy) as made:
            yield made
    else:
        yield TransformersEngine(policy, AutoTokenizer.from_pretrained(TINY), CONTEXT)


def test_the_same_seed_draws_the_same_tokens(engine: Any, prompts: list[list[int]]) -> None:
    assert engine.generate([], SamplingParams()) == []
    params = SamplingParams(n=4, max_tokens=16, seed=7, ignore_eos=True)
    first = ids_of(engine.generate(prompts, params))
    assert ids_of(engine.generate(prompts, params)) == first
    assert ids_of(engine.generate(prompts, replace(params, seed=8))) != first
    before = torch.get_rng_state()
    unseeded = [ids_of(engine.generate(prompts, replace(params, seed=None))) for _ in range(2)]
    assert unseeded[0] != unseeded[1]
    assert torch.equal(torch.get_rng_state(), before), "the global random state is left alone"


def test_a_completion_fills_the_context_and_no_more(engine: Any) -> None:
    params = SamplingParams(max_tokens=50, ignore_eos=True, seed=1)
    lengths = [CONTEXT - 1, CONTEXT - 2, CONTEXT - 50, CONTEXT - 51, 4]
    groups = engine.generate([[5 + number % 9 for number in range(length)] for length in lengths], params)
    assert [len(rollout.completion_ids) for (rollout,) in groups] == [1, 2, 50, 50, 50], "each has its own room"
    assert {rollout.finish_reason for (rollout,) in groups} == {"length"}
    with pytest.raises(ValueError, match=f"a prompt of {CONTEXT} tokens leaves no room in a context of {CONTEXT}"):
        engine.generate([[5] * 4, [5] * CONTEXT], params)
    assert len(engine.generate([[5] * 4], params)) == 1


def count_passes(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one entry with each pass through the engine's model."""
    passes: list[int] = []
    layer = LAYERS["model.layers.1.self_attn.o_proj"] if engine.name == "vllm" else engine.policy.backbone.norm
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: passes.append(1) or forward(x))
    return passes


def test_each_prompt_is_reported_once_as_soon_as_it_is_finished_with_the_rollouts_that_are_returned(
    engine: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=3, max_tokens=40, seed=4)
    expected = engine.generate(prompts, params)
    passes, told = count_passes(engine, monkeypatch), []
    groups = engine.generate(prompts, params, lambda prompt, rollouts: told.append((prompt, rollouts, len(passes))))
    assert ids_of(groups) == ids_of(expected)
    assert sorted(prompt for prompt, *_ in told) == [0, 1, 2]
    assert all(rollouts is groups[prompt] for prompt, rollouts, _ in told)
    longest = [max(len(rollout.completion_ids) for rollout in groups[prompt]) for prompt, *_ in told]
    reported = [made for *_, made in told]
    assert longest == sorted(longest) and len(set(longest)) > 1
    assert reported == longest or (engine.name == "vllm" and reported[0] < reported[1] < len(passes))


def test_an_error_of_the_listener_ends_the_call_and_the_engine_lives_on(engine: Any, prompts: list[list[int]]) -> None:
    told: list[int] = []

    def refuses(prompt: int, rollouts: list[Rollout]) -> None:
        told.append(prompt)
        raise KeyError("gold")

    engine.policy.model.train()
    with pytest.raises(KeyError, match="gold"):
        engine.generate(prompts, SamplingParams(n=2, max_tokens=10), refuses)
    assert engine.policy.model.training
    assert len(told) == 1
    assert len(engine.generate(prompts, SamplingParams(max_tokens=10))) == 3
    engine.policy.model.eval()
