"""The objectives of training on preferences: what a micro-batch of pairs or labelled completions adds to the loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.config.preferences import DPOConfig, KTOConfig, ORPOConfig
from lowmem_grpo.losses.objective import Objective, PolicyOutputs, Reducer, StepTotals
from lowmem_grpo.losses.preference_losses import (
    PairScores,
    StepPairs,
    kto_losses,
    kto_metrics,
    odds_ratio_losses,
    odds_ratio_metrics,
    pair_losses,
    pair_metrics,
    step_pairs,
    tail_weights,
)
from lowmem_grpo.types import TOKEN_FIELDS, LossOutput, MicroBatch, Rollout, RolloutGroup, TokenField

REFERENCE, OLD = TOKEN_FIELDS["ref_logprobs"], TOKEN_FIELDS["old_logprobs"]
NEXT_PROMPT = "next_prompt"  # a field of KTO's rollouts: the prompt of the next row of the step
COMPARING = {"aot", "aot_unpaired"}  # losses that need the policy's log-probabilities of all pairs of the step


@dataclass(frozen=True)
class Sides:
    """The two sides of P whole pairs among R completions, by their indices."""

    chosen: Tensor  # (P,) int64
    rejected: Tensor  # (P,) int64
    pairs: Tensor  # (P,) int64 on the host, the pair's number in its step

    @classmethod
    def of(cls, places: Sequence[int], device: torch.device) -> "Sides":
        """Return the sides of completions whose places in the step are 2 * pair, or 2 * pair + 1 if rejected."""
        order = sorted(range(len(places)), key=places.__getitem__)
        both = [*zip_longest(order[0::2], order[1::2], fillvalue=-1)]
        if any(places[one] % 2 or places[one] + 1 != places[other] for one, other in both):
            raise RuntimeError("the sides of a pair are in two micro-batches, and its loss compares them; give both "
                               "rollouts of a group the same `unit`")
        chosen, rejected = torch.tensor(both, device=device).T
        return cls(chosen, rejected, torch.tensor([places[one] // 2 for one, _ in both]))

    def of_chosen(self, sequences: Tensor) -> Tensor:
        """Return a mask (N,) of the tokens of chosen sides; `sequences` (N,) are the tokens' completions."""
        return torch.isin(sequences, self.chosen)

    def scores(self, logprobs: Tensor, reference: Tensor, sequences: Tensor, alpha: float | None) -> PairScores:
        """Return the sums of log-probabilities (N,), with the weight `alpha` (`ld_alpha`) of the longer side's rest."""
        count, plain = 2 * len(self.pairs), None
        tokens = summed(torch.ones_like(logprobs), sequences, count)
        if alpha is not None:
            plain = summed(logprobs, sequences, count)[self.chosen]
            partners = torch.empty(count, dtype=torch.long, device=sequences.device)
            partners[self.chosen], partners[self.rejected] = self.rejected, self.chosen
            weights = tail_weights(sequences, partners, alpha)
            logprobs, reference = logprobs * weights, reference * weights
        own, other = (summed(values, sequences, count) for values in (logprobs, reference))
        chosen, rejected = self.chosen, self.rejected
        return PairScores(own[chosen], own[rejected], other[chosen], other[rejected], tokens[chosen], tokens[rejected],
                          plain)


def summed(values: Tensor, sequences: Tensor, count: int) -> Tensor:
    """Return the sums of values (N,) of each of `count` completions, in float64; `sequences` (N,) are their numbers."""
    return values.new_zeros(count, dtype=torch.float64).index_add(0, sequences, values.double())


def joined(rollouts: Sequence[Rollout], name: str) -> Tensor:
    """Return the rollouts' field `name` at their trained tokens, one after the other, (N,)."""
    return torch.cat([rollout.at_trained(TOKEN_FIELDS[name].of(rollout)) for rollout in rollouts])


def means(values: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the means of values (n,), and how many there are; without those of which there are none."""
    values = {name: each.detach().float() for name, each in values.items() if len(each)}
    return {name: each.mean() for name, each in values.items()}, {name: len(each) for name, each in values.items()}


class PreferenceObjective(Objective):
    """What the objectives of preferences share: the place of each completion in its step, and the reference's
    log-probabilities, which stay the same for a row while the reference does."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.places: dict[int, int] = {}  # by the id of the rollout
        self.known = False  # True: all rollouts of the update have the reference's log-probabilities

    def start_update(self, rollouts: list[Rollout], policy_version: int) -> None:
        self.known = not self.config.sync_ref_model and all(row.ref_logprobs is not None for row in rollouts)

    def needed_before(self, optimizer_steps: int) -> tuple[TokenField, ...]:
        return () if self.known else (REFERENCE,)

    def prepared(self, rollouts: list[Rollout], groups: Sequence[RolloutGroup] = ()) -> None:
        self.places = {id(rollout): place for place, rollout in enumerate(rollouts)}

    def sides(self, batch: MicroBatch) -> Sides:
        return Sides.of([self.places[id(rollout)] for rollout in batch.rollouts], batch.trained.device)


class PairObjective(PreferenceObjective):
    """DPO's losses: the mean over all pairs of the step."""

    config: DPOConfig

    def needed_before(self, optimizer_steps: int) -> tuple[TokenField, ...]:
        compares = bool(COMPARING & {*self.config.loss_type})
        return (*super().needed_before(optimizer_steps), *((OLD,) if compares else ()))

    def prepared(self, rollouts: list[Rollout], groups: Sequence[RolloutGroup] = ()) -> None:
        """Compute what each pair needs of the others."""
        super().prepared(rollouts, groups)
        sides = Sides.of(range(len(rollouts)), torch.device("cpu"))
        lengths = torch.tensor([rollout.num_trained for rollout in rollouts])
        sequences, reference = torch.arange(len(rollouts)).repeat_interleave(lengths), joined(rollouts, "ref_logprobs")
        own = joined(rollouts, "old_logprobs") if OLD in self.needed_before(1) else reference
        self.step = step_pairs(sides.scores(own, reference, sequences, self.config.ld_alpha))

    def loss(self, batch: MicroBatch, outputs: PolicyOutputs, totals: StepTotals) -> LossOutput:
        sides, sequences = self.sides(batch), batch.at_trained(batch.sequence_ids)
        reference = batch.at_trained(batch.fields["ref_logprobs"])
        scores = sides.scores(outputs.logprobs, reference, sequences, self.config.ld_alpha)
        step = {name: value.to(sequences.device) for name, value in vars(self.step.at(sides.pairs)).items()}
        losses = pair_losses(scores, self.config, StepPairs(**step))
        measured = pair_metrics(scores, self.config.beta) | {
            "entropy": outputs.entropy(), "mean_token_accuracy": outputs.hits[sides.of_chosen(sequences)]}
        return LossOutput(losses.sum() / totals.units, *means(measured))


class OddsRatioObjective(PreferenceObjective):
    """ORPO's loss: the mean of -log p over the tokens of all chosen rows, and that of the odds ratio over all pairs."""

    config: ORPOConfig

    def start_update(self, rollouts: list[Rollout], policy_version: int) -> None:
        self.known = True  # there is no reference

    def prepared(self, rollouts: list[Rollout], groups: Sequence[RolloutGroup] = ()) -> None:
        super().prepared(rollouts, groups)
        self.chosen_tokens = sum(len(group.prompt_ids) - 1 + group.rollouts[0].num_trained for group in groups)

    def loss(self, batch: MicroBatch, outputs: PolicyOutputs, totals: StepTotals) -> LossOutput:
        sides, sequences, logprobs = self.sides(batch), batch.at_trained(batch.sequence_ids), outputs.logprobs
        of_prompts, count = batch.of_prompts, len(batch.rollouts)
        answers = sequences[~of_prompts]
        sums = summed(logprobs[~of_prompts], answers, count) / torch.bincount(answers, minlength=count)
        chosen, rejected = sums[sides.chosen], sums[sides.rejected]
        likelihoods = -logprobs[of_prompts | sides.of_chosen(sequences)]
        odds = odds_ratio_losses(chosen, rejected, self.config.beta).sum() / totals.units
        measured = odds_ratio_metrics(chosen, rejected, self.config.beta) | {"nll_loss": likelihoods}
        return LossOutput(likelihoods.sum() / self.chosen_tokens + odds, *means(measured))


class LabelledObjective(PreferenceObjective):
    """KTO's losses: the mean over all rows of the step, with the KL term of all of them."""

    config: KTOConfig

    def __init__(self, config: KTOConfig, longest: int) -> None:
        """`longest` is the limit on the tokens of a sequence."""
        super().__init__(config)
        self.longest = longest
        own = TokenField("mismatched_logprobs", value=attrgetter("logprobs"), behind=self.mismatched)
        self.mismatches = (own, replace(own, name="mismatched_reference", under=methodcaller("reference")))
        self.kl = torch.zeros(())

    def needed_before(self, optimizer_steps: int) -> tuple[TokenField, ...]:
        return (*super().needed_before(optimizer_steps), *(self.mismatches if self.config.loss_type == "kto" else ()))

    def mismatched(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Return groups with the completions of `groups`, each behind the prompt of its step's next row."""
        made = []
        for group in groups:
            (rollout,), prompt = group.rollouts, group.rollouts[0].fields[NEXT_PROMPT]
            ids = rollout.completion_ids[: self.longest - len(prompt)]
            made.append(RolloutGroup(group.row, prompt, [Rollout(ids, [0.0] * len(ids), rollout.finish_reason)]))
        return made

    def prepared(self, rollouts: list[Rollout], groups: Sequence[RolloutGroup] = ()) -> None:
        """Compute the KL term of the step."""
        super().prepared(rollouts, groups)
        if self.config.loss_type == "kto":
            own, reference = ([field.of(rollout).double().sum() for rollout in rollouts] for field in self.mismatches)
            self.kl = (torch.stack(own) - torch.stack(reference)).mean().clamp(min=0)

    def loss(self, batch: MicroBatch, outputs: PolicyOutputs, totals: StepTotals) -> LossOutput:
        config, sequences, count = self.config, batch.at_trained(batch.sequence_ids), len(batch.rollouts)
        own, reference = (summed(values, sequences, count) for values in (
            outputs.logprobs, batch.at_trained(batch.fields["ref_logprobs"])))
        desirable = torch.tensor([rollout.fields["label"] == 1 for rollout in batch.rollouts], device=sequences.device)
        kl = self.kl.to(sequences.device)
        losses = kto_losses(own - reference, desirable, kl, loss_type=config.loss_type, beta=config.beta,
                            desirable_weight=config.desirable_weight, undesirable_weight=config.undesirable_weight)
        measured = kto_metrics(own, own - reference, desirable, config.beta) | {
            "entropy": outputs.entropy(), "kl": kl.expand(count)}
        return LossOutput(losses.sum() / totals.sequences, *means(measured))

    def measured(self, reducer: Reducer) -> dict[str, float]:
        found = super().measured(reducer)
        if {"rewards/chosen", "rewards/rejected"} <= found.keys():
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found
