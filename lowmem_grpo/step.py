"""One optimizer step on rollouts: the verbs `forward_backward` and `optim_step`, and what they need to know."""

import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lowmem_grpo.batching import pack, unpack
from lowmem_grpo.config import GRPOConfig
from lowmem_grpo.losses import grpo_loss
from lowmem_grpo.metrics import Reducer
from lowmem_grpo.offload import offload_activations
from lowmem_grpo.policy import Policy
from lowmem_grpo.types import MicroBatch, Rollout, RolloutGroup


class Learner:
    """Owns optimizer and schedule; turns groups with advantages into gradients, and gradients into a step."""

    def __init__(
        self, policy: Policy, config: GRPOConfig, optimizer: torch.optim.Optimizer, scheduler: LRScheduler,
        offload: bool, fp16: bool,
    ) -> None:
        self.policy, self.config = policy, config
        self.optimizer, self.scheduler, self.offload = optimizer, scheduler, offload
        self.scaler = torch.amp.GradScaler(policy.device.type, enabled=fp16)  # fp16 gradients underflow without it

    def micro_batches(self, groups: list[RolloutGroup]) -> Iterator[MicroBatch]:
        """The groups' completions, packed within the run's bounds, on the device."""
        bounds = (self.config.max_tokens_per_micro_batch, self.config.per_device_train_batch_size)
        for batch in pack(groups, *bounds):
            yield batch.to(self.policy.device)

    @torch.no_grad()
    def fill_logprobs(self, groups: list[RolloutGroup], field: str) -> None:
        """Set `old_logprobs` or `ref_logprobs` of every rollout from the policy as it is now."""
        for batch in self.micro_batches(groups):
            logprobs, _ = self.policy.logprobs(batch, self.config.temperature)
            parts = unpack(logprobs.float().cpu(), batch.loss_mask.cpu(), batch.sequence_ids.cpu())
            for rollout, values in zip(batch.rollouts, parts, strict=True):
                setattr(rollout, field, values)

    def prepare(self, groups: list[RolloutGroup], optimizer_steps: int) -> None:
        """Fill what this update needs beside the rollouts: nothing at all on-policy without a KL term."""
        trained = [replace(group, rollouts=self.with_gradient(group.rollouts)) for group in groups]
        if optimizer_steps > 1:
            self.fill_logprobs(trained, "old_logprobs")
        if self.config.beta:
            with self.policy.base_model():
                self.fill_logprobs(trained, "ref_logprobs")

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
        self.policy.model.train()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        trained = [replace(group, rollouts=self.with_gradient(group.rollouts)) for group in groups]
        tokens = self.num_tokens(groups) if num_tokens is None else num_tokens
        reducer = Reducer()
        total = torch.zeros((), device=self.policy.device)
        for batch in self.micro_batches(trained):
            loss, metrics, count = self.loss(batch, len(rollouts), tokens)
            self.scaler.scale(loss).backward()
            total += loss.detach()
            reducer.add(metrics, count)
        kept = sum(len(group.rollouts) for group in trained)
        counts = {"completions/trained": kept, "completions/total": len(rollouts)}
        return reducer.result() | {"loss": total.item()} | counts

    def loss(self, batch: MicroBatch, sequences: int, tokens: float) -> tuple[Tensor, dict[str, Tensor], int]:
        """This micro-batch's share of the loss, its metrics, and its number of trained tokens."""
        config, mask = self.config, batch.loss_mask
        with offload_activations(self.policy.device, self.offload):
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
                self.scaler.step(self.optimizer)
                metrics["optimizer/skipped"] = 0.0
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        with warnings.catch_warnings():
            # a step may be skipped, the first one too; the schedule goes on, so that the run keeps its length
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.scheduler.step()
        return metrics
