"""Sampling in several processes: each samples and scores a share of the prompts, and then all have all groups."""

from dataclasses import replace
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import Prompt
from lowmem_grpo.rollout.collector import Collector, merged
from lowmem_grpo.rollout.evaluation import Evaluation, Part
from lowmem_grpo.train.distributed import Ranks
from lowmem_grpo.types import RolloutGroup


class SharedCollector(Collector):
    """A `Collector` that draws the same prompts in each rank; with all groups, everything else is the same in each."""

    def __init__(self, ranks: Ranks, *parts: Any) -> None:
        """`parts` are those of a `Collector`."""
        self.ranks = ranks
        super().__init__(*parts)

    def take_in(self, groups: list[RolloutGroup], to_check: list[RolloutGroup]) -> None:
        """Each rank checks its own groups, and all go by the first that has found something."""
        super().take_in(groups, to_check)
        told = self.ranks.gather("the parity check", self.watched)
        self.watched = next((watched for watched in told if watched), {})
        self.parity.take_in(self.watched)

    def draw_groups(self, prompts: list[Prompt], params: SamplingParams, extra_round: int) -> list[RolloutGroup]:
        """The groups of these prompts, of which each rank samples and scores its share."""
        share = self.ranks.place.share(len(prompts))
        mine, tokens, seen = [prompts[place] for place in share], self.tokens, self.state.num_tokens
        params = replace(params, part=(share.start, len(prompts)))
        own = super().draw_groups(mine, params, extra_round) if mine else []
        told = own, self.logs[-1:] if mine else [], self.tokens - tokens, self.state.num_tokens - seen, self.watched
        parts = self.ranks.gather("what was sampled", told)
        groups = [group for part in parts for group in part[0]]
        self.logs[len(self.logs) - bool(mine) :] = [merged([log for part in parts for log in part[1]])]
        self.tokens = tokens + sum(part[2] for part in parts)
        self.state.num_tokens = seen + sum(part[3] for part in parts)
        self.watched = parts[0][4]  # of other tokens in each rank, and all decide by the same
        self.parity.take_in(self.watched)
        self.scoring.assign(groups)
        return groups


class SharedEvaluation(Evaluation):
    """An `Evaluation` of which each rank samples and scores some batches."""

    def __init__(self, ranks: Ranks, *parts: Any) -> None:
        """`parts` are those of an `Evaluation`."""
        self.ranks = ranks
        super().__init__(*parts)

    def parts(self, batches: list[list[Prompt]]) -> list[Part]:
        own = [batches[place] for place in self.ranks.place.share(len(batches))]
        return self.ranks.gather("the evaluation", self.groups_of(own))


def collector_of(ranks: Ranks, *parts: Any) -> Collector:
    """Return what collects the groups of an update, in one process or in several."""
    return SharedCollector(ranks, *parts) if ranks.count > 1 else Collector(*parts)


def evaluation_of(ranks: Ranks, *parts: Any) -> Evaluation:
    """Return what evaluates, in one process or in several."""
    return SharedEvaluation(ranks, *parts) if ranks.count > 1 else Evaluation(*parts)
