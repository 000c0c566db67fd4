"""The objective of GRPO: which rollouts and tokens count, and the loss of a micro-batch."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.losses.advantages import GAE
from lowmem_grpo.losses.loss_metrics import effective_sample_share, percentiles
from lowmem_grpo.losses.loss_types import LOSS_TYPES, StepCounts
from lowmem_grpo.losses.objective import Objective, PolicyOutputs, Reducer, StepTotals
from lowmem_grpo.losses.off_policy import MismatchWatch, mean_k3
from lowmem_grpo.losses.policy_loss import grpo_loss
from lowmem_grpo.losses.regularization import (
    EntropyControl,
    put_kl_in_reward,
    take_kl_from_rewards,
    top_entropy_mask,
)
from lowmem_grpo.types import TOKEN_FIELDS, LossOutput, MicroBatch, Rollout, RolloutGroup, TokenField

logger = logging.getLogger(__name__)
OF_LOSS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "policy_mask", "advantages")
MANY_DROPPED = 0.1  # share of the tokens of the current policy that a mask leaves out


class GRPOObjective(Objective):
    """The objective of GRPO and its variants, chosen by the settings. Without `exact` (training passes with dropout),
    the mismatch of trainer and sampler is not measured."""

    def __init__(self, config: GRPOConfig, exact: bool = True) -> None:
        self.config, self.exact = config, exact
        bonus = EntropyControl(config.entropy_coef, config.use_adaptive_entropy, config.entropy_coef_min,
                               config.entropy_coef_max, config.entropy_coef_delta, config.entropy_target)
        self.entropy = bonus if bonus.enabled else None
        self.mismatch = MismatchWatch()
        self.correct_mismatch = self.stale = False  # for the update in progress
        self.moved = False  # whether optimizer steps of the update may have changed the policy
        self.told: set[str] = set()  # what was logged, by its cause

    @property
    def temperature(self) -> float:
        return self.config.temperature

    @property
    def entropy_applied(self) -> float:
        return 0.0 if self.entropy is None else self.entropy.applied

    @property
    def counts_generation(self) -> bool:
        return LOSS_TYPES[self.config.loss_type].counts_generation

    def needed_before(self, optimizer_steps: int) -> tuple[TokenField, ...]:
        wanted = {"old_logprobs": optimizer_steps > 1, "entropy": self.config.top_entropy_quantile < 1,
                  "ref_logprobs": self.config.kl_weight != 0}
        return tuple(TOKEN_FIELDS[name] for name, needed in wanted.items() if needed)

    def start_update(self, rollouts: list[Rollout], policy_version: int) -> None:
        """Turn the importance correction on or off; by default on for stale rollouts or a large sampler mismatch."""
        chosen = self.config.vllm_importance_sampling_correction
        self.stale = any(rollout.policy_version < policy_version or not all(turn.exact for turn in rollout.turns)
                         for rollout in rollouts)
        self.correct_mismatch = self.mismatch.due(self.stale) if chosen is None else chosen
        if chosen is None:
            self.tell()

    def tell(self) -> None:
        """Log once that tokens are weighed because rollouts are stale, and each time that a mismatch begins or ends."""
        cause, mismatch = "stale" if self.stale else "mismatch", self.mismatch
        if self.correct_mismatch and cause not in self.told:
            self.told.add(cause)
            logger.warning(
                "%s: tokens are weighed by %s here and in steps like this one (vllm_importance_sampling_correction)",
                "some rollouts are of an older policy, or of another temperature" if self.stale else
                f"sampler and trainer differ (mean k3 {mismatch.last_k3:.2g}, bound {mismatch.bound})",
                self.config.vllm_importance_sampling_mode,
            )
        elif not self.correct_mismatch and "mismatch" in self.told:
            self.told.remove("mismatch")
            logger.warning("sampler and trainer agree again (mean k3 %.2g is at most half of %g): tokens are no longer "
                           "weighed", mismatch.last_k3, mismatch.bound)

    def prepared(self, rollouts: list[Rollout], groups: Sequence[RolloutGroup] = ()) -> None:
        """Choose the tokens of the highest entropy, and put the KL term into the advantages, if the settings say so."""
        if self.config.top_entropy_quantile < 1:
            entropies = [rollout.at_trained(rollout.entropy) for rollout in rollouts if rollout.entropy is not None]
            mask = top_entropy_mask(torch.cat(entropies or [torch.empty(0)]), self.config.top_entropy_quantile)
            for rollout, part in zip(rollouts, mask.split([r.num_trained for r in rollouts]), strict=True):
                rollout.policy_mask = rollout.with_context(part)
        if self.config.kl_in_reward:
            if any(turn.state is not None for rollout in rollouts for turn in rollout.turns):
                refuse_states(self.config)
            if self.config.advantage_estimator == "rloo":
                take_kl_from_rewards(list(groups), self.config.beta, self.config)
            elif self.config.advantage_estimator != GAE:
                put_kl_in_reward(rollouts, self.config.beta)

    def counted(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Return the rollouts except failed episodes and, with `mask_truncated_completions`, truncated completions."""
        masked = self.config.mask_truncated_completions
        return [rollout for rollout in rollouts
                if not (rollout.failed or (masked and rollout.finish_reason == "length"))]

    def with_gradient(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Return the counted rollouts with nonzero advantage, or all of them with a KL term or an entropy bonus."""
        everything = self.config.kl_weight or self.entropy is not None
        return [rollout for rollout in self.counted(rollouts) if everything or rollout.has_signal]

    def loss(self, batch: MicroBatch, outputs: PolicyOutputs, totals: StepTotals) -> LossOutput:
        """Return the `grpo_loss` of the batch, without its KL term if the advantages contain this term."""
        entropy, logprobs = outputs.entropy(grad=self.entropy_applied != 0), outputs.logprobs
        apart = self.config.kl_in_reward or self.config.kl_weight != self.config.beta  # no KL term in this loss
        settings = replace(self.config, beta=0.0, kl_estimator=None) if apart else self.config
        fields = {name: batch.at_trained(batch.fields[name]) for name in OF_LOSS if name in batch.fields}
        out = grpo_loss(logprobs, sequence_ids=batch.at_trained(batch.sequence_ids), settings=settings, entropy=entropy,
                        num_sequences_in_step=totals.sequences, num_tokens_in_step=totals.tokens,
                        num_policy_tokens_in_step=totals.policy_tokens, correct_mismatch=self.correct_mismatch,
                        entropy_coef=self.entropy_applied, num_sequences=len(batch.rollouts), **fields)
        self.moved = "old_logprobs" in fields
        out.metrics["entropy"] = entropy.detach().mean()
        if self.config.kl_in_reward and "ref_logprobs" in fields:
            out.metrics["kl"] = (fields.get("old_logprobs", logprobs.detach()) - fields["ref_logprobs"]).mean()
        out.policy_loss = None if self.entropy is None else out.policy_loss  # without a bonus it equals the loss
        if "policy_mask" in fields:
            chosen = entropy.detach()[fields["policy_mask"]]
            out.metrics["entropy/policy"] = chosen.sum() / max(len(chosen), 1)
            out.counts["entropy/policy"] = len(chosen)
        return out

    @property
    def conditions(self) -> tuple[Any, ...]:
        return self.correct_mismatch, self.stale, self.entropy_applied

    def rescaled(self, before: StepTotals, after: StepTotals) -> float:
        first, second = (
            LOSS_TYPES[self.config.loss_type].weights(
                torch.ones((), dtype=torch.float64),
                StepCounts(float(step.sequences), float(step.tokens), self.config.max_completion_length),
            ) for step in (before, after)
        )
        return float(second / first)

    def measured(self, reducer: Reducer) -> dict[str, float]:
        metrics = reducer.result()
        for name in ("ratio", "mismatch"):
            values = reducer.sampled(name)
            if values.numel():
                metrics |= dict(zip((f"{name}/p01", f"{name}/p50", f"{name}/p99"), percentiles(values), strict=True))
        mismatch = reducer.sampled("mismatch")
        if mismatch.numel() and self.exact:
            source = "staleness" if self.stale else "mismatch"
            metrics[f"{source}/k3"] = mean_k3(mismatch)
            metrics[f"{source}/effective_samples"] = effective_sample_share(mismatch)
            if not self.stale:
                self.mismatch.last_k3 = metrics["mismatch/k3"]
                self.check_masks(metrics)
        if self.entropy is not None:
            if "entropy" in metrics:
                self.entropy.update(metrics.get("entropy/policy", metrics["entropy"]))
            metrics["entropy_coef"] = self.entropy.coef  # the next step's, as TRL logs it
        return metrics | {"mismatch/corrected": float(self.correct_mismatch)}

    def check_masks(self, metrics: dict[str, float]) -> None:
        """Warn once of each mask that leaves out more than a tenth of the tokens of the current policy."""
        config = self.config
        masks = {"sampling/importance_sampling_ratio/dropped":
                 f"vllm_importance_sampling_mode={config.vllm_importance_sampling_mode!r} with bounds "
                 f"{config.correction_bounds}",
                 "off_policy/masked_share": f"off_policy_mask_threshold={config.off_policy_mask_threshold}"}
        for name, mask in masks.items():
            moved = self.moved and name == "off_policy/masked_share"  # by earlier optimizer steps of the generation
            if name not in self.told and not moved and metrics.get(name, 0) > MANY_DROPPED:
                self.told.add(name)
                logger.warning("%s leaves out %.0f%% of the tokens (%s), although all are of the current policy: its "
                               "bounds are within the rounding of sampler and trainer. Widen them", mask,
                               100 * metrics[name], name)

    def state(self) -> dict[str, Any]:
        return {"entropy": None if self.entropy is None else self.entropy.state(), "last_k3": self.mismatch.last_k3,
                "large_mismatch": self.mismatch.large}

    def restore(self, state: dict[str, Any]) -> None:
        if self.entropy is not None:
            self.entropy.restore(state.get("entropy"))
        self.mismatch.last_k3, self.mismatch.large = state.get("last_k3"), state.get("large_mismatch", False)


def refuse_states(config: GRPOConfig) -> None:
    """Raise ValueError if turns in the same state would be compared, and each token has an advantage of its own."""
    of_critic = config.advantage_estimator == GAE
    if config.state_weight and (of_critic or config.kl_in_reward):
        why = " each token is compared with a value of its own" if of_critic else \
            f" and beta {config.beta} the KL term is in the reward of each token"
        raise ValueError(f"with advantage_estimator={config.advantage_estimator!r}{why}, which leaves no place for the "
                         "comparison of turns in the same state; set state_weight=0" + ", or beta=0" * (not of_critic))
