"""The settings of docs/rollouts.md together: two steps on the model in the package, or a refusal by name. Without vLLM
`kv_cache_dtype` is refused (tests/engines/test_choice.py)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import TEXTS, adapter, make, moved, same
from vllm_models import KV_BYTES, NEEDS_VLLM

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.trainer import overlap

pytestmark = NEEDS_VLLM
SETTINGS: dict[str, Any] = {"max_completion_length": 40, "temperature": 1.5, "max_steps": 2, "seed": 3,
                            "rows": TEXTS, "shuffle_dataset": False, "per_device_train_batch_size": 8,
                            "gradient_accumulation_steps": 2}
PARALLEL: dict[str, Any] = {"train_while_sampling": "parallel", "score_while_sampling": True}


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches are trained as soon as anything is complete, so that short runs have some."""
    monkeypatch.setattr(overlap, "TAIL", 1.0)
    monkeypatch.setattr(overlap, "STEPS", 1)


@pytest.fixture(scope="module")
def in_8_bits() -> Iterator[FastPeftModel]:
    """A model whose cache is in 8 bits, with vLLM's engine: where the processor can."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" and not torch.cuda.is_available():
        pytest.skip("vLLM's build for CPUs has a cache in 8 bits with AVX-512 only")
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False, fast_inference="vllm",
                                                kv_cache_bytes=KV_BYTES, kv_cache_dtype="fp8")
    model = moved(FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False))
    yield model
    bare.loaded.keeper.close()


@pytest.mark.slow
def test_a_cache_in_8_bits_goes_with_training_while_sampling(tmp_path: Path, in_8_bits: FastPeftModel) -> None:
    """They are taken, they move the adapter, the switch is seen in the log, and numbers stay numbers."""
    run = make(tmp_path, model=in_8_bits, **SETTINGS | PARALLEL)
    before = adapter(run)
    run.train()
    after = adapter(run)
    assert not same(after, before) and all(bool(held.isfinite().all()) for held in after.values())
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl") if "loss" in line]
    assert len(lines) == 2
    assert any("train_while_sampling/share" in line for line in lines)
    assert all(len(group.rollouts) == 4 for group in run.sampled)
