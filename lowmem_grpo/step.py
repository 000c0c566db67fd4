"""One optimizer step on rollouts: the verbs `forward_backward` and `optim_step`, and what they need to know."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lowmem_grpo.batching import unpack
from lowmem_grpo.config import GRPOConfig
from lowmem_grpo.losses import grpo_loss
from lowmem_grpo.metrics import Reducer
from lowmem_grpo.offload import ActivationOffload
from lowmem_grpo.out_of_memory import Bound, RunMemory, Shortage, tried
from lowmem_grpo.packer import Limits, Packer
from lowmem_grpo.policy import Policy
from lowmem_grpo.rewind import Gradients, OptimizerCopy, RandomStates
from lowmem_grpo.types import MicroBatch, Rollout, RolloutGroup


class Learner:
    """Owns optimizer and schedule; turns groups with advantages into gradients, and gradients into a step.

    Where memory runs out, the work is undone and done again in smaller micro-batches, with the same result.
    """

    def __init__(
        self, policy: Policy, config: GRPOConfig, optimizer: torch.optim.Optimizer, scheduler: LRScheduler,
        offload: bool, fp16: bool, bound: Bound | None = None,
    ) -> None:
        self.policy, self.config = policy, config
        self.optimizer, self.scheduler = optimizer, scheduler
        self.offload: AbstractContextManager[Any] = ActivationOffload(policy.model) if offload else nullcontext()
        self.scaler = torch.amp.GradScaler(policy.device.type, enabled=fp16)  # fp16 gradients underflow without it
        self.bound = bound or RunMemory().train
        self.packer = Packer(policy.device, self.bound)
        self.prepare_again: Callable[[], None] | None = None  # while no step was made since `prepare`

    @property
    def limits(self) -> Limits:
        """Tokens and sequences of a micro-batch that the run was given."""
        return self.config.max_tokens_per_micro_batch, self.config.per_device_train_batch_size

    def fill_logprobs(self, groups: list[RolloutGroup], field: str) -> None:
        """Set `old_logprobs` or `ref_logprobs` of every rollout from the policy as it is now."""
        random = RandomStates(self.policy.device)
        filled = self.packer.run(f"recomputing {field}", groups, self.limits, self.recompute, random.restore)
        for rollout, values in filled:
            setattr(rollout, field, values)

    @torch.no_grad()
    def recompute(self, batches: Iterator[MicroBatch]) -> list[tuple[Rollout, Tensor]]:
        """Each rollout with the log-probabilities (C,) of its tokens, on the host."""
        found: list[tuple[Rollout, Tensor]] = []
        for batch in batches:
            logprobs, _ = self.policy.logprobs(batch, self.config.temperature)
            parts = unpack(logprobs.float().cpu(), batch.loss_mask.cpu(), batch.sequence_ids.cpu())
            found += zip(batch.rollouts, parts, strict=True)
        return found

    def prepare(self, groups: list[RolloutGroup], optimizer_steps: int) -> None:
        """Fill what this update needs beside the rollouts: nothing at all on-policy without a KL term."""
        trained = [replace(group, rollouts=self.with_gradient(group.rollouts)) for group in groups]
        training, random = self.policy.model.training, RandomStates(self.policy.device)

        def fill() -> None:
            self.policy.model.train(training)
            random.restore()
            limit = self.bound.lowered
            if optimizer_steps > 1:
                self.fill_logprobs(trained, "old_logprobs")
            if self.config.beta:
                with self.policy.base_model():
                    self.fill_logprobs(trained, "ref_logprobs")
            if self.bound.lowered != limit:
                fill()  # all of it in micro-batches of one size, as a run would that began with this bound

        fill()
        self.prepare_again = fill if optimizer_steps > 1 or self.config.beta else None

    def with_gradient(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts that can move the policy: not truncated (where those are masked), not of advantage 0."""
        kept = [r for r in rollouts if not (self.config.mask_truncated_completions and r.finish_reason == "length")]
        return kept if self.config.beta else [rollout for rollout in kept if rollout.advantage]

    def num_tokens(self, groups: list[RolloutGroup]) -> int:
        """Completion tokens that count in the loss; those of masked, truncated completions do not."""
        masked = self.config.mask_truncated_completions
        rollouts = (rollout for group in groups for rollout in group.rollouts)
        return sum(len(r.completion_ids) for r in rollouts if not (masked and r.finish_reason == "length"))

    def forward_backward(self, groups: list[RolloutGroup], num_tokens: float | None = None) -> dict[str, float]:
        """Add the gradient of the step's loss to the adapter; returns loss metrics over the trained tokens.

        Counts of tokens (unless given) and of sequences are those of all `groups`, so the gradient depends neither on
        how they are split into micro-batches nor on whether those without gradient were left out.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        trained = [replace(group, rollouts=self.with_gradient(group.rollouts)) for group in groups]
        tokens = self.num_tokens(groups) if num_tokens is None else num_tokens
        gradients, random = Gradients(self.policy.trainable), RandomStates(self.policy.device)

        def undo() -> None:
            gradients.restore()
            random.restore()

        def again() -> None:
            if self.prepare_again is not None:
                self.prepare_again()
                random.take()

        work = partial(self.accumulate, sequences=len(rollouts), tokens=tokens)
        metrics = self.packer.run("a training micro-batch", trained, self.limits, work, undo, again)
        self.prepare_again = None
        kept = sum(len(group.rollouts) for group in trained)
        return metrics | {"completions/trained": kept, "completions/total": len(rollouts)}

    def accumulate(self, batches: Iterator[MicroBatch], sequences: int, tokens: float) -> dict[str, float]:
        """Add the gradient of each micro-batch; the loss and its metrics over all of them."""
        self.policy.model.train()
        reducer = Reducer()
        total = torch.zeros((), device=self.policy.device)
        for batch in batches:
            loss, metrics, count = self.loss(batch, sequences, tokens)
            self.scaler.scale(loss).backward()
            total += loss.detach()
            reducer.add(metrics, count)
        return reducer.result() | {"loss": total.item()}

    def loss(self, batch: MicroBatch, sequences: int, tokens: float) -> tuple[Tensor, dict[str, Tensor], int]:
        """This micro-batch's share of the loss, its metrics, and its number of trained tokens."""
        config, mask = self.config, batch.loss_mask
        with self.offload:
            logprobs, entropy = self.policy.logprobs(batch, config.temperature)
        out = grpo_loss(
            logprobs, batch.advantages[mask], batch.sequence_ids[mask], loss_type=config.loss_type,
            num_sequences_in_step=sequences, num_tokens_in_step=tokens,
            max_completion_length=config.max_completion_length, epsilon=config.epsilon,
            epsilon_high=config.epsilon_high, delta=config.delta, beta=config.beta,
            use_bias_correction_kl=config.use_bias_correction_kl,
            old_logprobs=None if batch.old_logprobs is None else batch.old_logprobs[mask],
            ref_logprobs=None if batch.ref_logprobs is None else batch.ref_logprobs[mask],
        )
        difference = (logprobs.detach() - batch.rollout_logprobs[mask]).abs()
        metrics = out.metrics | {
            "entropy": entropy.mean(),
            "sampling/sampling_logp_difference/mean": difference.mean(),
            "sampling/sampling_logp_difference/max": difference.max(),
        }
        return out.loss, metrics, int(mask.sum())

    def optim_step(self) -> dict[str, float]:
        """Clip, step and clear the gradients; a step without gradient, or with one that is not finite, is skipped."""
        parameters = [parameter for parameter in self.policy.trainable if parameter.grad is not None]
        rate = self.optimizer.param_groups[0]["lr"]
        metrics = {"learning_rate": rate, "grad_norm": 0.0, "optimizer/skipped": 1.0}
        if parameters:
            self.scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
            metrics["grad_norm"] = norm.item()
            if torch.isfinite(norm):
                self.apply(parameters)
                metrics["optimizer/skipped"] = 0.0
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.prepare_again = None
        with warnings.catch_warnings():
            # a step may be skipped, the first one too; the schedule goes on, so that the run keeps its length
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.scheduler.step()
        return metrics

    def apply(self, parameters: list[torch.nn.Parameter]) -> None:
        """The optimizer's own step. Out of memory, it is undone and made once more with all caches empty; a second
        time raises MemoryExhaustedError, with parameters, state and gradients as they were."""
        what, before = "the optimizer step", OptimizerCopy(self.optimizer, parameters)
        step = partial(self.scaler.step, self.optimizer)
        failed = tried(step, self.policy.device, before.restore)
        if isinstance(failed, Shortage):
            self.bound.note(what, failed, "the caches are emptied, and it is made once more")
            failed = tried(step, self.policy.device, before.restore)
        if isinstance(failed, Shortage):
            self.bound.end(what, failed)
