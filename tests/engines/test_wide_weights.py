"""Quantized weights in 16 bits while our own engine samples: the same answers, for many rows only, given back."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from different_ends import CONTEXT, PARAMS, PROMPTS
from memory import Recorder, failing
from small_models import shallow
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from vllm_models import differences, ids_of, move_adapter

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines import transformers_engine
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.engines.vllm.settings import wide_bytes
from lowmem_grpo.kernels.few_rows import taken_rows


@pytest.fixture
def engine() -> TransformersEngine:
    bare, _ = FastLanguageModel.from_pretrained(str(shallow()), max_seq_length=CONTEXT, load_in_4bit=True, device="cpu",
                                                fast_inference="transformers", sampling_weights="16bit")
    made: Any = FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False).engine()
    move_adapter(made.policy, 0.05)
    assert isinstance(made, TransformersEngine)
    return made


def held_bytes(engine: TransformersEngine) -> int:
    assert engine.passes.wide is not None
    return sum(wide.nbytes for _, wide in engine.passes.wide.held.values())


def addresses(engine: TransformersEngine) -> list[int]:
    assert engine.passes.wide is not None
    return [wide.data_ptr() for _, wide in engine.passes.wide.held.values()]


def test_the_sampler_agrees_with_the_trainer_and_sleep_frees_all_that_was_dequantized(
    engine: TransformersEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    codes = TransformersEngine(engine.policy, tokenizer, CONTEXT)
    found = engine.generate(PROMPTS, PARAMS)
    # vLLM's buffer has 8 rows for each rank of 4; q, k, v, not joined here, have none, and gate and up share 8
    config = engine.policy.base.config
    fewer = 32 * config.hidden_size * config.num_hidden_layers * engine.policy.dtype.itemsize
    assert held_bytes(engine) == pytest.approx(wide_bytes(engine.policy) - fewer, rel=1e-3)
    assert differences(engine.policy, PROMPTS, found).abs().mean() < 1e-5
    assert ids_of(found) == ids_of(codes.generate(PROMPTS, PARAMS))
    engine.sleep()
    assert held_bytes(engine) == 0
    assert ids_of(engine.generate(PROMPTS, PARAMS)) == ids_of(found)


@pytest.mark.parametrize("rows", [1, 512])
def test_one_row_and_512_give_the_same_tokens_on_both_sides_of_the_4_bit_kernels_limit(
    engine: TransformersEngine, tokenizer: PreTrainedTokenizerBase, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def as_on_a_card(x: Tensor, features: Sequence[int], form: str) -> bool:
        asked.append(len(x))
        return len(x) <= taken_rows(90, form)

    greedy = SamplingParams(n=1, temperature=0.0, max_tokens=3, ignore_eos=True)
    codes = TransformersEngine(engine.policy, tokenizer, CONTEXT)
    ((expected,),) = codes.generate(PROMPTS[1:2], greedy)
    monkeypatch.setattr("lowmem_grpo.kernels.nf4.takes_rows", as_on_a_card)
    (found,) = codes.generate(PROMPTS[1:2], replace(greedy, n=rows))
    assert rows in asked and len(found) == rows
    assert all(one.completion_ids == expected.completion_ids for one in found)


def test_few_rows_never_read_them(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_engine, "few_rows", lambda base, device: 10**6)
    engine.use_weights("16bit")
    engine.generate(PROMPTS, PARAMS)
    assert held_bytes(engine) == 0


def test_they_stay_with_their_graphs_where_the_engine_does_not_sleep_until_training_needs_the_memory(
    engine: TransformersEngine
) -> None:
    recorder, wide = Recorder(engine), engine.passes.wide
    assert wide is not None
    engine.sleeps, wide.few = False, 8
    expected = engine.generate(PROMPTS, PARAMS)
    first, lasting, places = recorder.recorded, engine.step.lasting, addresses(engine)
    assert lasting is not None and {rows > 8 for rows, _ in lasting.graphs} == {True, False}
    engine.sleep()
    assert ids_of(engine.generate(PROMPTS, PARAMS)) == ids_of(expected)
    assert recorder.recorded == first and addresses(engine) == places != []
    engine.give_back()
    assert held_bytes(engine) == 0 and engine.step.lasting is None
    assert ids_of(engine.generate(PROMPTS, PARAMS)) == ids_of(expected)
    assert recorder.recorded == 2 * first


def test_graphs_that_stay_read_the_adapter_as_it_is_now(engine: TransformersEngine) -> None:
    recorder, engine.sleeps = Recorder(engine), False
    first = engine.generate(PROMPTS, PARAMS)
    recorded = recorder.recorded
    for seed in (3, 4):
        engine.sleep()
        move_adapter(engine.policy, 0.1, seed=seed)
        engine.on_policy_update(1)
        found = engine.generate(PROMPTS, PARAMS)
        assert ids_of(found) != ids_of(first) and recorder.recorded == recorded
        assert differences(engine.policy, PROMPTS, found).abs().mean() < 1e-5
    with engine.policy.base_model():
        base = engine.generate(PROMPTS, PARAMS)
        assert differences(engine.policy, PROMPTS, base).abs().mean() < 1e-5
    assert ids_of(engine.generate(PROMPTS, PARAMS)) == ids_of(found)


def test_weights_in_another_form_leave_no_graph_that_reads_those_of_before(engine: TransformersEngine) -> None:
    Recorder(engine)
    engine.sleeps, before = False, engine.passes.wide
    engine.generate(PROMPTS, PARAMS)
    engine.use_weights("16bit")
    assert before is not None and not before.held and engine.step.lasting is None


def test_memory_that_runs_out_beside_them_takes_them_first_and_no_row(engine: TransformersEngine) -> None:
    expected = engine.generate(PROMPTS, PARAMS)
    with failing(engine, 4) as hook:
        found = engine.generate(PROMPTS, PARAMS)
    assert hook.raised == 1 and (engine.bound.lowered, engine.bound.failures) == (None, 1)
    assert engine.sampling_weights == "4bit" and engine.passes.wide is None
    assert [len(one.completion_ids) for one in chain(*found)] == [len(one.completion_ids) for one in chain(*expected)]
    assert differences(engine.policy, PROMPTS, found).abs().mean() < 1e-5
