"""Models whose embedding or head is trained beside LoRA, and the base models that they came from."""

from pathlib import Path
from typing import Any

import torch
from small_models import random_model, save_wide
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_models import differences

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.engines.request_output import RequestOutput
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout, RolloutGroup

PROMPTS = [[5, 6, 7, 8, 6], [9, 10, 11], list(range(20, 60))]
ROWS = [6, 383, 21, 40]  # in the prompts, but for one
WHOLE = {"modules_to_save": ["embed_tokens", "lm_head"]}
BOTH = {"trainable_token_indices": {"embed_tokens": ROWS, "lm_head": [*ROWS, 100]}}
CASES: dict[str, tuple[bool, dict[str, Any]]] = {  # whether the base is tied, and what is trained
    "whole, untied": (False, WHOLE),
    "whole, tied": (True, WHOLE),
    "the head": (False, {"modules_to_save": ["lm_head"]}),
    "rows, tied": (True, {"trainable_token_indices": ROWS}),
    "rows of both": (False, BOTH),
    "rows of one, the other whole": (False, {"trainable_token_indices": ROWS, "modules_to_save": ["lm_head"]}),
}
SAME = 1e-5  # of log-probabilities in float32
OTHER = 0.01  # what a step of training changes, at least


def saved_base(folder: Path, tied: bool, wide: bool = False, **shape: Any) -> Path:
    """A folder with a random Llama, whose heads are wide enough for 4 bits and vLLM if it is `wide`."""
    if wide:
        return save_wide(folder, tie_word_embeddings=tied, **shape)
    random_model("Llama", tie_word_embeddings=tied, **shape).save_pretrained(folder)
    AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "lowmem_grpo/assets/tiny").save_pretrained(folder)
    return folder


def adapted(folder: Path, settings: dict[str, Any], **options: Any) -> FastPeftModel:
    """The model in a folder, with LoRA and what the settings train beside it."""
    usual = {"max_seq_length": 256, "load_in_4bit": False, "device": "cpu", "fast_inference": "transformers"}
    model, _ = FastLanguageModel.from_pretrained(str(folder), **usual | options)
    made = FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj", "v_proj", "down_proj"],
                                            use_gradient_checkpointing=False, **settings)
    assert isinstance(made, FastPeftModel)
    return made


def train(policy: Policy, rate: float = 0.05) -> None:
    """One step of AdamW with a large rate on what the prompts teach."""
    rollouts = [Rollout([6, 40, 383, 7], [0.0] * 4, "stop"), Rollout([21, 100, 5], [0.0] * 3, "stop")]
    (batch,) = pack([RolloutGroup({}, PROMPTS[0], rollouts)], 4096, 256)
    optimizer = torch.optim.AdamW(policy.trainable, rate)
    policy.logprobs(batch, 1.0)[0].sum().neg().backward()
    optimizer.step()
    optimizer.zero_grad()


def plain(folder: Path, **options: Any) -> Policy:
    """The base model as transformers loads it."""
    return Policy(AutoModelForCausalLM.from_pretrained(folder, **options).requires_grad_(False).eval())


def far(policy: Policy, groups: list[list[Rollout]]) -> float:
    """The largest |difference| between the policy's log-probabilities and the sampler's."""
    return differences(policy, PROMPTS, groups).abs().max().item()


def groups_of(outputs: list[RequestOutput]) -> list[list[Rollout]]:
    return [[Rollout(list(one.token_ids), [float(each) for each in one.logprobs], "stop") for one in output.outputs]
            for output in outputs]
