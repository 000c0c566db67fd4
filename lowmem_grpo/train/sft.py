"""Supervised fine-tuning of the adapter, before GRPO: a new answer format is taught where sampling would never find it.

It has the frozen base and the kernels of GRPO: sequences packed without padding, log-probabilities without logits,
steps that survive a shortage of memory. The loss of an optimizer step is

    loss = -sum(log p(completion token)) / N          N: completion tokens of the whole step, in all its micro-batches

which is TRL's `nll` with completion_only_loss. Its gradient does not depend on how the step is cut into micro-batches.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.config.sft import SFTConfig
from lowmem_grpo.data.examples import Example, ExampleEncoder, as_examples
from lowmem_grpo.data.prompts import DataError, Prompt, PromptSource
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.losses.objective import Objective, StepTotals
from lowmem_grpo.train.loop import Trainer
from lowmem_grpo.train.run_memory import plan_memory
from lowmem_grpo.types import LossOutput, MicroBatch, Rollout, RolloutGroup
from lowmem_grpo.views.live import SFTView

MEASURED = ("loss", "entropy", "learning_rate", "grad_norm", "optimizer/skipped", "nonfinite/steps",
            "micro_batches")  # of a step, by the learner


class SFTObjective(Objective):
    """-log p of every completion token, averaged over the step."""

    def loss(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, totals: StepTotals) -> LossOutput:
        return LossOutput(-logprobs.sum() / totals.tokens, {"entropy": entropy.detach().mean()})


class SFTTrainer(Trainer):
    """Fine-tuning with TRL's constructor; `train()` loops over `step()`, records, saves checkpoints and the adapter.

    The model goes on into GRPOTrainer as it is. GRPO's reference for the KL term stays the base model without adapter.
    """

    args: SFTConfig
    view_class = SFTView

    def __init__(
        self, model: FastPeftModel, train_dataset: Any, args: SFTConfig | None = None, processing_class: Any = None,
        eval_dataset: Any = None, callbacks: list[Any] | None = None,
    ) -> None:
        super().__init__(model, args or SFTConfig(), processing_class)
        longest, ends = self.longest_row(), self.policy.eos_token_ids(self.tokenizer)
        encoder = ExampleEncoder(self.tokenizer, longest, ends, self.args.chat_template_kwargs)
        source = PromptSource(as_examples(train_dataset), encoder, self.args.seed, self.args.shuffle_dataset)
        self.eval_groups = self.encode_all(eval_dataset, encoder)
        memory, peaks = plan_memory(model, self.args, self.policy, longest, "max_length")
        self.learn(source, SFTObjective(), memory, peaks)
        self.write(callbacks)

    def longest_row(self) -> int:
        """Tokens that prompt and completion may have together; ValueError where they would not fit the context."""
        context = self.model.loaded.max_seq_length
        if self.args.max_length is not None and self.args.max_length > context:
            raise ValueError(f"max_length is {self.args.max_length} and the context has {context} tokens; lower it, or "
                             "load with a larger max_seq_length")
        return self.args.max_length or context

    def encode_all(self, dataset: Any, encoder: ExampleEncoder) -> list[RolloutGroup]:
        """Every usable row of the evaluation dataset; DataError where there is none."""
        if dataset is None:
            if self.args.eval_strategy != "no":
                raise ValueError(f'eval_strategy is "{self.args.eval_strategy}", which needs an eval_dataset; pass one')
            return []
        source = PromptSource(as_examples(dataset), encoder, self.args.seed, shuffle=False)
        encoded = [encoder.encode(source.dataset[index]) for index in range(len(source.dataset))]
        for index, reason in enumerate(encoded):
            if isinstance(reason, str):
                source.count_skip(index, f"{reason} (evaluation)")
        groups = as_groups(example for example in encoded if isinstance(example, Prompt))
        if not groups:
            raise DataError(f"no row of the evaluation dataset can be used: {source.skip_summary()}")
        return groups

    def next_groups(self) -> list[RolloutGroup]:
        """The rows of the next optimizer step, each as a prompt with one completion."""
        return as_groups(self.source.take(self.args.batch_size), self.state.policy_version)

    def update(self, groups: list[RolloutGroup], at_most: int | None = None) -> dict[str, float]:
        """One optimizer step on these rows; returns its metrics."""
        found = super().update(groups)
        completions = sum(len(rollout.completion_ids) for group in groups for rollout in group.rollouts)
        self.state.epoch = self.source.epoch
        self.state.num_tokens += completions + sum(len(group.prompt_ids) for group in groups)
        return {name: found[name] for name in MEASURED if name in found} | {"completions/tokens": completions}

    def step(self) -> dict[str, float]:
        """One optimizer step on the next rows; returns its metrics."""
        return self.update(self.next_groups())

    def measured(self, before: int, groups: list[RolloutGroup], timing: dict[str, float]) -> dict[str, Any]:
        """Speed, tokens so far, rows that were left out, and how often memory ran out."""
        completions = sum(len(rollout.completion_ids) for group in groups for rollout in group.rollouts)
        return {
            "step_time": timing["step_time"], "tokens_per_second": completions / timing["step_time"],
            "memory/oom_train": self.memory.train.failures, "num_tokens": self.state.num_tokens,
            "data/skipped_rows": sum(self.source.skipped.values()),
        }

    def measure_evaluation(self) -> dict[str, float]:
        """Loss and entropy per completion token of the evaluation dataset, dropout off."""
        if not self.eval_groups:
            raise ValueError("there is no eval_dataset; pass one to SFTTrainer")
        training = self.model.training
        self.model.eval()
        self.learner.fill_logprobs(self.eval_groups, "old_logprobs", "entropy")
        self.model.train(training)
        rollouts: list[Any] = [rollout for group in self.eval_groups for rollout in group.rollouts]
        loss, entropy = (torch.cat([getattr(r, name) for r in rollouts]) for name in ("old_logprobs", "entropy"))
        return {"eval_loss": -loss.mean().item(), "eval_entropy": entropy.mean().item()}

    def describe(self, status: str) -> dict[str, Any]:
        return super().describe(status) | {"method": "sft"}


def as_groups(examples: Iterable[Prompt], policy_version: int = 0) -> list[RolloutGroup]:
    """Each example as a prompt with one completion, as packing and learner take them."""
    return [
        RolloutGroup(example.row, example.ids, [Rollout(
            example.completion_ids, [0.0] * len(example.completion_ids), "stop", policy_version=policy_version,
        )])
        for example in examples if isinstance(example, Example)
    ]
