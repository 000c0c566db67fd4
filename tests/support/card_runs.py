"""Training steps of the embedded model on any device, and the same steps in plain transformers and peft."""

from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import torch
from card import CPU
from small_models import TINY, scatter
from torch import Tensor
from trainer_runs import TEXTS, Gradients, digit_sum
from trainer_runs import naive_logprobs as plain_logprobs
from transformers import AutoModelForCausalLM

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.types import RolloutGroup

SETTINGS: dict[str, Any] = {
    "num_generations": 4, "per_device_train_batch_size": 16, "max_completion_length": 24, "max_steps": 4,
    "learning_rate": 1e-2, "save_strategy": "no", "disable_tqdm": True, "parity_steps": 0, "loss_type": "dapo",
    "vllm_importance_sampling_correction": False,
}
MAX_HALVINGS = 24  # of the scale of the loss, until its gradients are finite


def load(device: torch.device, dtype: torch.dtype, four_bit: bool = False, r: int = 4, **lora: Any) -> FastPeftModel:
    """The embedded model on a device, with an adapter that matters."""
    bare, _ = FastLanguageModel.from_pretrained(
        "tiny", max_seq_length=128, load_in_4bit=four_bit, dtype=dtype, device=str(device)
    )
    return scatter(FastLanguageModel.get_peft_model(bare, r=r, **({"use_gradient_checkpointing": False} | lora)))


def make(
    folder: Path, device: torch.device, dtype: torch.dtype = torch.float32, lora: dict[str, Any] | None = None,
    callbacks: Any = (), **settings: Any
) -> GRPOTrainer:
    """A trainer of the embedded model on a device; `lora` goes to `load`."""
    config = GRPOConfig(output_dir=str(folder), **(SETTINGS | settings))
    return GRPOTrainer(load(device, dtype, **(lora or {})), digit_sum, config, TEXTS, callbacks=list(callbacks))


def sample(folder: Path) -> list[RolloutGroup]:
    """Four groups of four completions with a spread of rewards, sampled on the CPU in float32."""
    torch.manual_seed(0)
    groups = make(folder, CPU, seed=1).rollout()
    assert all(any(rollout.advantage for rollout in group.rollouts) for group in groups)
    return groups


def gradients(trainer: GRPOTrainer, groups: list[RolloutGroup]) -> Gradients:
    """The gradient of one step on the host, then cleared; in float16 at the largest scale at which it is finite."""
    learner = trainer.learner
    for _ in range(MAX_HALVINGS):
        learner.prepare(groups, 1)
        trainer.forward_backward(groups)
        learner.scaler.unscale_(learner.optimizer)
        found = {name: p.grad.cpu() for name, p in trainer.model.named_parameters() if p.grad is not None}
        learner.scaler.update()
        learner.optimizer.zero_grad(set_to_none=True)
        if all(gradient.isfinite().all() for gradient in found.values()):
            return found
    raise AssertionError("no scale of the loss gives finite gradients")


def plain_twin(trainer: GRPOTrainer, dtype: torch.dtype, device: torch.device) -> peft.PeftModel:
    """The very numbers that the trainer's model has, in plain transformers and peft, computing in another dtype.

    What is in 4 bits is dequantized by bitsandbytes.
    """
    ours: Any = trainer.model.peft_config["default"]
    base = AutoModelForCausalLM.from_pretrained(TINY, attn_implementation="eager").to(dtype)
    config = peft.LoraConfig(r=ours.r, lora_alpha=ours.lora_alpha, target_modules=ours.target_modules)
    twin = peft.get_peft_model(base, config)
    held = dict(trainer.model.named_parameters())
    for name, parameter in twin.named_parameters():
        parameter.data = values_of(held[name]).to(torch.float32 if parameter.requires_grad else dtype)
        if parameter.requires_grad and dtype == torch.float64:
            parameter.data = parameter.data.double()
    return twin.to(device).eval()


@torch.no_grad()
def values_of(parameter: Any) -> Tensor:
    """A parameter's numbers."""
    if isinstance(parameter, bitsandbytes.nn.Params4bit):
        dequantized: Tensor = bitsandbytes.functional.dequantize_4bit(parameter.data, parameter.quant_state)
        return dequantized.view(parameter.quant_state.shape)
    return parameter.detach().clone()


def plain_gradients(twin: peft.PeftModel, groups: list[RolloutGroup], scale: float = 1.0) -> Gradients:
    """On-policy DAPO as the paper has it, every completion alone; `scale` keeps float16 from underflowing."""
    tokens = sum(len(rollout.completion_ids) for group in groups for rollout in group.rollouts)
    for group in groups:
        for rollout in group.rollouts:
            logprobs = plain_logprobs(twin, group.prompt_ids, rollout.completion_ids)
            (-scale * rollout.advantage * (logprobs - logprobs.detach()).exp().sum() / tokens).backward()
    found = {name: p.grad.cpu() / scale for name, p in twin.named_parameters() if p.grad is not None}
    twin.zero_grad(set_to_none=True)
    return found
