"""The whole of GRPO in one readable file: the loop without the trainer's checks, records, checkpoints and recovery.

    python -m lowmem_grpo.recipes.grpo_loop          # the embedded model learns arithmetic, in two minutes on two cores

It uses the trainer's own parts: sampling and training share one copy of the weights, completions are packed without
padding, and full-vocabulary logits are never materialized. Names of tensors end in their shapes: P prompts of a step, G
completions of each prompt, R reward functions, N trained tokens of a micro-batch.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Engine
from lowmem_grpo.loader import FastLanguageModel
from lowmem_grpo.losses.policy_loss import grpo_loss
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.recipes.arithmetic import answer_line, correct_answer, make_dataset
from lowmem_grpo.types import RolloutGroup

Rows = list[dict[str, Any]]
REWARDS = (correct_answer, answer_line)


@dataclass
class LoopSettings:
    """The hyperparameters; the defaults are those of the recipe `arithmetic`."""

    model: str = "tiny"
    steps: int = 60
    prompts: int = 32  # P, per step
    generations: int = 8  # G, per prompt
    max_tokens: int = 64  # per completion
    temperature: float = 1.0
    learning_rate: float = 3e-3  # falls linearly to 0
    lora_rank: int = 16
    places: int = 8192  # tokens in a micro-batch
    test_problems: int = 512
    seed: int = 0


@dataclass
class Parts:
    """The parts of a run. The engine samples from the policy's own weights, without a copy of them."""

    policy: Policy
    engine: Engine
    tokenizer: Any
    optimizer: torch.optim.Optimizer


def load(settings: LoopSettings) -> Parts:
    """Load the base model with a fresh LoRA adapter, and make the policy, the engine and the optimizer."""
    torch.manual_seed(settings.seed)
    model, tokenizer = FastLanguageModel.from_pretrained(settings.model, max_seq_length=128, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(
        model, r=settings.lora_rank, lora_alpha=2 * settings.lora_rank, random_state=settings.seed)
    policy = Policy(model)
    optimizer = torch.optim.AdamW(policy.trainable, lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    return Parts(policy, model.engine(policy), tokenizer, optimizer)


def sample(parts: Parts, rows: Rows, params: SamplingParams) -> list[RolloutGroup]:
    """Sample `params.n` completions for the prompt of each row."""
    prompts = [parts.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
               for row in rows]
    completions = parts.engine.generate(prompts, params.of_call(len(prompts)))
    return [RolloutGroup(*group) for group in zip(rows, prompts, completions, strict=True)]


def score(parts: Parts, groups: list[RolloutGroup]) -> Tensor:
    """Return the rewards (P, G) of all completions, summed over the reward functions."""
    completions = as_messages(parts, groups)
    answers = [group.row["answer"] for group in groups for _ in group.rollouts]
    rewards_R_PG = torch.tensor([reward(completions, answer=answers) for reward in REWARDS])
    return rewards_R_PG.sum(0).view(len(groups), -1)


def as_messages(parts: Parts, groups: list[RolloutGroup]) -> list[list[dict[str, str]]]:
    """Return each completion as the chat message that reward functions read."""
    texts = parts.tokenizer.batch_decode(
        [rollout.completion_ids for group in groups for rollout in group.rollouts], skip_special_tokens=True)
    return [[{"role": "assistant", "content": text}] for text in texts]


def assign_advantages(groups: list[RolloutGroup], rewards_PG: Tensor) -> None:
    """Set each rollout's advantage: A = r - mean(r) over its group, as in Dr. GRPO (arXiv 2503.20783)."""
    advantages_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    for group, advantages_G in zip(groups, advantages_PG.tolist(), strict=True):
        for rollout, advantage in zip(group.rollouts, advantages_G, strict=True):
            rollout.advantage = advantage


def forward_backward(parts: Parts, groups: list[RolloutGroup], settings: LoopSettings) -> float:
    """Accumulate the gradient of the step's loss over packed micro-batches; return the loss.

    The completions come from the current policy, so the probability ratio is 1 and its gradient is that of log p:

        loss = -sum_t A_t p(t) / sg(p(t)) / (P G max_tokens)
    """
    parts.policy.model.train()
    step_loss = 0.0
    for batch in pack(groups, settings.places):
        batch = batch.to(parts.policy.device)
        logprobs_N, _ = parts.policy.logprobs(batch, settings.temperature)
        out = grpo_loss(
            logprobs_N, batch.at_trained(batch.advantages), batch.at_trained(batch.sequence_ids),
            loss_type="dr_grpo", max_completion_length=settings.max_tokens,
            num_sequences_in_step=settings.prompts * settings.generations)
        out.loss.backward()
        step_loss += out.loss.item()
    return step_loss


def optim_step(parts: Parts, learning_rate: float) -> float:
    """Clip the gradient, make the optimizer's step and clear the gradient; return its norm before clipping."""
    norm = torch.nn.utils.clip_grad_norm_(parts.policy.trainable, 1.0)
    parts.optimizer.param_groups[0]["lr"] = learning_rate
    parts.optimizer.step()
    parts.optimizer.zero_grad()
    return float(norm)


def accuracy(parts: Parts, settings: LoopSettings) -> float:
    """Return the share of held-out problems that are solved by one sampled completion each."""
    rows = list(make_dataset("test", settings.test_problems))
    params = SamplingParams(max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed)
    completions = as_messages(parts, sample(parts, rows, params))
    return sum(correct_answer(completions, [row["answer"] for row in rows])) / len(rows)


def train(settings: LoopSettings, parts: Parts) -> Iterator[tuple[int, float, float]]:
    """Train for all steps; after each step yield (step, mean reward, loss). Steps are counted from 1."""
    rows = list(make_dataset("train", settings.steps * settings.prompts, settings.seed))
    random.Random(settings.seed).shuffle(rows)
    for step in range(settings.steps):
        params = SamplingParams(n=settings.generations, max_tokens=settings.max_tokens,
                                temperature=settings.temperature, seed=settings.seed + step)
        groups = sample(parts, rows[step * settings.prompts:][:settings.prompts], params)
        rewards_PG = score(parts, groups)
        assign_advantages(groups, rewards_PG)
        parts.engine.sleep()
        loss = forward_backward(parts, groups, settings)
        optim_step(parts, settings.learning_rate * (1 - step / settings.steps))
        parts.engine.on_policy_update(step + 1)
        yield step + 1, float(rewards_PG.mean()), loss


def main() -> None:
    settings = LoopSettings()
    parts = load(settings)
    print(f"before: {accuracy(parts, settings):.1%} of the held-out problems")
    for step, reward, loss in train(settings, parts):
        print(f"step {step:2}  reward {reward:.3f}  loss {loss:+.4f}")
    print(f"after: {accuracy(parts, settings):.1%}")


if __name__ == "__main__":
    main()
