"""The parity gate compares the sampler's log-probabilities with the trainer's, on sampled tokens.

If the sampler computes something else than the trainer, every ratio is wrong, and training slowly fails without an
error. So the trainer recomputes some of the sampled tokens, at the start and every few steps.

Of episodes it judges the turns after the first by themselves too: if a token between two turns is not the one that the
engine saw, the first turns agree, and only what was drawn behind it differs.
"""

import logging
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.losses.off_policy import MismatchWatch, k3_of
from lowmem_grpo.losses.sequences import with_context
from lowmem_grpo.memory.cache_dtype import AUTO, in_8_bits
from lowmem_grpo.memory.cutting import Limits
from lowmem_grpo.memory.oom import BatchLimit, RunMemory
from lowmem_grpo.models.packer import Packer
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rollout import eight_bit_cache
from lowmem_grpo.runs.clock import Clock
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import MicroBatch, RolloutGroup

logger = logging.getLogger(__name__)

BOUNDS = {torch.bfloat16: 0.02, torch.float16: 0.01, torch.float32: 0.001}  # of the mean difference, by weight dtype
GROUPS = 4  # that a check looks at
TOKENS_AT_ONCE = 4096
CAUSES = (
    "the adapter or the base weights changed outside the trainer (merged, moved, quantized again, another adapter "
    "active); a temperature of vllm_sampling_params other than the run's; a version of the sampler whose attention or "
    "rotary embedding differs from transformers' for this model; fp16 overflow. Try dtype=torch.bfloat16, then "
    'fast_inference="transformers", whose sampler is the trainer\'s own model'
)


BETWEEN = (
    "The first turns agree, so what differs is the tokens between turns: those that the engine saw are not those that "
    "are trained (a newline of the chat template dropped or doubled, a cut turn without its end, a history that was "
    'rendered anew). Try history="append", and another chat template; if it lasts, report it with the template'
)


class ParityError(RuntimeError):
    """Sampler and trainer do not compute the same probabilities."""


class ParityGate:
    """Checks the groups of a rollout before they are trained on."""

    def __init__(
        self, policy: Policy, params: SamplingParams, every: int, bound: float | None, *, state: TrainerState,
        stride: int = 1, memory: BatchLimit | None = None, mismatch: MismatchWatch | None = None,
        clock: Clock | None = None, cache_dtype: str = AUTO, correction: bool | None = None,
    ) -> None:
        """`params` are those of the rollouts. `every` counts optimizer steps between checks; 0 means no checks.

        A `bound` of None takes the one of BOUNDS for the dtype of computation. Truncated sampling (top_p, top_k or
        min_p) renormalises what is left, so its difference is measured but not judged. `stride` is the number of
        optimizer steps from one rollout to the next, `memory` bounds the tokens of a micro-batch, and `mismatch` learns
        what was measured. With a sampler whose key-value cache is in 8 bits (`cache_dtype`) the bound is another one,
        and the first check says what corrects the difference; `correction` is what the run has set.
        """
        self.policy, self.temperature, self.every = policy, params.temperature, every
        self.truncates = params.truncates
        self.cache_dtype, self.correction, self.advised = cache_dtype, correction, not in_8_bits(cache_dtype)
        if bound is None:
            of_dtype = BOUNDS[policy.autocast_dtype or policy.head.weight.dtype]
            bound = eight_bit_cache.BOUNDS.get(cache_dtype, of_dtype)
        self.bound = bound
        self.state, self.stride, self.started = state, stride, False
        self.mismatch, self.clock = mismatch or MismatchWatch(), clock or Clock()
        self.packer = Packer(policy.device, memory or RunMemory().train)

    def watch(self, groups: list[RolloutGroup]) -> dict[str, float]:
        """The metrics of `check`, if one is due: at step 0, then every `every` steps.

        The first rollout of a resumed run is checked too. It leaves no metrics, so that the records are those of a run
        that was never stopped."""
        step = self.state.global_step
        due = self.every and (step == 0 or step // self.every > (step - self.stride) // self.every)
        if not due and (self.started or not self.every):
            return {}
        self.started = True
        with self.clock.phase("train"):
            metrics = self.check(groups)
        if not due:
            return {}
        self.take_in(metrics)
        return metrics

    def take_in(self, metrics: dict[str, float]) -> None:
        """Take in the metrics, measured here or by the rank that all go by."""
        self.mismatch.last_k3 = metrics.get("sampling/parity/k3", self.mismatch.last_k3)

    def check(self, groups: list[RolloutGroup]) -> dict[str, float]:
        """Metrics over some groups; ParityError if the mean difference is above the bound.

        Tokens with NaN or infinity are left out, and a warning counts them. They say nothing about the sampler: the
        step that trains on them is skipped (train/nonfinite.py), and several such steps in a row end the run."""
        sampled, recomputed, later = self.recompute(list(islice(groups, GROUPS)))
        finite = (sampled - recomputed).isfinite()
        if lost := int(finite.logical_not().sum()):
            logger.warning("the parity check left out %d of %d tokens, whose log-probabilities are NaN or infinite",
                           lost, len(finite))
        sampled, recomputed, later = sampled[finite], recomputed[finite], later[finite]
        if sampled.numel() == 0:
            return {}
        difference = (recomputed - sampled).abs()
        self.judge(difference, later)
        found = {
            "sampling/parity/mean": difference.mean().item(), "sampling/parity/max": difference.max().item(),
            "sampling/parity/k3": k3_of(recomputed - sampled).mean().item(),
            "sampling/parity/ratio": (recomputed - sampled).exp().mean().item(),
            **({"sampling/parity/later_turns": difference[later].mean().item()} if later.any() else {}),
        }
        if not self.advised:
            logger.warning("%s", eight_bit_cache.advice(self.cache_dtype, found, self.correction, self.mismatch))
        self.advised = True
        return found

    def judge(self, difference: Tensor, later: Tensor) -> None:
        """ParityError if the differences (N,) are too large, over all tokens or over those of `later` turns."""
        if self.truncates:
            return
        for whose, values in (("", difference), (" of later turns", difference[later])):
            if not len(values) or values.mean().item() <= self.bound:
                continue
            between = later.any() and not difference[~later].mean().item() > self.bound
            raise ParityError(
                f"the sampler's log-probabilities differ from the trainer's by {values.mean().item():.4f} on average "
                f"over {values.numel()} tokens{whose} (largest {values.max().item():.4f}); allowed is {self.bound} "
                f"(parity_bound). {BETWEEN if between else f'Likely causes: {self.causes}'}"
            )

    @property
    def causes(self) -> str:
        """Possible causes of a difference."""
        if not in_8_bits(self.cache_dtype):
            return CAUSES
        return (f'keys too large for 8 bits (kv_cache_dtype is {self.cache_dtype!r}; "auto" has no such limit); '
                f"{CAUSES}")

    def recompute(self, groups: list[RolloutGroup]) -> tuple[Tensor, Tensor, Tensor]:
        """(sampler's, trainer's) log-probabilities (N,) of the groups' tokens, and which of these are of later turns
        than the first of an episode, bool; dropout is off."""
        was_training = self.policy.model.training
        self.policy.model.eval()
        try:
            pairs = self.packer.run("the parity check", groups, Limits(TOKENS_AT_ONCE), self.pairs)
        finally:
            self.policy.model.train(was_training)
        sampled, recomputed, later = (
            torch.cat([found[i] for found in pairs] or [torch.empty(0, dtype=torch.bool if i == 2 else None)])
            for i in range(3)
        )
        return sampled, recomputed, later

    @torch.no_grad()
    def pairs(self, batches: Iterator[MicroBatch]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the result of `recompute` for each micro-batch."""
        found = []
        for batch in batches:
            logprobs, _ = self.policy.logprobs(batch, self.temperature)
            later = later_turns(batch).to(logprobs.device)
            found.append((batch.at_trained(batch.rollout_logprobs), logprobs.float(), later))
        return found


def later_turns(batch: MicroBatch) -> Tensor:
    """(N,) bool on the host: which trained tokens are of later turns than the first of their episode."""
    firsts = [len(one.turns[0].completion_ids) if one.turns else one.num_trained for one in batch.rollouts]
    flags = [with_context(one, torch.arange(one.num_trained) >= first)
             for one, first in zip(batch.rollouts, firsts, strict=True)]
    return torch.cat(flags) if batch.homes is None else torch.cat(flags)[batch.homes]
