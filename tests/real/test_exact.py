"""A published model in our engine and trainer, against plain transformers, PEFT and bitsandbytes."""

from typing import Any

import peft
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from packed_problem import alone, learned, learned_alone
from published_model import published_model
from small_models import scatter
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.models.packing import collate
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout, RolloutGroup

pytestmark = pytest.mark.slow
QUESTIONS = (
    "Why do leaves turn red in autumn?", "Write a poem about the sea.", "What is 17 + 25?", "Name three rivers.",
    "Say hello in French, Spanish and Italian.", "How do I boil an egg?",
)
TOKENS, END = 32, 2
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder() -> str:
    return str(published_model().folder)


def load(folder: str, **options: Any) -> tuple[Any, list[list[int]]]:
    """Our model, and prompts."""
    model, tokenizer = FastLanguageModel.from_pretrained(folder, max_seq_length=256, dtype=torch.float32, **options)
    return model, [tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
                   for question in QUESTIONS]


def plain(folder: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def greedy(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What plain transformers says to each prompt alone."""
    said = [model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)[0].tolist() for ids in prompts]
    return [tokens[len(ids):] for tokens, ids in zip(said, prompts, strict=True)]


def batch_of(prompts: list[list[int]], completions: list[list[int]]) -> Any:
    return collate([(RolloutGroup({}, prompt, []), Rollout(ids, [0.0] * len(ids), "length"))
                    for prompt, ids in zip(prompts, completions, strict=True)])


def test_our_engine_says_what_transformers_says_to_six_prompts(folder: str) -> None:
    model, prompts = load(folder, load_in_16bit=True)
    groups = model.engine().generate(prompts, SamplingParams(temperature=0.0, max_tokens=TOKENS))
    assert [group[0].completion_ids for group in groups] == greedy(plain(folder), prompts)


def test_logprobs_and_lora_gradients_are_those_of_plain_transformers_and_peft(folder: str) -> None:
    """Ours may be further from float64 than plain transformers in float32 by 1e-5, and gradients by 1e-5 of theirs."""
    model, prompts = load(folder, load_in_16bit=True)
    model = FastLanguageModel.get_peft_model(model, r=8, target_modules=TARGETS, use_gradient_checkpointing=False)
    scatter(model, 0.01)
    base = plain(folder)
    batch = batch_of(prompts[:3], greedy(base, prompts[:3]))
    twin: Any = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
    peft.set_peft_model_state_dict(twin, peft.get_peft_model_state_dict(model))
    (ours, grads), (theirs, wanted) = learned(Policy(model), batch), learned_alone(twin, batch)
    truth, exact = learned_alone(twin.double(), batch)
    assert (ours - truth).abs().max() <= (theirs - truth).abs().max() + 1e-5
    assert grads.keys() == exact.keys()
    for name, grad in exact.items():
        assert grad.any(), name
        assert (grads[name] - grad).norm() <= (wanted[name] - grad).norm() + 1e-5 * grad.norm(), name


def test_nf4_weights_and_logprobs_are_those_of_bitsandbytes(folder: str) -> None:
    model, prompts = load(folder, load_in_4bit=True)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                bnb_4bit_compute_dtype=torch.float32)
    theirs = plain(folder, quantization_config=config, device_map="cpu")
    theirs.train()  # in evaluation, bitsandbytes packs weights anew for some processors
    ours = dict(model.inner.named_modules())
    for name, module in theirs.named_modules():
        if state := getattr(getattr(module, "weight", None), "quant_state", None):
            held = ours[name].weight
            assert torch.equal(dequantize_4bit(held.data, held.quant_state), dequantize_4bit(module.weight.data, state))
    batch = batch_of(prompts[:2], [[504, 253, 3575, 2], [1] * 20])
    with torch.no_grad():
        found, wanted = Policy(model).logprobs(batch, 1.0)[0], alone(theirs, batch)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
