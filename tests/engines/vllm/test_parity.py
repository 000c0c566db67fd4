"""vLLM computes what the trainer computes, on the trainer's own storage: every family, 16, 32 and 4 bits, and FP8."""

import gc
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from memory import LiveStorage
from small_models import shallow
from trainer_runs import adapter, make, moved, same
from vllm_models import (
    KV_BYTES,
    LONG,
    NEEDS_VLLM,
    REAL,
    assert_borrowed,
    bound_of,
    differences,
    engine_on,
    held_by,
    move_adapter,
    policy_of,
    storages,
)

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.vllm import shared_linear as lent_layers
from lowmem_grpo.engines.vllm.engine import VLLMEngine
from lowmem_grpo.engines.vllm.shared_linear import BorrowError, check_family
from lowmem_grpo.memory.families import FAMILIES
from lowmem_grpo.types import Rollout

pytestmark = NEEDS_VLLM

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], list(range(20, 60))]
BF16, FP32 = torch.bfloat16, torch.float32
KINDS = {"bfloat16": (BF16, False), "nf4 in bfloat16": (BF16, True), "float32": (FP32, False),
         "fp8 in bfloat16": (BF16, "fp8"), "fp8 by block": (FP32, "fp8-block")}
BOUND = 0.003  # of the mean |difference| of log-probabilities in bfloat16, of gated delta nets
# In the short lane, of these one of three: every family in float32, and so much in 16 bits:
SHORT = [("llama", "bfloat16"), ("qwen2", "nf4 in bfloat16"), ("qwen2", "fp8 by block")]
BORROWING = [kind for kind, row in FAMILIES.items() if row.vllm and not (row.refused or row.delta_net or row.experts)]


def shows(family: str, kind: str) -> bool:
    """What a family changes is how its layers map onto vLLM's, which float32 shows best; what a kind of weight changes
    is the same for all families but for biases (Qwen2) and other norms, windows and a soft cap (Gemma 3)."""
    every = kind in ("float32", "bfloat16")
    return every or family == "qwen2" or (family == "gemma3_text" and not kind.startswith("fp8"))


CASES = [pytest.param(family, kind, marks=[] if kind == "float32" or (family, kind) in SHORT else pytest.mark.slow)
         for family in BORROWING for kind in KINDS if shows(family, kind)]


def sample(engine: VLLMEngine, tokens: int = 40, n: int = 8) -> list[list[Rollout]]:
    """3 * n completions."""
    return engine.generate(PROMPTS, SamplingParams(n=n, max_tokens=tokens, seed=1, ignore_eos=True))


@pytest.mark.parametrize(("family", "kind"), CASES)
@pytest.mark.every(3)
def test_the_sampler_agrees_with_the_trainer_before_and_after_the_adapter_moves(
    family: str, kind: str, tmp_path: Path
) -> None:
    dtype, four_bit = KINDS[kind]
    policy = policy_of(family, dtype, four_bit, tmp_path)
    with engine_on(policy) as engine:
        groups = sample(engine, tokens=16)
        assert differences(policy, PROMPTS, groups).abs().mean() <= bound_of(policy, PROMPTS, groups)
        move_adapter(policy, 0.05)
        engine.on_policy_update(1)
        groups = sample(engine) if kind != "bfloat16" else sample(engine, 64, n=54)
        difference = differences(policy, PROMPTS, groups)
        assert difference.abs().mean() <= bound_of(policy, PROMPTS, groups)
        assert len(difference) > 10_000 or kind != "bfloat16"
        assert abs(difference.exp().mean() - 1) <= 0.001
        assert_borrowed(engine, policy)


def test_vllm_allocates_under_a_hundredth_of_the_model_and_keeps_nothing_of_a_call(tmp_path: Path) -> None:
    policy = policy_of("llama", BF16, True, tmp_path, **REAL)
    move_adapter(policy, 0.05)
    model = sum(storages([tensor for _, tensor in held_by(policy.base)]).values())
    with engine_on(policy) as engine:
        assert assert_borrowed(engine, policy) < 0.01 * model
        sample(engine, tokens=2, n=1)  # whatever is made once is made
        gc.collect()
        with LiveStorage() as made:
            sample(engine, tokens=8, n=2)
            gc.collect()
        assert made.peak > 0
        assert made.live < 0.01 * model
        assert_borrowed(engine, policy)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's class for Qwen3.5 imports torchvision")
@pytest.mark.parametrize("four_bit", [False, True])
def test_gated_delta_nets_are_sampled_on_the_trainers_projections(four_bit: bool, tmp_path: Path) -> None:
    prompts = [[5, 6, 7, 8], [9] * 40, list(range(20, 120)), LONG]
    policy = policy_of("qwen3_5_text", BF16, four_bit, tmp_path)
    params = SamplingParams(n=3, max_tokens=40, seed=1, ignore_eos=True)
    with engine_on(policy) as engine:
        for version, size in enumerate((0.0, 0.05)):
            move_adapter(policy, size)
            engine.on_policy_update(version)
            found = differences(policy, prompts, engine.generate(prompts, params))
            assert found.abs().mean() <= BOUND


@pytest.mark.parametrize(("there", "dtype", "device", "message"), [
    (False, BF16, "cuda", "imports torchvision, which is not installed"),
    (True, FP32, "cpu", "compute in bfloat16, and Qwen3.5.* is here in float32"),
    (True, FP32, "cuda", ""), (True, BF16, "cpu", ""),
])
def test_where_vllm_cannot_compute_gated_delta_nets_the_other_engine_is_named(
    there: bool, dtype: torch.dtype, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lent_layers, "find_spec", lambda name: object() if there else None)
    config: Any = {"model_type": "qwen3_5_text"}
    if not message:
        check_family(config, dtype, torch.device(device))
        return
    with pytest.raises(BorrowError, match=message + r'.*Sample with fast_inference="transformers"'):
        check_family(config, dtype, torch.device(device))


@pytest.mark.slow
def test_vllm_would_sample_with_the_adapter_of_a_teacher_that_has_read(alone: None, tmp_path: Path) -> None:
    """The adapter's factors are exchanged while the teacher "ema" reads."""
    model, _ = FastLanguageModel.from_pretrained(
        str(shallow()), max_seq_length=128, load_in_4bit=False, fast_inference="vllm", kv_cache_bytes=KV_BYTES)
    trainer = make(tmp_path, model=moved(FastLanguageModel.get_peft_model(model, r=4)), teacher="ema", max_steps=3,
                   distillation_mode="full_logits", parity_steps=1)
    trainer.train()
    teacher = trainer.policy.teacher_adapter or {}
    assert teacher and not same(teacher, adapter(trainer)) and trainer.sampler.engine.name == "vllm"
    groups = trainer.rollout()
    trainer.learner.prepare(groups, 1)
    assert trainer.parity.check(trainer.rollout())["sampling/parity/max"] <= 1e-4
    trainer.sampler.engine.close()
