"""A gpt-oss in our engine, with a window on every other layer, sinks and YaRN, on texts far beyond the window."""

from typing import Any

import pytest
import torch
from gpt_oss import gpt_oss_model
from small_models import with_adapter
from transformers import PreTrainedTokenizerBase
from vllm_models import differences

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines import transformers_engine
from lowmem_grpo.engines.batch import DecodeState
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.models import attention
from lowmem_grpo.models.experts import use_routed_blocks
from lowmem_grpo.models.lean_modules import LeanAttention, make_lean
from lowmem_grpo.models.policy import Policy

WINDOW = 128
GREEDY = SamplingParams(temperature=0, max_tokens=16, n=2, ignore_eos=True)
# Rows that are padded on the left up to the longest; beyond the window, below it, and into it while tokens are drawn
PROMPTS = [[5 + (3 * place + number) % 300 for place in range(length)]
           for number, length in enumerate((230, 3, WINDOW - 7))]


@pytest.fixture(scope="module")
def engine(tokenizer: PreTrainedTokenizerBase) -> TransformersEngine:
    model = with_adapter(gpt_oss_model(experts=4)).double()
    use_routed_blocks(model.get_base_model())
    make_lean(model.get_base_model(), None)
    assert isinstance(model.get_base_model().model.layers[0].self_attn, LeanAttention)
    return TransformersEngine(Policy(model), tokenizer, max_seq_length=512)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Greedy tokens of transformers' own model, each prompt alone, with eager attention."""
    model: Any = with_adapter(gpt_oss_model(experts=4)).double()
    model.get_base_model().set_experts_implementation("eager")  # the others compute in 16 and 32 bits only
    model.get_base_model().set_attn_implementation("eager")
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                             max_new_tokens=GREEDY.max_tokens, eos_token_id=None)
        found.append(out[0, len(prompt):].tolist())
    return found


@pytest.mark.parametrize(("rows", "piece"), [(None, None), (3, 50)])
def test_greedy_tokens_are_those_of_transformers(
    engine: TransformersEngine, expected: list[list[int]], rows: int | None, piece: int | None,
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that two completions share, read whole or in pieces, and rows that enter as others leave."""
    if piece is not None:
        monkeypatch.setattr(transformers_engine, "prefill_piece", lambda prompts, longest: piece)
    monkeypatch.setattr(engine.bound, "lowered", rows)
    groups = engine.generate(PROMPTS, GREEDY)
    assert [[one.completion_ids for one in group] for group in groups] == [[ids] * 2 for ids in expected]
    assert len({token for ids in expected for token in ids}) > 9, "a text that is not the same token again"


@pytest.mark.parametrize("name", ["cached_attention", "window_mask"])
def test_a_window_that_is_ignored_gives_other_tokens(
    name: str, engine: TransformersEngine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above sees: in new tokens, and in prompts."""
    plain, place = getattr(attention, name), {"cached_attention": 5, "window_mask": 2}[name]
    monkeypatch.setattr(attention, name, lambda *given: plain(
        *(1024 if number == place and value else value for number, value in enumerate(given))))
    groups = engine.generate(PROMPTS, GREEDY)
    same = [group[0].completion_ids == ids for group, ids in zip(groups, expected, strict=True)]
    assert same[1] and not all(same)


def test_sampled_logprobs_are_those_the_trainer_computes(engine: TransformersEngine) -> None:
    params = SamplingParams(n=3, max_tokens=16, seed=1, ignore_eos=True)
    groups = engine.generate(PROMPTS, params)
    assert differences(engine.policy, PROMPTS, groups).abs().max() <= 1e-5


def test_the_cache_of_a_layer_with_a_window_is_as_large_as_a_plan_counts(engine: TransformersEngine) -> None:
    passes, state = engine.passes, DecodeState.holding(torch.arange(2))
    with passes.evaluating():
        passes.feed(state, torch.arange(300).view(2, 150) + 5, at_once=64)
    shape = ModelShape.from_config(engine.policy.base.config)
    assert state.cache.nbytes == 2 * shape.kv_bytes(150, itemsize=8)
