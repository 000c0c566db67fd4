"""Short runs of GRPOTrainer on the embedded model, the same computed plainly, and gradients in float64, to compare what
must not depend on packing, order or splits."""

import copy
import math
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
from small_models import TINY, random_model, scatter, shallow, with_adapter
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer, SamplingParams
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.losses.loss_types import LOSS_TYPES
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.trainer.grpo_objective import GRPOObjective
from lowmem_grpo.trainer.learner import Learner
from lowmem_grpo.types import RolloutGroup
from tests.attacks import small_run

QUESTIONS = (
    "Start with 3. Add 4. Multiply by 2. What is the result?", "Start with 52. Subtract 20. Add 4. What is the result?",
    "Start with 15. Subtract 6. Add 31. What is the result?", "Start with 9. Subtract 9. Add 2. What is the result?",
)
ROWS = [{"prompt": [{"role": "user", "content": question}], "answer": "14"} for question in QUESTIONS]
TEXTS = [{"prompt": f"Start with {n}. Add {n + 3}. Multiply by 2. What is the result?\n"} for n in range(1, 8)]
SMALL: dict[str, Any] = {
    "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 8, "max_steps": 2,
    "learning_rate": 1e-2, "save_strategy": "no",
}
ENDS = {"vllm_sampling_params": SamplingParams(stop_token_ids=[23, 26, 27])}  # "5", "8", "9": so nonsense ends too
Gradients = dict[str, torch.Tensor]


def digit_sum(completions: list[Any], **kwargs: Any) -> list[float]:
    """Differs between most completions, and depends on nothing else."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(sum(int(c) for c in text if c in "0123456789")) for text in texts]


def by_letters(completions: list[Any], **kwargs: Any) -> list[float]:
    """Differs between most completions, also of a model that says nonsense."""
    return [float(sum(map(ord, one[0]["content"])) % 17) for one in completions]


@torch.no_grad()
def largest_ratio_error(trainer: GRPOTrainer, groups: list[RolloutGroup]) -> float:
    """How far a ratio of trainer to sampler is from 1 before an update."""
    ratios = [(trainer.policy.logprobs(batch, 1.0)[0] - batch.at_trained(batch.rollout_logprobs)).exp()
              for batch in pack(groups)]
    return float((torch.cat(ratios) - 1).abs().max())


@cache
def loaded(name: str, max_seq_length: int, checkpointing: bool | str, **lora: Any) -> FastPeftModel:
    """One that no test gets: `load` copies it, which takes a quarter of the time."""
    bare, _ = FastLanguageModel.from_pretrained(
        name or str(shallow()), max_seq_length=max_seq_length, load_in_4bit=False)
    return FastLanguageModel.get_peft_model(bare, use_gradient_checkpointing=checkpointing, **({"r": 4} | lora))


def load(max_seq_length: int = 128, name: str = "", checkpointing: bool | str = False, **lora: Any) -> FastPeftModel:
    """The shallow model, or "tiny" where completions must end or be right."""
    return copy.deepcopy(loaded(name, max_seq_length, checkpointing, **lora))


def moved(model: FastPeftModel) -> FastPeftModel:
    """The model with an adapter that matters, so that both of its factors have a gradient."""
    return scatter(model)


def make(folder: Path, reward: Any = digit_sum, rows: Any = ROWS, model: Any = None, **settings: Any) -> GRPOTrainer:
    names = ("callbacks", "eval_dataset", "processing_class", "optimizers")
    parts = {name: settings.pop(name) for name in names if name in settings}
    config = GRPOConfig(output_dir=str(folder), **(SMALL | settings))
    return GRPOTrainer(model or load(), reward, config, rows, **parts)


def make_dropping(folder: Path, *given: Any, **settings: Any) -> GRPOTrainer:
    """The small run of tests/attacks, six steps with dropout, on the shallow model and with short completions."""
    return small_run.make(folder, *given, model=load(lora_dropout=0.1), **{"max_completion_length": 8} | settings)


def adapter_of(model: Any) -> Gradients:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def adapter(trainer: GRPOTrainer) -> Gradients:
    return adapter_of(trainer.model)


def same(first: Gradients, second: Gradients) -> bool:
    """Equal bit for bit."""
    assert first.keys() == second.keys() and first
    return all(torch.equal(first[name], second[name]) for name in first)


def norm(tensors: Gradients) -> float:
    """Of all of them together."""
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors.values()))


def relative(first: Gradients, second: Gradients) -> float:
    """Norm of the difference over the norm of `second`."""
    assert first.keys() == second.keys() and first
    return norm({name: first[name].double() - second[name].double() for name in second}) / norm(second)


def plain_peft(model: FastPeftModel, folder: Path) -> peft.PeftModel:
    """The same weights in plain transformers and peft, which know nothing of this package."""
    model.save_lora(folder)
    layers = model.config.num_hidden_layers
    plain = AutoModelForCausalLM.from_pretrained(shallow() if layers == 2 else TINY, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(plain, folder, is_trainable=True).eval()


def naive_logprobs(model: peft.PeftModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """(C,) of one completion, from all of its logits, in float32 at least."""
    ids = torch.tensor(prompt + completion, device=next(model.parameters()).device)
    logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.log_softmax(-1).gather(-1, ids[len(prompt):, None]).squeeze(-1)


def exact() -> peft.PeftModel:
    """A model that computes all of it in float64; transformers' own norms are in float32, whatever the weights are."""
    model = random_model("Llama")
    for name, norm in [(n, m) for n, m in model.named_modules() if isinstance(m, LlamaRMSNorm)]:
        made = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon)
        made.weight = norm.weight
        model.set_submodule(name, made)
    return with_adapter(model).double()


def learner(policy: Policy, **settings: Any) -> Learner:
    """With micro-batches as large as the step, unless `settings` say otherwise."""
    chosen: dict[str, Any] = {"loss_type": "grpo", "epsilon": 0.2, "per_device_train_batch_size": 64} | settings
    config = GRPOConfig(**{name: value for name, value in chosen.items()
                           if name != "epsilon" or LOSS_TYPES[chosen["loss_type"]].token_loss.__name__ == "clipped"})
    optimizer = torch.optim.SGD(policy.trainable, lr=0.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return Learner(policy, config, GRPOObjective(config), optimizer, scheduler)


def gradient(policy: Policy, groups: list[RolloutGroup], **settings: Any) -> Tensor:
    """Of the step's loss, all parameters in one row."""
    made = learner(policy, **settings)
    policy.model.zero_grad()
    made.forward_backward(groups)
    assert not made.guard.bad
    return row(policy.model)


def row(model: Any) -> Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    assert found.isfinite().all() and found.abs().max() > 1e-4
    return found


def close(found: Tensor, expected: Tensor, allowed: float = 1e-10) -> None:
    assert (found - expected).norm() <= allowed * expected.norm()
