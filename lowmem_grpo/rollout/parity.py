"""The parity gate recomputes the log-probabilities of some sampled tokens at the start and every few steps, because
training fails silently if sampler and trainer differ: every importance ratio is then wrong."""

import logging
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.losses.loss_types import k3_of
from lowmem_grpo.losses.off_policy import MismatchWatch
from lowmem_grpo.memory.cards import AUTO, in_8_bits
from lowmem_grpo.memory.cutting import Limits
from lowmem_grpo.memory.oom import BatchLimit, RunMemory
from lowmem_grpo.models.packing import Packer
from lowmem_grpo.models.policy import Policy, evaluating
from lowmem_grpo.runs.state import Clock, TrainerState
from lowmem_grpo.types import MicroBatch, RolloutGroup

logger = logging.getLogger(__name__)
BOUNDS = {torch.bfloat16: 0.02, torch.float16: 0.01, torch.float32: 0.001, torch.float64: 0.001}  # by weight dtype
# The bounds with an 8-bit KV cache. e4m3 has 3 bits of mantissa and e5m2 has 2, so it rounds twice as coarsely.
# Measured on the model that ships with the package: 0.09 and 0.2
BOUNDS_8_BITS = {"fp8": 0.2, "fp8_e4m3": 0.2, "fp8_e5m2": 0.4}
MASKED = 'vllm_importance_sampling_mode="token_mask" with vllm_importance_sampling_clip_min=0.5 and _clip_max=5'
GROUPS = 4  # the most groups per check
TOKENS_AT_ONCE = 4096  # per micro-batch
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
    """The sampler's log-probabilities differ too much from the trainer's."""


class ParityGate:
    """Checks that sampler and trainer agree, on sampled groups before they are trained on."""

    def __init__(
        self, policy: Policy, params: SamplingParams, every: int, bound: float | None, *, state: TrainerState,
        stride: int = 1, memory: BatchLimit | None = None, mismatch: MismatchWatch | None = None,
        clock: Clock | None = None, cache_dtype: str = AUTO, correction: bool | None = None,
    ) -> None:
        """`params` are the rollouts' sampling parameters, `every` is the number of optimizer steps between checks (0:
        none), and `stride` the number of steps from one sampling to the next. If `bound` is None, the dtype's bound in
        BOUNDS applies, or in BOUNDS_8_BITS for an 8-bit `cache_dtype`. With such a cache, the first check also logs
        whether `correction` corrects the difference. If `params` truncate sampling, a difference raises no error.
        `memory` limits micro-batches, and `mismatch` receives the measured k3."""
        self.policy, self.temperature, self.every = policy, params.temperature, every
        self.truncates = params.truncates
        self.cache_dtype, self.correction, self.advised = cache_dtype, correction, not in_8_bits(cache_dtype)
        if bound is None:
            of_dtype = BOUNDS[policy.autocast_dtype or policy.head.weight.dtype]
            bound = BOUNDS_8_BITS.get(cache_dtype, of_dtype)
        self.bound = bound
        self.state, self.stride, self.started = state, stride, False
        self.mismatch, self.clock = mismatch or MismatchWatch(), clock or Clock()
        self.packer = Packer(policy.device, memory or RunMemory().train)

    def watch(self, groups: list[RolloutGroup]) -> dict[str, float]:
        """Run `check` if it is due, and return its metrics. The first rollouts after a resume are checked too, but
        without metrics, so that the records equal those of a run that was never stopped."""
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
        self.mismatch.last_k3 = metrics.get("sampling/parity/k3", self.mismatch.last_k3)

    def check(self, groups: list[RolloutGroup]) -> dict[str, float]:
        """Return metrics of the difference on some groups; ParityError if its mean is above the bound. Tokens with NaN
        or infinite log-probabilities are left out, with a warning."""
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
        metrics = {"sampling/parity/mean": difference.mean().item(), "sampling/parity/max": difference.max().item(),
                   "sampling/parity/k3": k3_of(recomputed - sampled).mean().item(),
                   "sampling/parity/ratio": (recomputed - sampled).exp().mean().item(),
                   **({"sampling/parity/later_turns": difference[later].mean().item()} if later.any() else {})}
        if not self.advised:
            logger.warning("%s", advice(self.cache_dtype, metrics, self.correction, self.mismatch.bound))
        self.advised = True
        return metrics

    def judge(self, difference: Tensor, later: Tensor) -> None:
        """Raise ParityError if the mean of `difference` (N,) exceeds the bound, over all tokens or over those in the
        mask `later` (N,) of later turns. Do nothing if sampling is truncated."""
        if self.truncates:
            return
        for whose, values in (("", difference), (" of later turns", difference[later])):
            if not len(values) or values.mean().item() <= self.bound:
                continue
            between = later.any() and not difference[~later].mean().item() > self.bound
            raise ParityError("the sampler's log-probabilities differ from the trainer's by "
                              f"{values.mean().item():.4f} on average over {values.numel()} tokens{whose} (largest "
                              f"{values.max().item():.4f}); allowed is {self.bound} (parity_bound). "
                              f"{BETWEEN if between else f'Likely causes: {self.causes}'}")

    @property
    def causes(self) -> str:
        if not in_8_bits(self.cache_dtype):
            return CAUSES
        return (f'keys too large for 8 bits (kv_cache_dtype is {self.cache_dtype!r}; "auto" has no such limit); '
                f"{CAUSES}")

    def recompute(self, groups: list[RolloutGroup]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-probabilities (N,) of sampler and trainer (dropout off), and a mask (N,) of later turns."""
        with evaluating(self.policy.model):
            pairs = self.packer.run("the parity check", groups, Limits(TOKENS_AT_ONCE), self.pairs)
        empty = torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.bool)
        sampled, recomputed, later = (torch.cat(parts) for parts in zip(*(pairs or [empty]), strict=True))
        return sampled, recomputed, later

    @torch.no_grad()
    def pairs(self, batches: Iterator[MicroBatch]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the three tensors of `recompute` for each micro-batch."""
        compared = []
        for batch in batches:
            logprobs, _ = self.policy.logprobs(batch, self.temperature)
            several = any(rollout.turns for rollout in batch.rollouts)
            later = later_turns(batch).to(logprobs.device) if several else torch.zeros_like(logprobs, dtype=torch.bool)
            compared.append((batch.at_trained(batch.rollout_logprobs), logprobs.float(), later))
        return compared


def later_turns(batch: MicroBatch) -> Tensor:
    """Return a mask (N,) on the host, True for trained tokens after the first turn of their episode."""
    firsts = [len(r.turns[0].completion_ids) if r.turns else r.num_trained for r in batch.rollouts]
    flags = [rollout.with_context(torch.arange(rollout.num_trained) >= first)
             for rollout, first in zip(batch.rollouts, firsts, strict=True)]
    return torch.cat(flags) if batch.homes is None else torch.cat(flags)[batch.homes]


def advice(cache_dtype: str, metrics: dict[str, float], correction: bool | None, bound: float) -> str:
    """Return a log line about an 8-bit KV cache: the difference measured, and how the run corrects it or could."""
    k3, mean, most = (metrics[f"sampling/parity/{name}"] for name in ("k3", "mean", "max"))
    if correction:
        now = "Tokens are weighed for it (vllm_importance_sampling_correction=True)"
    elif correction is False:
        now = ("Nothing corrects it (vllm_importance_sampling_correction=False); None weighs tokens while the mean k3 "
               f"is above {bound:g}, True always")
    elif k3 > bound:
        now = (f"Tokens are weighed for it, as the mean k3 is above {bound:g} (vllm_importance_sampling_correction is "
               "None); True weighs them always")
    else:
        now = (f"Nothing corrects it yet, as the mean k3 is at most {bound:g} (vllm_importance_sampling_correction is "
               "None); True weighs tokens always")
    return (f"the key-value cache is in 8 bits ({cache_dtype}): the sampler's log-probabilities are off from the "
            f"trainer's by {mean:.4f} on average, at most by {most:.3f} (mean k3 {k3:.2g}). {now}. If few tokens "
            f'differ a lot, {MASKED} leaves these out; kv_cache_dtype="auto" ends the difference')
