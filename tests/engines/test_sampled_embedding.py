"""Our own engine samples with the embedding and the head that are trained beside LoRA, as they are at each token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from memory import Recorder
from trained_embedding import (
    BOTH,
    CASES,
    OTHER,
    PROMPTS,
    SAME,
    WHOLE,
    adapted,
    far,
    groups_of,
    plain,
    saved_base,
    train,
)
from vllm_models import NEEDS_VLLM, ids_of

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.models.policy import Policy

PARAMS = SamplingParams(n=4, max_tokens=12, seed=1, ignore_eos=True)
ROUNDED = {torch.bfloat16: 0.03, torch.float16: 0.005}


def engine_of(model: Any) -> TransformersEngine:
    engine = model.engine()
    assert isinstance(engine, TransformersEngine)
    return engine


@pytest.mark.parametrize("case", CASES)
def test_the_sampler_agrees_with_the_trainer_after_a_step_and_with_the_base_while_the_adapter_is_off(
    case: str, tmp_path: Path
) -> None:
    tied, settings = CASES[case]
    model = adapted(saved_base(tmp_path, tied), settings)
    engine, base = engine_of(model), plain(tmp_path)
    assert far(base, engine.generate(PROMPTS, PARAMS)) <= SAME
    for _ in range(2):
        train(engine.policy)
        found = engine.generate(PROMPTS, PARAMS)
        assert far(engine.policy, found) <= SAME and far(base, found) > OTHER
        with engine.policy.base_model():
            assert far(base, engine.generate(PROMPTS, PARAMS)) <= SAME
        assert ids_of(engine.generate(PROMPTS, PARAMS)) == ids_of(found)


@pytest.mark.parametrize("settings", [WHOLE, BOTH], ids=["whole", "rows"])
@pytest.mark.parametrize("options", [{"load_in_4bit": True}, {"offload_embedding": True}, {"dtype": torch.bfloat16},
                                     {"dtype": torch.float16}], ids=str)
def test_bases_in_4_and_16_bits_and_an_embedding_on_the_host_are_sampled_with_too(
    options: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    engine = engine_of(adapted(saved_base(tmp_path, False, wide=True), settings, **options))
    train(engine.policy)
    found, allowed = engine.generate(PROMPTS, PARAMS), ROUNDED.get(engine.policy.dtype, SAME)
    assert far(engine.policy, found) <= allowed
    with engine.policy.base_model():
        assert far(engine.policy, engine.generate(PROMPTS, PARAMS)) <= allowed
        assert far(engine.policy, found) > OTHER + 10 * allowed


@pytest.mark.parametrize("case", CASES)
def test_recorded_steps_read_what_is_trained_as_it_is_now(case: str, tmp_path: Path) -> None:
    tied, settings = CASES[case]
    engine, base = engine_of(adapted(saved_base(tmp_path, tied), settings)), plain(tmp_path)
    recorder, engine.sleeps = Recorder(engine), False
    engine.generate(PROMPTS, PARAMS)
    recorded = recorder.recorded
    train(engine.policy)
    found, ran = engine.generate(PROMPTS, PARAMS), recorder.ran
    assert far(engine.policy, found) <= SAME and far(base, found) > OTHER
    assert recorder.recorded == recorded and ran > 0
    with engine.policy.base_model():
        assert far(base, engine.generate(PROMPTS, PARAMS)) <= SAME
    assert ids_of(engine.generate(PROMPTS, PARAMS)) == ids_of(found)


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=NEEDS_VLLM)])
@pytest.mark.parametrize("case", ["whole, tied", "whole, untied", "rows of both"])
@pytest.mark.every(2)
def test_fast_generate_samples_the_base_the_live_adapter_and_a_saved_one_in_turns(
    case: str, engine: str, tmp_path: Path
) -> None:
    tied, settings = CASES[case]
    options = {"kv_cache_bytes": 64 << 20} if engine == "vllm" else {}
    model = adapted(saved_base(tmp_path / "base", tied, wide=True), settings, fast_inference=engine, **options)
    policy, base, saved = Policy(model.inner), plain(tmp_path / "base"), tmp_path / "saved"
    train(policy)
    model.save_lora(saved)
    first = {name: value.clone() for name, value in policy.trained.values().items()}
    train(policy)
    live, places = [value.clone() for value in policy.trained.values().values()], addresses(policy)
    try:
        for request in (None, model.load_lora(saved), model.current_lora(), model.load_lora(saved), None):
            found = groups_of(model.fast_generate(PROMPTS, PARAMS, lora_request=request))
            with policy.wearing(first if request and request.path else {}):
                assert far(base if request is None else policy, found) <= SAME
            assert (far(policy, found) > OTHER) == (request is None or request.path is not None)
    finally:
        model.close_engine()
    assert all(map(torch.equal, policy.trained.values().values(), live)) and addresses(policy) == places


def addresses(policy: Policy) -> list[int]:
    return [weight.data_ptr() for weight in policy.model.parameters()]
