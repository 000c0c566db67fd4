"""A published model out of its GGUF file, sampled by vLLM with the trainer's weights."""

from typing import Any

import pytest
import torch
from published_model import published_model
from transformers import AutoModelForCausalLM
from vllm_models import KV_BYTES, NEEDS_VLLM, assert_borrowed

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.models.policy import Policy

pytestmark = [*NEEDS_VLLM, pytest.mark.slow]


def test_vllm_samples_with_the_weights_of_the_file() -> None:
    file = published_model().gguf
    model, tokenizer = FastLanguageModel.from_pretrained(str(file), 128, torch.float32, load_in_16bit=True,
                                                         fast_inference="vllm", kv_cache_bytes=KV_BYTES)
    policy = Policy(model.inner)
    engine: Any = model.engine(policy)
    try:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Name three rivers."}],
                                               add_generation_prompt=True)
        (group,) = engine.generate([prompt], SamplingParams(max_tokens=12, temperature=0.0))
        assert_borrowed(engine, policy)
    finally:
        model.close_engine()
    plain = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    wanted = plain.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    assert group[0].completion_ids == wanted[0, len(prompt):].tolist()
