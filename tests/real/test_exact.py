"""A published model in our engine and trainer, against plain transformers, PEFT and bitsandbytes."""

from typing import Any

import peft
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from packed_problem import Learned, alone, learned, learned_alone
from published_model import published_model
from small_models import scatter
from trainer_runs import relative
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.models.fp8_layers import FP8Linear
from lowmem_grpo.models.packing import collate
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout, RolloutGroup

pytestmark = pytest.mark.slow
QUESTIONS = (
    "Why do leaves turn red in autumn?", "Write a poem about the sea.", "What is 17 + 25?", "Name three rivers.",
    "Say hello in French, Spanish and Italian.", "How do I boil an egg?",
)
CUT = "The sea is calm,\nthe sea is wide, and the"
SAID = ("Leaves turn red because chlorophyll breaks down in autumn, and other colours are seen.", CUT, "It is 42.")
TOKENS, END = 32, 2
LUCK = 1.3  # by which the errors of two implementations in 16 bits may differ over few tokens
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder() -> str:
    return str(published_model().folder)


def load(folder: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, list[list[int]]]:
    """Our model, and prompts. They begin with few words: without these, the template has a longer beginning."""
    model, tokenizer = FastLanguageModel.from_pretrained(folder, max_seq_length=256, dtype=dtype, **options)
    brief = {"role": "system", "content": "You are brief."}
    return model, [tokenizer.apply_chat_template([brief, {"role": "user", "content": question}],
                                                 add_generation_prompt=True) for question in QUESTIONS]


def plain(folder: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


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


def compared(folder: str, dtype: torch.dtype) -> tuple[Learned, Learned, Learned]:
    """Log-probabilities and LoRA gradients by us and by plain transformers in a dtype, and in float64."""
    model, prompts = load(folder, dtype, load_in_16bit=True)
    model = FastLanguageModel.get_peft_model(model, r=8, target_modules=TARGETS, use_gradient_checkpointing=False)
    scatter(model, 0.01)
    batch = batch_of(prompts[:3], [model.loaded.tokenizer.encode(text) + [END] * (text != CUT) for text in SAID])
    twin: Any = peft.get_peft_model(plain(folder, dtype), peft.LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
    peft.set_peft_model_state_dict(twin, peft.get_peft_model_state_dict(model))
    ours, theirs = learned(Policy(model), batch), learned_alone(twin, batch)
    exact = learned_alone(twin.double(), batch)
    assert ours[1].keys() == exact[1].keys()
    assert all(grad.any() for grad in exact[1].values())
    return ours, theirs, exact


def test_logprobs_and_lora_gradients_are_those_of_plain_transformers_and_peft(
    folder: str, record_property: Any
) -> None:
    """Ours may be further from float64 than plain transformers in float32 by 1e-5, and gradients by 1e-5 of theirs."""
    (ours, grads), (theirs, wanted), (truth, exact) = compared(folder, torch.float32)
    off, allowed, apart = ((one - other).abs().max() for one, other in ((ours, truth), (theirs, truth), (ours, theirs)))
    record_property("printed", f"float32: log-probabilities off by {off:.2g}, plain transformers' by {allowed:.2g} "
                    f"(apart by {apart:.2g}); LoRA gradients by {relative(grads, exact):.2g} and "
                    f"{relative(wanted, exact):.2g} of their norm")
    assert off <= allowed + 1e-5
    for name, grad in exact.items():
        assert (grads[name] - grad).norm() <= (wanted[name] - grad).norm() + 1e-5 * grad.norm(), name


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_in_16_bits_logprobs_and_lora_gradients_are_as_exact_as_those_of_plain_transformers_and_peft(
    kind: str, folder: str, record_property: Any
) -> None:
    (ours, grads), (theirs, wanted), (truth, exact) = compared(folder, getattr(torch, kind))
    off, allowed = ((found - truth).square().mean().sqrt() for found in (ours, theirs))
    errors = relative(grads, exact), relative(wanted, exact)
    record_property("printed", f"{kind}: log-probabilities off by {off:.2g} (root mean square), plain transformers' by "
                    f"{allowed:.2g}; LoRA gradients by {errors[0]:.2g} and {errors[1]:.2g} of their norm")
    assert off <= LUCK * allowed
    assert errors[0] <= LUCK * errors[1]


def test_fp8_weights_are_torchs_and_give_the_logprobs_of_plain_transformers_and_of_the_sampler(
    folder: str, record_property: Any
) -> None:
    model, prompts = load(folder, load_in_fp8=True)
    theirs = plain(folder)
    ours = {name: layer for name, layer in model.inner.named_modules() if isinstance(layer, FP8Linear)}
    assert len(ours) == 7 * theirs.config.num_hidden_layers
    for name, layer in ours.items():
        stored = theirs.get_submodule(name).weight.data
        scale = layer.weight_scale
        torch.testing.assert_close(scale, stored.abs().amax(1, keepdim=True) / 448)  # the largest number of e4m3
        assert torch.equal(layer.weight.view(torch.float8_e4m3fn), (stored / scale).to(torch.float8_e4m3fn))
        stored.copy_(layer.weight.view(torch.float8_e4m3fn).float() * scale)
    groups = model.engine().generate(prompts[:2], SamplingParams(max_tokens=12, seed=1))
    policy, batch = Policy(model.inner), batch_of(prompts[:2], [group[0].completion_ids for group in groups])
    with torch.no_grad():
        found, wanted, truth = policy.logprobs(batch, 1.0)[0], alone(theirs, batch), alone(theirs.double(), batch)
    sampled = torch.cat([torch.tensor(group[0].rollout_logprobs) for group in groups])
    record_property("printed", f"FP8 weights: log-probabilities off by {(found - truth).abs().max():.2g}, plain "
                    f"transformers' by {(wanted - truth).abs().max():.2g}, the sampler's by "
                    f"{(sampled - truth).abs().max():.2g}")
    for each in (found, sampled):  # 2e-6 to 2e-5 by the processor
        assert (each - truth).abs().max() <= (wanted - truth).abs().max() + 1e-5


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
