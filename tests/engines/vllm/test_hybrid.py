"""vLLM's engine on a hybrid model: gated delta nets on the trainer's projections, or a refusal with what to use."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_models import CONTEXT, LONG, NEEDS_VLLM, differences, engine_on, move_adapter, policy_of

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.vllm import shared_linear as lent_layers
from lowmem_grpo.engines.vllm.shared_linear import BorrowError, check_family

pytestmark = NEEDS_VLLM
PROMPTS = [[5, 6, 7, 8], [9] * 40, list(range(20, 120)), LONG]
BF16 = 0.003  # mean |difference| of log-probabilities


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's class for Qwen3.5 imports torchvision")
@pytest.mark.parametrize("four_bit", [False, True])
def test_sampled_logprobs_are_the_trainers_before_and_after_the_adapter_moves(four_bit: bool, tmp_path: Path) -> None:
    policy = policy_of("qwen3_5_text", torch.bfloat16, four_bit, tmp_path)
    params = SamplingParams(n=3, max_tokens=40, seed=1, ignore_eos=True)
    with engine_on(policy, max_seq_length=CONTEXT) as engine:
        for version, size in enumerate((0.0, 0.05)):
            move_adapter(policy, size)
            engine.on_policy_update(version)
            found = differences(policy, PROMPTS, engine.generate(PROMPTS, params))
            assert found.abs().mean() <= BF16


@pytest.mark.parametrize(("there", "dtype", "device", "message"), [
    (False, torch.bfloat16, "cuda", "imports torchvision, which is not installed"),
    (True, torch.float32, "cpu", "compute in bfloat16, and Qwen3.5.* is here in float32"),
    (True, torch.float32, "cuda", ""), (True, torch.bfloat16, "cpu", ""),
])
def test_where_vllm_cannot_compute_them_the_other_engine_is_named(
    there: bool, dtype: torch.dtype, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lent_layers, "find_spec", lambda name: object() if there else None)
    config: Any = {"model_type": "qwen3_5_text"}
    if not message:
        check_family(config, dtype, torch.device(device))
        return
    with pytest.raises(BorrowError, match=message + r'.*Sample with fast_inference="transformers"'):
        check_family(config, dtype, torch.device(device))
