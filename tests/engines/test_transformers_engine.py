"""The transformers engine: the trainer's own log-probabilities, transformers' own greedy tokens, vLLM's meanings."""

from dataclasses import replace

import pytest
import torch
from small_models import load_model, with_adapter
from transformers import PreTrainedTokenizerBase
from vllm_models import differences

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines import transformers_engine
from lowmem_grpo.engines.batch import DecodeState, Passes
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.memory.cards import prefill_piece
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.plan import RunSettings
from lowmem_grpo.memory.rows import mask_numbers
from lowmem_grpo.models import attention
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout

EOS = 2
ROUNDED = 2e-6  # log-probabilities are held in float32
EPSILON = 1e-5


@pytest.fixture
def engine(tiny_policy: Policy, tokenizer: PreTrainedTokenizerBase) -> TransformersEngine:
    """An engine on the embedded model."""
    return TransformersEngine(tiny_policy, tokenizer, max_seq_length=256)


@pytest.fixture
def any_engine(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> TransformersEngine:
    """An engine on a model of every family, one after the other."""
    return TransformersEngine(policy, tokenizer, max_seq_length=256)


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.6])
def test_sampled_logprobs_are_those_the_trainer_computes(
    any_engine: TransformersEngine, prompts: list[list[int]], temperature: float
) -> None:
    params = SamplingParams(n=3, temperature=temperature, max_tokens=24, seed=1, ignore_eos=True)
    found = differences(any_engine.policy, prompts, any_engine.generate(prompts, params), temperature)
    assert len(found) == 9 * 24
    assert found.abs().max() <= ROUNDED


@pytest.mark.parametrize("family", ["tiny", "Gemma3", "Qwen3_5"])
@pytest.mark.every(3)
def test_in_float32_the_sampler_is_as_near_to_float64_as_the_trainer(
    family: str, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]
) -> None:
    policy, twin = Policy(with_adapter(load_model(family))), Policy(with_adapter(load_model(family)).double())
    engine = TransformersEngine(policy, tokenizer, max_seq_length=256)
    groups = engine.generate(prompts, SamplingParams(n=3, max_tokens=24, seed=1, ignore_eos=True))
    samplers = differences(twin, prompts, groups)
    trainers = samplers - differences(policy, prompts, groups)
    assert samplers.abs().max() <= trainers.abs().max() + EPSILON


@pytest.mark.parametrize("family", ["tiny", "Gemma3", "Qwen3_5"])
def test_prompts_that_are_read_in_pieces_give_what_the_trainer_computes(
    family: str, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransformersEngine(Policy(with_adapter(load_model(family)).double()), tokenizer, max_seq_length=256)
    masks: list[torch.Size] = []
    hidden = engine.passes.hidden
    monkeypatch.setattr(engine.passes, "hidden", lambda ids, positions, mask, *rest, **named: (
        masks.append(mask.shape), hidden(ids, positions, mask, *rest, **named))[1])
    monkeypatch.setattr(transformers_engine, "prefill_piece", lambda prompts, longest: 5)
    groups = engine.generate(prompts, SamplingParams(n=2, max_tokens=8, seed=1, ignore_eos=True))
    assert differences(engine.policy, prompts, groups).abs().max() <= ROUNDED
    longest = max(map(len, prompts))
    assert masks[: -(-longest // 5)] == [(len(prompts), 1, min(5, longest - start), min(start + 5, longest))
                                         for start in range(0, longest, 5)]


def test_a_prompt_that_is_read_in_pieces_takes_no_more_cache_than_its_tokens(tiny_policy: Policy) -> None:
    passes, state = Passes(tiny_policy), DecodeState.holding(torch.arange(2))
    with passes.evaluating():
        passes.feed(state, torch.arange(5, 5 + 2 * 37).view(2, 37), at_once=5)
    shape = ModelShape.from_config(tiny_policy.base.config)
    assert state.cache.nbytes == 2 * shape.kv_bytes(37, itemsize=8)


@pytest.mark.parametrize(("prompts", "longest", "piece"), [
    (1, 32768, 2048), (8, 512, 1024), (8, 8192, 1024), (1, 59136, 1134), (64, 8192, 256), (1, 100, 8192),
])
def test_no_mask_of_a_pass_over_prompts_is_larger_than_a_plan_counts(prompts: int, longest: int, piece: int) -> None:
    assert prefill_piece(prompts, longest) == piece
    settings = RunSettings(longest, 8, sequences=8 * prompts, engine="transformers")
    assert mask_numbers(settings, 8 * prompts) == prompts * min(piece, longest) * longest
    assert 4 * mask_numbers(settings, 8 * prompts) <= 2**28 or piece == 256, "two of bools and one in 16 bits"


@pytest.mark.every(2)
def test_greedy_tokens_are_those_of_transformers(any_engine: TransformersEngine, prompts: list[list[int]]) -> None:
    groups = any_engine.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
    base = any_engine.policy.model.get_base_model()
    base.set_attn_implementation("eager")
    try:
        for prompt, group in zip(prompts, groups, strict=True):
            ids = torch.tensor([prompt])
            out = any_engine.policy.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0,
                eos_token_id=EOS,
            )
            assert group[0].completion_ids == out[0, len(prompt) :].tolist()
    finally:
        base.set_attn_implementation(attention.NAME)


def test_rows_that_finish_early_do_not_disturb_the_others(engine: TransformersEngine, prompts: list[list[int]]) -> None:
    engine.on_policy_update(3)
    sampled = engine.generate(prompts, SamplingParams(n=8, max_tokens=40, seed=5))
    lengths = {len(rollout.completion_ids) for group in sampled for rollout in group}
    assert len(lengths) > 5  # rows left the batch at many lengths
    assert {rollout.policy_version for group in sampled for rollout in group} == {3} and engine.kv_bytes > 0
    assert differences(engine.policy, prompts, sampled).abs().max() <= ROUNDED


ENDLESS = SamplingParams(temperature=0, max_tokens=60)


@pytest.fixture
def full(engine: TransformersEngine, prompts: list[list[int]]) -> Rollout:
    """What is sampled up to the end token, with no other reason to end."""
    ((rollout,),) = engine.generate(prompts[:1], ENDLESS)
    return rollout


def test_a_completion_ends_at_an_end_token_a_stop_token_or_max_tokens_and_says_so(
    engine: TransformersEngine, prompts: list[list[int]], full: Rollout
) -> None:
    ids, length = full.completion_ids, len(full.completion_ids)
    assert (full.finish_reason, ids[-1], full.text) == ("stop", EOS, engine.tokenizer.decode(ids[:-1]))
    assert EOS not in ids[:-1]
    for options, expected, reason in (
        ({"max_tokens": length - 1}, ids[:-1], "length"), ({"max_tokens": length}, ids, "stop"),
        ({"stop_token_ids": [ids[4]]}, ids[: ids.index(ids[4]) + 1], "stop"),
    ):
        ((found,),) = engine.generate(prompts[:1], replace(ENDLESS, **options))
        assert (found.completion_ids, found.finish_reason) == (expected, reason), options
    ((on,),) = engine.generate(prompts[:1], replace(ENDLESS, ignore_eos=True))
    assert on.finish_reason == "length" and len(on.completion_ids) == 60 and EOS in on.completion_ids
    ((special,),) = engine.generate(prompts[:1], replace(ENDLESS, skip_special_tokens=False))
    assert special.text == full.text + engine.tokenizer.eos_token


@pytest.mark.parametrize("stop", ["=", ["qqq", "= "]])
def test_a_stop_string_ends_a_completion(
    engine: TransformersEngine, prompts: list[list[int]], full: Rollout, stop: str | list[str]
) -> None:
    params = replace(ENDLESS, stop=stop)
    ((without,),) = engine.generate(prompts[:1], params)
    ((kept,),) = engine.generate(prompts[:1], replace(params, include_stop_str_in_output=True))
    found = stop if isinstance(stop, str) else stop[1]
    before = full.text[: full.text.index(found)]
    assert without.text == before and kept.text == before + found
    assert without.finish_reason == "stop" and without.completion_ids == kept.completion_ids
    assert len(without.completion_ids) < len(full.completion_ids)
    assert found in engine.tokenizer.decode(without.completion_ids)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_and_checkpointing_are_off_while_sampling_and_the_mode_comes_back(
    tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], training: bool
) -> None:
    policy = Policy(with_adapter(load_model("shallow"), lora_dropout=0.5))
    engine = TransformersEngine(policy, tokenizer, max_seq_length=256)
    params = SamplingParams(temperature=0, max_tokens=10)
    first = engine.generate(prompts, params)
    policy.model.enable_input_require_grads()
    policy.model.gradient_checkpointing_enable()
    policy.model.train(training)
    second = engine.generate(prompts, params)
    assert [g[0].rollout_logprobs for g in first] == [g[0].rollout_logprobs for g in second]
    assert policy.model.training is training
    with pytest.raises(ValueError):
        engine.generate([[5] * 256], params)
    assert policy.model.training is training
