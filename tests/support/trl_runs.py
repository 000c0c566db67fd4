"""TRL's own GRPOTrainer on the CPU, with given completions: its loss, its metrics, its gradients, and its batch.

    rollouts = random_rollouts()
    run = trl_run(rollouts, loss_type="dapo", beta=0.04)      # any field of trl.GRPOConfig passes through
    run.loss, run.metrics, run.gradients, run.batch["advantages"]

The batch is made by TRL's own code, from completions that its `rollout_func` returns. Its rows keep the order of the
rollouts; TRL would shuffle them, which changes no sum.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import peft
import torch
from datasets import Dataset
from small_models import FUSED, SPLIT, TINY, load_model, scatter
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict

END = 2  # the embedded tokenizer's end of a turn
PLAIN = {  # TRL's defaults that a small run on the CPU needs otherwise; settings given to a run win
    "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False, "fp16": False,
    "gradient_checkpointing": False, "shuffle_dataset": False, "max_steps": 1, "logging_strategy": "no",
    "max_completion_length": 12, "learning_rate": 1e-3,
}


@dataclass(frozen=True)
class Rollouts:
    """N = P * G completions, those of one prompt side by side; every list has one entry for each completion."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    rewards: dict[str, list[float | None]]  # of each reward function
    num_generations: int  # G
    rollout_logprobs: list[list[float]] | None = None  # the sampler's own
    loss_mask: list[list[int]] | None = None  # 0 where the tokens are not the model's own (TRL's env_mask)

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.completion_ids]


def random_rollouts(
    prompts: int = 3, num_generations: int = 4, longest: int = 12, vocab_size: int = 384, seed: int = 0,
) -> Rollouts:
    """Completions of 1 to `longest` tokens; every third runs into the limit, the others end with the end token."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(3, vocab_size, (count,), generator=generator).tolist()

    def length(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=generator))

    total = prompts * num_generations
    completions = [ids(longest) if row % 3 == 2 else [*ids(length(longest) - 1), END] for row in range(total)]
    prompt_ids = [prompt for prompt in [ids(length(7)) for _ in range(prompts)] for _ in range(num_generations)]
    rewards = torch.randn(total, generator=generator).tolist()
    return Rollouts(prompt_ids, completions, {"reward": rewards}, num_generations)


@dataclass(frozen=True)
class TrlRun:
    """What TRL made of one generation batch of N completions, C tokens wide.

    `batch` holds prompt_ids, completion_ids, completion_mask (N, C), advantages (N,), num_items_in_batch, and where TRL
    computed them old_per_token_logps, ref_per_token_logps, sampling_per_token_logps (N, C) and
    importance_sampling_ratio (N, C or 1). Losses and gradients are summed over the micro-batches; metrics are averaged
    over them, as TRL logs them.
    """

    trainer: GRPOTrainer
    batch: dict[str, Any]
    loss: Tensor
    metrics: dict[str, float]
    gradients: dict[str, Tensor]


def trl_run(
    rollouts: Rollouts, *, model: str | PreTrainedModel = "Llama", trainer_class: type[GRPOTrainer] = GRPOTrainer,
    micro_batches: int = 1, drift: float = 0.0, correction: bool = False,
    old_logprobs: list[list[float]] | None = None, adapter: bool | peft.LoraConfig = True, **settings: Any,
) -> TrlRun:
    """One accumulation window of TRL on given completions: batch, loss, metrics, gradients.

    `drift` moves the trained weights by noise of that size after the batch was made, so that the ratio to
    old_per_token_logps is not 1. `correction` runs TRL's importance sampling correction for vLLM's log-probabilities,
    without vLLM; the rollouts then carry rollout_logprobs. `old_logprobs` takes the place of what TRL computes or
    leaves out. `adapter` is LoRA on every linear layer but the head, or a configuration of it; False trains the model
    as it is given.
    """
    trainer = make_trainer(rollouts, model, trainer_class, micro_batches, adapter, settings)
    batch = prepare(trainer, rollouts, correction, old_logprobs)
    if drift:
        move(trainer, drift)
    return window(trainer, batch)


def make_trainer(
    rollouts: Rollouts, model: str | PreTrainedModel = "Llama", trainer_class: type[GRPOTrainer] = GRPOTrainer,
    micro_batches: int = 1, adapter: bool | peft.LoraConfig = True, settings: dict[str, Any] | None = None,
    tokenizer: Any = TINY,
) -> GRPOTrainer:
    """A trainer of TRL whose rollouts and rewards are given, with LoRA whose factors are both random; `tokenizer` is
    the folder of one."""
    model = load_model(model) if isinstance(model, str) else model
    total = len(rollouts.prompt_ids)
    args = GRPOConfig(**(PLAIN | {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": total // micro_batches,
        "gradient_accumulation_steps": micro_batches, "num_generations": rollouts.num_generations,
    } | (settings or {})))
    rows = Dataset.from_list([{"prompt": f"{row}"} for row in range(total // rollouts.num_generations)])
    trainer = trainer_class(
        model=model, args=args, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(tokenizer),
        reward_funcs=[given_reward(name, values) for name, values in rollouts.rewards.items()],
        peft_config=lora(model) if adapter is True else adapter or None, rollout_func=given_rollouts(rollouts),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps  # set by TRL's training loop
    if adapter:
        scatter(trainer.model)
    return trainer


def lora(model: PreTrainedModel) -> peft.LoraConfig:
    """LoRA on every linear layer but the head, without dropout."""
    targets = FUSED if model.config.model_type == "phi3" else SPLIT
    return peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM")


def given_reward(name: str, values: list[float | None]) -> Callable[..., list[float | None]]:
    """A reward function of that name which returns the given values."""
    def reward(completions: list[Any], **_: Any) -> list[float | None]:
        assert len(completions) == len(values)
        return values

    reward.__name__ = name
    return reward


def given_rollouts(rollouts: Rollouts) -> Callable[..., dict[str, Any]]:
    """TRL's rollout function, called with every prompt G times side by side."""
    def rollout(prompts: list[Any], _trainer: GRPOTrainer) -> dict[str, Any]:
        assert len(prompts) == len(rollouts.completion_ids)
        result: dict[str, Any] = {
            "prompt_ids": rollouts.prompt_ids, "completion_ids": rollouts.completion_ids,
            "logprobs": rollouts.rollout_logprobs,
        }
        return result if rollouts.loss_mask is None else result | {"env_mask": rollouts.loss_mask}

    return rollout


def prepare(
    trainer: GRPOTrainer, rollouts: Rollouts, correction: bool = False, old_logprobs: list[list[float]] | None = None,
) -> dict[str, Any]:
    """The generation batch, made by TRL's code: rewards, advantages, masks, old and reference log-probabilities."""
    rows = [{"prompt": row["prompt"]} for row in trainer.train_dataset for _ in range(rollouts.num_generations)]
    given = None if old_logprobs is None else padded(old_logprobs)
    if correction:
        assert rollouts.rollout_logprobs is not None, "the correction compares with rollout_logprobs"
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
        trainer._last_loaded_step = trainer.state.global_step  # vLLM's weights count as loaded: there is no vLLM
    with old_logprobs_replaced(trainer, given if correction else None):
        batch = trainer._generate_and_score_completions(rows)
    return batch if given is None else batch | {"old_per_token_logps": given}


@contextmanager
def old_logprobs_replaced(trainer: GRPOTrainer, given: Tensor | None) -> Iterator[None]:
    """Inside, the first log-probabilities that TRL computes, the old policy's, are the given ones (N, C)."""
    computed, replacements = trainer._get_per_token_logps_and_entropies, [given]

    def first_given(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        result = computed(*args, **kwargs)
        return (replacements.pop(), *result[1:]) if replacements else result

    if given is not None:
        trainer._get_per_token_logps_and_entropies = first_given
    try:
        yield
    finally:
        if given is not None:
            del trainer._get_per_token_logps_and_entropies


def padded(values: list[list[float]]) -> Tensor:
    """Values of N completions as (N, C), zero behind their ends."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in values], batch_first=True)


def move(trainer: GRPOTrainer, size: float, seed: int = 2) -> None:
    """Noise on every trained weight: the policy drifts away from the one that the batch was made with."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data += size * torch.randn(parameter.shape, generator=generator)


def window(trainer: GRPOTrainer, batch: dict[str, Any]) -> TrlRun:
    """TRL's loss and gradients over the micro-batches of one accumulation window."""
    trainer.model.zero_grad()
    parts = split_tensor_dict(batch, trainer.args.steps_per_generation)
    losses = []
    for number, part in enumerate(parts, start=1):
        trainer.accelerator.gradient_state._set_sync_gradients(number == len(parts))
        loss = trainer.compute_loss(trainer.model, part)
        loss.backward()
        losses.append(loss.detach())
    return TrlRun(trainer, batch, torch.stack(losses).sum(), logged(trainer), gradients(trainer.model))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def logged(trainer: GRPOTrainer) -> dict[str, float]:
    """The metrics as TRL averages them when it logs."""
    found = {}
    for name, values in trainer._metrics["train"].items():
        valid = [value for value in values if value == value]
        found[name] = sum(valid) / len(valid) if valid else float("nan")
    return found


def model_logprobs(model: torch.nn.Module, rollouts: Rollouts, temperature: float = 1.0) -> list[list[float]]:
    """Each completion's log-probabilities, one sequence at a time: no padding, no code of TRL's or ours."""
    results = []
    for prompt, completion in zip(rollouts.prompt_ids, rollouts.completion_ids, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        chosen = (logits.double() / temperature).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])
        results.append(chosen.squeeze(-1).tolist())
    return results


def with_sampler_noise(
    rollouts: Rollouts, model: torch.nn.Module, scale: float, temperature: float = 1.0, seed: int = 3
) -> Rollouts:
    """The rollouts as a sampler would report them whose numbers differ from the model's by noise of that scale."""
    generator = torch.Generator().manual_seed(seed)
    noisy = [[value + scale * float(torch.randn((), generator=generator)) for value in row]
             for row in model_logprobs(model, rollouts, temperature)]
    return replace(rollouts, rollout_logprobs=noisy)
