"""The parity gate on a published model, in each dtype: healthy samplers go on, and faulty ones stop the run. Plain
transformers draws all samples but those of the engine."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from published_model import published_model
from transformers import AutoModelForCausalLM

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rollout.parity import ParityError, ParityGate
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import Rollout, RolloutGroup

pytestmark = pytest.mark.slow
QUESTIONS = (
    "Why do leaves turn red in autumn?", "Write two sentences about a dog that is afraid of the rain.",
    "A train leaves at 9 and arrives at 11. How long does it travel?", "Name a fruit that grows in cold countries.",
)
COPIES, TOKENS, END = 2, 32, 2  # completions per prompt, their length, and the id that ends one and pads


class Compared(NamedTuple):
    """A policy, the same weights in plain transformers, prompts, and what plain transformers says to them."""

    policy: Policy
    tokenizer: Any
    plain: Any
    prompts: list[list[int]]
    said: list[list[Rollout]]

    def check(self, rollouts: list[list[Rollout]]) -> dict[str, float]:
        groups = [RolloutGroup({}, *pair) for pair in zip(self.prompts, rollouts, strict=True)]
        return ParityGate(self.policy, SamplingParams(), 1, None, state=TrainerState()).check(groups)


@pytest.fixture(scope="module", params=["bfloat16", "float16", "float32", "mixed"])
def compared(request: pytest.FixtureRequest) -> Compared:
    """A model in each dtype, and one in float32 in mixed precision."""
    mixed = torch.bfloat16 if request.param == "mixed" else None
    dtype, folder = getattr(torch, request.param, torch.float32), str(published_model().folder)
    model, tokenizer = FastLanguageModel.from_pretrained(folder, max_seq_length=256, dtype=dtype, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(model, r=8, use_gradient_checkpointing=False)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    prompts = chats(tokenizer)
    return Compared(Policy(model, mixed), tokenizer, plain, prompts, sample(plain, prompts))


def chats(tokenizer: Any) -> list[list[int]]:
    return [tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                          return_dict=False) for question in QUESTIONS]


def sample(model: Any, prompts: list[list[int]], temperature: float = 1.0, padding: int = 0) -> list[list[Rollout]]:
    """Let plain transformers sample completions of prompts, of which it sees so many tokens of padding. It reads each
    prompt once."""
    longest = max(map(len, prompts)) + padding
    ids = torch.tensor([[END] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row) - padding) + [1] * (len(row) + padding) for row in prompts])
    with torch.no_grad():
        cache = model(ids[:, :-1], mask[:, :-1], (mask.cumsum(-1) - 1)[:, :-1], logits_to_keep=1).past_key_values
    cache.batch_repeat_interleave(COPIES)
    ids, mask = (each.repeat_interleave(COPIES, 0) for each in (ids, mask))
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, do_sample=True, temperature=temperature,
                         top_k=0, top_p=1.0, max_new_tokens=TOKENS, output_logits=True, return_dict_in_generate=True)
    logprobs = (torch.stack(out.logits, 1).float() / temperature).log_softmax(-1)
    drawn = out.sequences[:, longest:]
    found = logprobs.gather(-1, drawn[..., None])[..., 0]
    rollouts = [completion(*row) for row in zip(drawn.tolist(), found.tolist(), strict=True)]
    return [rollouts[i : i + COPIES] for i in range(0, len(rollouts), COPIES)]


def completion(ids: list[int], logprobs: list[float]) -> Rollout:
    """A completion up to its end."""
    ends = END in ids
    length = ids.index(END) + 1 if ends else len(ids)
    return Rollout(ids[:length], logprobs[:length], "stop" if ends else "length")


def test_healthy_samplers_of_a_published_model_go_on(compared: Compared) -> None:
    engine = TransformersEngine(compared.policy, compared.tokenizer, 256)
    own = engine.generate(compared.prompts, SamplingParams(n=COPIES, max_tokens=TOKENS, seed=3))
    for rollouts in (own, compared.said):
        assert compared.check(rollouts)["sampling/parity/mean"] < 0.06


FAULTS = ("padding is seen", "the last token of the template is dropped", "temperature 0.9")
# Minutes on a processor without 16-bit products: where there are any, the fault that is seen least.
DTYPES = {"float32": FAULTS, "bfloat16": FAULTS[:1], "float16": FAULTS[:1], "mixed": FAULTS[:1]}


@pytest.mark.parametrize(("compared", "fault"), [(kind, fault) for kind, faults in DTYPES.items() for fault in faults],
                         indirect=["compared"])
def test_a_faulty_sampler_of_a_published_model_stops_the_run(compared: Compared, fault: str) -> None:
    dropped = int(fault == "the last token of the template is dropped")
    prompts = [prompt[: len(prompt) - dropped] for prompt in compared.prompts]
    rollouts = sample(compared.plain, prompts, 0.9 if fault == "temperature 0.9" else 1.0,
                      padding=int(fault == "padding is seen"))
    with pytest.raises(ParityError, match="Likely causes"):
        compared.check(rollouts)


@pytest.mark.parametrize("form", ["load_in_4bit", "load_in_fp8"])
def test_over_quantized_weights_a_healthy_sampler_goes_on_and_one_without_the_adapter_stops(form: str) -> None:
    forms = {"load_in_4bit": False, "dtype": torch.float32, form: True}
    model, tokenizer = FastLanguageModel.from_pretrained(str(published_model().folder), max_seq_length=256, **forms)
    model = FastLanguageModel.get_peft_model(model, r=8, use_gradient_checkpointing=False)
    compared = Compared(Policy(model), tokenizer, None, chats(tokenizer), [])
    engine = TransformersEngine(compared.policy, tokenizer, 256)
    rollouts = engine.generate(compared.prompts, SamplingParams(n=COPIES, max_tokens=TOKENS // 2, seed=4))
    compared.check(rollouts)
    for name, parameter in compared.policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    with pytest.raises(ParityError, match="Likely causes"):
        compared.check(rollouts)


@pytest.mark.parametrize("compared", ["bfloat16", "float32"], indirect=True)
def test_a_sampler_without_the_adapter_stops_the_run(compared: Compared) -> None:
    adapter = {n: p for n, p in compared.policy.model.named_parameters() if "lora_B" in n}
    before = copy.deepcopy({name: p.detach() for name, p in adapter.items()})
    try:
        for parameter in adapter.values():
            torch.nn.init.normal_(parameter, std=0.02)
        with pytest.raises(ParityError, match="Likely causes"):
            compared.check(compared.said)
    finally:
        for name, parameter in adapter.items():
            parameter.detach().copy_(before[name])
