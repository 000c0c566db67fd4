"""The objective with a teacher: the policy loss of GRPO, and how far the policy is from its teacher at each token."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.teacher import FULL, SAMPLED
from lowmem_grpo.kernels.linear_divergence import linear_divergence, linear_topk
from lowmem_grpo.losses.divergence import clipped_ratio, mean_of_sequences, sampled_token_loss, top_k_divergence
from lowmem_grpo.losses.objective import PolicyOutputs, StepTotals
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.teacher import Teacher
from lowmem_grpo.rollout.teacher_prompts import behind
from lowmem_grpo.trainer.grpo_objective import GRPOObjective
from lowmem_grpo.types import TOKEN_FIELDS, LossOutput, MicroBatch, Rollout, TokenField

DIVERGENCE, TEACHER_ENTROPY, AGREEMENT = (f"distillation/{name}" for name in (
    "divergence", "teacher_entropy", "agreement"))


class TeacherObjective(GRPOObjective):
    """The loss (1 - w) * policy loss + w * distillation loss, w: `distillation_weight`. Without a `teacher` that
    computes here, rollouts have what a teacher elsewhere said."""

    def __init__(self, config: GRPOConfig, exact: bool, policy: Policy, teacher: Teacher | None) -> None:
        super().__init__(config, exact)
        self.policy, self.teacher = policy, teacher
        self.taught_by = policy  # the policy whose head turns the teacher's hidden states into log-probabilities
        self.read: list[Rollout] = []  # by the teacher, in the last update

    @property
    def alone(self) -> bool:
        """True if there is no policy loss."""
        return self.config.distillation_weight == 1

    def needed_before(self, optimizer_steps: int) -> tuple[TokenField, ...]:
        """Return the fields of the policy loss, if it counts, and what the teacher computes here."""
        usual = super().needed_before(optimizer_steps)
        if self.alone:
            clips = self.config.distillation_is_clip and not self.config.off_policy
            usual = tuple(field for field in usual if field.name == "old_logprobs" and clips)
        if self.teacher is None:
            return usual
        sampled = self.config.distillation_mode == SAMPLED
        names = ("teacher_logprobs", "teacher_entropy") if sampled else ("teacher_hidden",)
        fields = [replace(TOKEN_FIELDS[name], under=self.teacher.reading, behind=behind) for name in names]
        if optimizer_steps > 1 or any(field.of_all for field in usual):  # a step's shares of the ranks are others
            fields = [replace(field, told=True) for field in fields]
        return *usual, *fields

    def start_update(self, rollouts: list[Rollout], policy_version: int) -> None:
        """Release the last update's hidden states of the teacher, which records may hold longer than needed, and take
        the head with which it reads in this update."""
        for rollout in self.read:
            rollout.fields.pop("teacher_hidden", None)
        self.read, self.taught_by = rollouts, self.policy
        if self.teacher is not None:
            self.taught_by = self.teacher.policy_of_head(self.config.distillation_mode != SAMPLED)
        super().start_update(rollouts, policy_version)

    def with_gradient(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Return the rollouts that the policy loss trains, and those that the teacher has read."""
        trained = [] if self.alone else super().with_gradient(rollouts)
        known = {id(rollout) for rollout in trained}
        return [rollout for rollout in self.counted(rollouts) if id(rollout) in known or is_taught(rollout)]

    def stepped(self, step: int) -> None:
        """Let a teacher that follows the policy do so, if it is due."""
        if self.teacher is not None and not step % self.config.teacher_sync_steps:
            self.teacher.follow(self.config.teacher_update_rate)

    def loss(self, batch: MicroBatch, outputs: PolicyOutputs, totals: StepTotals) -> LossOutput:
        """Return the two losses of the batch, weighed, with the metrics of both."""
        share = self.config.distillation_weight
        policy = None if self.alone else super().loss(batch, outputs, totals)
        losses, values = self.compare(batch, outputs)
        weights = self.token_weights(batch, outputs, totals)
        if "teacher_mask" in batch.fields:
            taught = batch.at_trained(batch.fields["teacher_mask"]) > 0
            losses, values = torch.where(taught, losses, 0.0), {name: each[taught] for name, each in values.items()}
        measured = {} if policy is None else policy.metrics  # of all tokens
        values = {name: each for name, each in values.items() if len(each) and name not in measured}
        loss = (losses * weights).sum()
        sums = {"self_distillation/distillation_loss": loss.detach()}  # as TRL's SDPO names it
        loss = share * loss
        means = {name: each.mean() for name, each in values.items()}
        counts = {name: float(len(each)) for name, each in values.items()}
        if policy is None:
            return LossOutput(loss, means, counts, sums=sums)
        total, alone = (1 - share) * policy.loss + loss, policy.policy_loss
        sums["self_distillation/policy_loss"] = policy.loss.detach()
        return replace(policy, loss=total, metrics=means | policy.metrics, counts=counts | policy.counts, sums=sums,
                       policy_loss=alone if alone is None else total - (1 - share) * (policy.loss - alone))

    def compare(self, batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the distillation loss (N,) of each trained token, and what is measured at them (N,)."""
        told = {name: batch.at_trained(values) for name, values in batch.fields.items() if name.startswith("teacher_")}
        config = self.config
        if config.distillation_mode == FULL:
            return self.compare_all(outputs, batch.of_rollouts("teacher_hidden"))
        entropies = {"entropy": outputs.entropy().detach()}
        if "teacher_entropy" in told:
            entropies[TEACHER_ENTROPY] = told["teacher_entropy"]
        if config.distillation_mode == SAMPLED:
            logprobs, taught = outputs.logprobs, told["teacher_logprobs"]
            return sampled_token_loss(logprobs, taught), entropies | {DIVERGENCE: (logprobs - taught).detach()}
        if self.teacher is None:
            ids, taught = told["teacher_top_ids"], told["teacher_top_logprobs"]
        else:
            ids, taught, entropies[TEACHER_ENTROPY] = self.likeliest(outputs, batch.of_rollouts("teacher_hidden"))
        own = several(outputs, ids)
        losses = top_k_divergence(own, taught, config.divergence, config.distillation_add_tail)
        same = (own.argmax(-1) == taught.argmax(-1)).float()
        return losses, entropies | {DIVERGENCE: losses.detach(), AGREEMENT: same}

    def compare_all(self, outputs: PolicyOutputs, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compare the whole vocabularies, from the teacher's hidden states (N, E)."""
        own, other, rows = self.policy.head, self.taught_by.head, self.policy.head.rows
        found = linear_divergence(
            outputs.hidden, hidden, own.weight, None if other is own else other.weight, beta=self.config.divergence,
            temperature=outputs.temperature, bias=own.bias,
            rows=None if rows is None else (rows.ids, rows.values[rows.order]),
            teacher_bias=other.bias, logit_scale=own.logit_scale, teacher_logit_scale=other.logit_scale,
            softcap=own.softcap, teacher_softcap=other.softcap, chunk_rows=self.policy.logits_chunk)
        return found.divergence, {
            DIVERGENCE: found.divergence.detach(), "entropy": found.entropy, TEACHER_ENTROPY: found.teacher_entropy,
            AGREEMENT: found.agreement}

    @torch.no_grad()
    def likeliest(self, outputs: PolicyOutputs, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the student's likeliest tokens (N, K), the teacher's log-probabilities (N, K) of them, and its entropy
        (N,)."""
        head, teacher, most = self.policy.head, self.taught_by, self.config.distillation_topk or 1
        rows = len(teacher.head.weight)  # those that both have
        _, ids = linear_topk(
            outputs.hidden, head.weight[:rows], most, bias=None if head.bias is None else head.bias[:rows],
            logit_scale=head.logit_scale, softcap=head.softcap, temperature=outputs.temperature,
            chunk_rows=self.policy.logits_chunk)
        read = PolicyOutputs(hidden, outputs.targets, teacher.at_head, teacher.head.logits_of, outputs.temperature)
        return ids, several(read, ids), read.entropy()

    def token_weights(self, batch: MicroBatch, outputs: PolicyOutputs, totals: StepTotals) -> Tensor:
        """Return the weight (N,) of each token's divergence in the loss: one over the step's tokens, or over those of
        its sequence and the step's sequences; with old log-probabilities, times the clipped ratio."""
        sequences = batch.at_trained(batch.sequence_ids)
        if self.config.by_sequence:
            taught = batch.at_trained(batch.fields["teacher_mask"]) > 0
            weights = mean_of_sequences(sequences, taught, len(batch.rollouts), totals.sequences)
        else:
            weights = torch.full(sequences.shape, 1 / max(totals.tokens, 1), device=sequences.device)
        if "old_logprobs" in batch.fields and self.config.distillation_is_clip:
            old = batch.at_trained(batch.fields["old_logprobs"])
            weights = weights * clipped_ratio(outputs.logprobs, old, self.config.distillation_is_clip)
        return weights


def several(outputs: PolicyOutputs, ids: Tensor) -> Tensor:
    """Return the log-probabilities (N, K) of tokens `ids` (N, K) at the N trained tokens."""
    places = torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
    return outputs.several(places, ids.flatten()).view(ids.shape)


def is_taught(rollout: Rollout) -> bool:
    """Return whether a teacher reads the rollout; without a mask it reads all of them."""
    mask: Any = rollout.fields.get("teacher_mask")
    return mask is None or bool(mask.any())
