"""The parity gate recomputes the log-probabilities of some sampled tokens at the start and every few steps, because
training fails silently if sampler and trainer differ: every importance ratio is then wrong.

In 16 bits a healthy sampler differs too, on a published model by more than a wrong one on a tiny model. Above a fixed
bound, the gate therefore measures what rounding does on this model and these tokens: the trainer's own pass with its
input embeddings moved by less than their last bit, which changes all later roundings. A difference of about that size
is healthy."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.losses.loss_types import k3_of
from lowmem_grpo.losses.off_policy import MismatchWatch
from lowmem_grpo.memory.cards import AUTO, in_8_bits
from lowmem_grpo.memory.cutting import CutLimits
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
# Above these bounds, the multiples of the measured rounding that are allowed. Measured on SmolLM2-135M-Instruct in
# bfloat16 (bench/LOG.md): 0.8 to 1.2 with a cache in 16 bits, 4.5 with e4m3, 10 with e5m2; a wrong position is 2.6
OF_ROUNDING, OF_ROUNDING_8_BITS = 1.5, {"fp8": 8.0, "fp8_e4m3": 8.0, "fp8_e5m2": 18.0}
FEW = 4.0  # over N tokens, the mean may also be off by this / sqrt(N), as a share: few tokens have the most rounding
MASKED = 'vllm_importance_sampling_mode="token_mask" with vllm_importance_sampling_clip_min=0.5 and _clip_max=5'
GROUPS = 4  # the most groups per check
TOKENS_AT_ONCE = 4096  # per micro-batch
CAUSES = (
    "the adapter or the base weights changed outside the trainer (merged, moved, quantized again, another adapter "
    "active); a temperature of vllm_sampling_params other than the run's; a version of the sampler whose attention, "
    "positions or rotary embedding differ from transformers' for this model"
)
OWN_SAMPLER = '. Try fast_inference="transformers", whose sampler is the trainer\'s own model'
BETWEEN = (
    "The first turns agree, so what differs is the tokens between turns: those that the engine saw are not those that "
    "are trained (a newline of the chat template dropped or doubled, a cut turn without its end, a history that was "
    'rendered anew). Try history="append", and another chat template; if it lasts, report it with the template'
)


class ParityError(RuntimeError):
    """The sampler's log-probabilities differ too much from the trainer's."""


class Compared(NamedTuple):
    """The log-probabilities (N,) of sampler and trainer, a mask (N,) of later turns, and what rounding changes in the
    trainer's (N,); all 0 where that was not measured."""

    sampled: Tensor
    recomputed: Tensor
    later: Tensor
    rounding: Tensor

    @property
    def difference(self) -> Tensor:
        return (self.recomputed - self.sampled).abs()

    def kept(self, flags: Tensor) -> "Compared":
        """Return the tokens with True in `flags` (N,)."""
        return Compared(*(values[flags] for values in self))


class ParityGate:
    """Checks that sampler and trainer agree, on sampled groups before they are trained on."""

    def __init__(
        self, policy: Policy, params: SamplingParams, every: int, bound: float | None, *, state: TrainerState,
        stride: int = 1, memory: BatchLimit | None = None, mismatch: MismatchWatch | None = None,
        clock: Clock | None = None, cache_dtype: str = AUTO, correction: bool | None = None, engine: str = "",
    ) -> None:
        """`params` are the rollouts' sampling parameters, `every` is the number of optimizer steps between checks (0:
        none), and `stride` the number of steps from one sampling to the next. If `bound` is None, the dtype's bound in
        BOUNDS applies, or in BOUNDS_8_BITS for an 8-bit `cache_dtype`, or the multiple of the measured rounding that is
        allowed, whichever is larger. With such a cache, the first check also logs whether `correction` corrects the
        difference. If `params` truncate sampling, a difference raises no error. `memory` limits micro-batches,
        `mismatch` receives the measured k3, and `engine` is the sampler's name."""
        self.policy, self.temperature, self.every = policy, params.temperature, every
        self.truncates = params.truncates
        self.cache_dtype, self.correction, self.advised = cache_dtype, correction, not in_8_bits(cache_dtype)
        self.dtype, self.engine = policy.autocast_dtype or policy.dtype, engine
        self.bound = BOUNDS_8_BITS.get(cache_dtype, BOUNDS[self.dtype]) if bound is None else bound
        self.of_rounding = OF_ROUNDING_8_BITS.get(cache_dtype, OF_ROUNDING) if bound is None else 0.0
        self.told = False  # whether a difference within rounding was logged
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
        """Return metrics of the difference on some groups; ParityError if its mean is above what is allowed. Tokens
        with NaN or infinite log-probabilities are left out, with a warning."""
        chosen = list(islice(groups, GROUPS))
        compared = self.recompute(chosen)
        if self.of_rounding and any(mean > allowed for *_, mean, allowed in self.parts(compared)):
            compared = self.recompute(chosen, rounding=True)
        if compared.sampled.numel() == 0:
            return {}
        self.judge(compared)
        difference, moved = compared.difference, compared.recomputed - compared.sampled
        metrics = {"sampling/parity/mean": difference.mean().item(), "sampling/parity/max": difference.max().item(),
                   "sampling/parity/k3": k3_of(moved).mean().item(),
                   "sampling/parity/ratio": moved.exp().mean().item(),
                   **({"sampling/parity/rounding": compared.rounding.mean().item()} if compared.rounding.any() else {}),
                   **({"sampling/parity/later_turns": difference[compared.later].mean().item()} if compared.later.any()
                      else {})}
        if not self.advised:
            logger.warning("%s", advice(self.cache_dtype, metrics, self.correction, self.mismatch.bound))
        self.advised = True
        return metrics

    def parts(self, compared: Compared) -> Iterator[tuple[str, Compared, float, float]]:
        """Yield words, tokens, mean difference and the largest one of a healthy sampler: for all tokens and for those
        of later turns. If sampling is truncated, nothing is judged."""
        for whose, part in (("", compared), (" of later turns", compared.kept(compared.later))):
            if count := 0 if self.truncates else len(part.sampled):
                of_rounding = self.of_rounding * part.rounding.mean().item() * (1 + FEW / count**0.5)
                yield whose, part, part.difference.mean().item(), max(self.bound, of_rounding)

    def judge(self, compared: Compared) -> None:
        """Raise ParityError if a mean difference exceeds what is allowed. Log once if only rounding explains it."""
        for whose, part, mean, allowed in self.parts(compared):
            most, rounded = part.difference.max().item(), part.rounding.mean().item()
            said = (f"the sampler's log-probabilities differ from the trainer's by {mean:.4f} on average over "
                    f"{len(part.sampled)} tokens{whose} (largest {most:.4f})")
            if mean > allowed:
                _, _, first, healthy = next(self.parts(compared.kept(~compared.later)), ("", part, 0.0, 0.0))
                between = compared.later.any() and first <= healthy
                limit = f"{self.bound} (parity_bound)" if allowed == self.bound else (
                    f"{allowed:.4f}, as rounding alone changes the trainer's own by {rounded:.4f} (parity_bound sets "
                    "another bound)")
                raise ParityError(f"{said}; allowed is {limit}. "
                                  f"{BETWEEN if between else f'Likely causes: {self.causes}'}")
            if mean > self.bound and not self.told:
                self.told = True
                logger.warning("%s. That is rounding: on this model in %s, it changes the trainer's own by %.4f, and "
                               "%.4f is allowed", said, str(self.dtype).removeprefix("torch."), rounded, allowed)

    @property
    def causes(self) -> str:
        """Likely causes, and advice that the run does not follow yet."""
        causes = CAUSES
        if in_8_bits(self.cache_dtype):
            causes = (f'keys too large for 8 bits (kv_cache_dtype is {self.cache_dtype!r}; "auto" has no such limit); '
                      f"{causes}")
        if self.dtype == torch.float16:
            causes += "; fp16 overflow (try dtype=torch.bfloat16)"
        return causes + (OWN_SAMPLER if self.engine != "transformers" else "")

    def recompute(self, groups: list[RolloutGroup], rounding: bool = False) -> Compared:
        """Return both sides' log-probabilities (dropout off) where both are finite, and with `rounding` what rounding
        does to them."""
        routes = self.policy.route_counts
        with evaluating(self.policy.model):
            pairs = self.packer.run("the parity check", groups, CutLimits(TOKENS_AT_ONCE),
                                    lambda batches: self.pairs(batches, rounding))
        if rounding:
            self.policy.route_counts = routes  # a second look is not counted again
        empty = Compared(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.bool), torch.empty(0))
        compared = Compared(*(torch.cat(parts) for parts in zip(*(pairs or [empty]), strict=True)))
        finite = (compared.sampled - compared.recomputed).isfinite()
        if not rounding and (lost := int(finite.logical_not().sum())):
            logger.warning("the parity check left out %d of %d tokens, whose log-probabilities are NaN or infinite",
                           lost, len(finite))
        return compared.kept(finite)

    @torch.no_grad()
    def pairs(self, batches: Iterator[MicroBatch], rounding: bool = False) -> list[Compared]:
        """Return the comparison of each micro-batch."""
        compared = []
        for batch in batches:
            logprobs = self.policy.logprobs(batch, self.temperature)[0].float()
            several = any(rollout.turns for rollout in batch.rollouts)
            later = later_turns(batch).to(logprobs.device) if several else torch.zeros_like(logprobs, dtype=torch.bool)
            with nudged(self.policy.base, self.dtype) if rounding else nullcontext():
                again = self.policy.logprobs(batch, self.temperature)[0].float() if rounding else logprobs
            compared.append(Compared(batch.at_trained(batch.rollout_logprobs), logprobs, later,
                                     (again - logprobs).abs().nan_to_num(0.0, 0.0, 0.0)))
        return compared


@contextmanager
def nudged(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Move the model's input embeddings at random by at most half a unit of `dtype`'s last place in this context. All
    later roundings then fall otherwise, as in another implementation of the same model."""
    embedding = model.get_input_embeddings()

    def nudge(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        wide = output.to(torch.promote_types(output.dtype, torch.float32))
        drawn = torch.Generator(output.device).manual_seed(0)  # its own, so that the run's random numbers stay
        share = torch.rand(wide.shape, generator=drawn, device=wide.device, dtype=wide.dtype) - 0.5
        return (wide * (1 + torch.finfo(dtype).eps * share)).to(output.dtype)

    hook = embedding.register_forward_hook(nudge)
    try:
        yield
    finally:
        hook.remove()


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
