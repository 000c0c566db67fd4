"""Completions beyond what a step trains on: the last ones to end are dropped, which favours short ones.

What is dropped is measured in each step. How long the dropped completions would have become is not known; they had
at least the tokens that they had drawn. So with them the mean length would have been at least `full_length`, and the
groups' mean length is too small by at least `length_bias`.
"""

import logging
from dataclasses import dataclass, field, replace
from statistics import fmean

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Engine, Until
from lowmem_grpo.engines.rounds import takes
from lowmem_grpo.types import RolloutGroup

logger = logging.getLogger(__name__)


@dataclass
class ExtraGenerations:
    """Those of one step."""

    count: int  # of each prompt
    kept: list[int] = field(default_factory=list)  # lengths of what was taken
    dropped: list[int] = field(default_factory=list)  # tokens that the others had

    def begin(self) -> None:
        """Forget the step before."""
        self.kept, self.dropped = [], []

    def asked(self, params: SamplingParams) -> tuple[SamplingParams, Until | None]:
        """How to sample, and when a prompt is finished, where a group has `params.n` completions."""
        if not self.count:
            return params, None
        return replace(params, n=params.n + self.count), Until(params.n)

    def note(self, groups: list[RolloutGroup], until: Until | None) -> None:
        """These groups were sampled so."""
        if until is not None:
            self.kept += [rollout.num_trained for group in groups for rollout in group.rollouts]
            self.dropped += [tokens for lengths in until.dropped.values() for tokens in lengths]

    def metrics(self) -> dict[str, float]:
        """What was dropped, and the measured bias; empty where nothing was sampled so."""
        if not (self.kept and self.dropped):
            return {}
        kept, full = fmean(self.kept), fmean([*self.kept, *self.dropped])
        return {
            "sampling/extra/dropped": len(self.dropped), "sampling/extra/dropped_tokens": sum(self.dropped),
            "sampling/extra/kept_length": kept, "sampling/extra/dropped_length": fmean(self.dropped),
            "sampling/extra/length_bias": kept - full,
        }


def check_extra(count: int, size: int, engine: Engine) -> None:
    """Raise ValueError where the engine cannot end a call early; say once what the setting does to lengths."""
    if not count:
        return
    if not takes(engine.generate, "until"):
        raise ValueError(
            f"extra_generations is {count}, and the engine {engine.name} samples all completions to their ends (its "
            "generate takes no until); leave extra_generations out, or sample with the model's own engine"
        )
    logger.warning(
        "extra_generations=%d: of %d completions of a prompt the first %d to end are trained on. Short answers end "
        "first, so the groups are biased towards them; sampling/extra/length_bias in the log says by how many tokens "
        "at least",
        count, size + count, size,
    )
