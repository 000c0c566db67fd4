"""Losses of preferences: of pairs (DPO's loss types, ORPO, reward models) and of single completions (KTO).

    r = log p(completion) - log p_ref(completion)      sums over scored tokens; c: the chosen side's, l: the rejected's
    s = r, or f'(exp r) for another `f_divergence_type` (f-DPO, arXiv 2309.16240)

Each loss is a value per pair or completion, and a step's loss is their mean, so that micro-batches add up. What a pair
needs of the other pairs of its step is in `StepPairs`. The names are TRL's. All is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from lowmem_grpo.losses.loss_types import sequence_lengths
from lowmem_grpo.utils import FINITE, POSITIVE, SHARE, TEXTS, Rule, check_ranges, number, one_of, require, torch

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 40.0  # exponents above it count as it: squares of exp(40) and their gradients are finite in float32
NEAREST = -1e-7  # mean log-probabilities above it count as it in odds: what float32 tells from 0


@dataclass(kw_only=True)
class PreferenceSettings:
    """Options of `pair_losses`. An option that no loss of `loss_type` uses must keep its default."""

    beta: float = 0.1
    """How much log ratios count: the higher, the nearer the policy stays to the reference. The tau of "ipo"."""
    loss_type: str | list[str] = field(default_factory=lambda: ["sigmoid"])
    """One of the names of docs/preferences.md, or a list of them."""
    loss_weights: list[float] | None = None
    """The weight of each loss in a list; None: 1 each."""
    label_smoothing: float = 0.0
    """The share of pairs whose sides are thought to be swapped; for exo_pair, robust, aot and aot_unpaired."""
    ld_alpha: float | None = None
    """The weight of tokens beyond the length of the pair's shorter side (LD-DPO, arXiv 2409.06411); None: 1."""
    f_divergence_type: str = "reverse_kl"
    """The divergence from the reference: reverse_kl (DPO's), forward_kl, js_divergence or alpha_divergence."""
    f_alpha_divergence_coef: float = 0.5
    discopop_tau: float = 0.05

    RANGES: ClassVar[dict[str, Rule]] = {
        "beta": POSITIVE, "loss_type": TEXTS, "loss_weights": FINITE, "ld_alpha": SHARE, "discopop_tau": POSITIVE,
        "label_smoothing": number("at least 0 and below 1", lambda value: 0 <= value < 1),
        "f_divergence_type": one_of("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
        "f_alpha_divergence_coef": number("finite", math.isfinite),
    }

    def __post_init__(self) -> None:
        check_ranges(self)
        self.check_loss_options()

    def check_loss_options(self) -> None:
        """Make `loss_type` a list. ValueError for a name that is unknown, or an option that the losses do not use."""
        self.loss_type = [self.loss_type] if isinstance(self.loss_type, str) else [*self.loss_type]
        for name in self.loss_type or [""]:
            require("loss_type", name, one_of(*PAIR_LOSSES))
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise ValueError(f"loss_weights is {self.loss_weights}, and loss_type {self.loss_type}; give one number "
                             "for each loss")
        used, smoothing, divergence = {*self.loss_type}, self.label_smoothing, self.f_divergence_type
        if "exo_pair" in used and not smoothing:
            raise ValueError("label_smoothing is 0, of which exo_pair takes the logarithm; set it, 0.001 is usual")
        if "robust" in used and smoothing >= 0.5:
            raise ValueError(f"label_smoothing is {smoothing}, and for robust it must be below 0.5")
        if divergence != "reverse_kl" and used - OF_DIFFERENCES:
            raise ValueError(f"f_divergence_type is {divergence!r}, and loss_type {self.loss_type}; only "
                             f"{', '.join(sorted(OF_DIFFERENCES))} take another one than 'reverse_kl'")
        for name, default, user, in_use in (
            ("label_smoothing", 0.0, f"loss_type {', '.join(sorted(SMOOTHED))}", used & SMOOTHED),
            ("discopop_tau", 0.05, "loss_type discopop", "discopop" in used),
            ("f_alpha_divergence_coef", 0.5, "f_divergence_type alpha_divergence", divergence == "alpha_divergence"),
        ):
            if getattr(self, name) != default and not in_use:
                raise ValueError(f"{name} is {getattr(self, name)}, which only {user} uses; leave it out")


@dataclass(frozen=True)
class PairScores:
    """P pairs as the losses see them: sums of log-probabilities over the scored tokens of each side, (P,) each. Those
    of the policy have a gradient; with `ld_alpha`, `tail_weights` has weighed the tokens of all four."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor  # numbers of scored tokens
    rejected_tokens: Tensor
    plain_chosen: Tensor | None = None  # the policy's sums without `ld_alpha`, for "sft"; None: `chosen`


@dataclass(frozen=True)
class StepPairs:
    """What P pairs need of the other pairs of their step: values without gradient, (P,) each, of equal rank."""

    reference: Tensor  # log ref(chosen) - log ref(rejected), of the rank of the pair's own policy
    rejected: Tensor  # l of the rank of the pair's c
    chosen: Tensor  # c of the rank of the pair's l
    mean_tokens: Tensor  # (): the mean number of tokens of a chosen side

    def at(self, places: Tensor) -> StepPairs:
        """Return it for some of the step's pairs, by their places (int64)."""
        return StepPairs(self.reference[places], self.rejected[places], self.chosen[places], self.mean_tokens)


@dataclass(frozen=True)
class Ratios:
    """What the losses read, (P,) each, in float64."""

    chosen: Tensor  # beta c
    rejected: Tensor  # beta l
    logits: Tensor  # beta (s_c - s_l)
    of_tokens: Tensor  # beta (s_c / tokens - s_l / tokens), with the tokens of each side
    scores: PairScores
    step: StepPairs
    options: PreferenceSettings


def exo_pair(pairs: Ratios) -> Tensor:
    """Return KL(q || p), with q = sigmoid(logits) and p = 1 - label_smoothing."""
    right, wrong, share = logsigmoid(pairs.logits), logsigmoid(-pairs.logits), pairs.options.label_smoothing
    return right.exp() * (right - math.log1p(-share)) + wrong.exp() * (wrong - math.log(share))


def aot(pairs: Ratios) -> Tensor:
    """Compare the policy's margins between sides with the reference's margins of equal rank."""
    margins = pairs.scores.chosen.double() - pairs.scores.rejected.double() - pairs.step.reference
    return smoothed(pairs.options.beta * margins, pairs.options.label_smoothing)


def aot_unpaired(pairs: Ratios) -> Tensor:
    """Compare the chosen sides with the rejected sides of equal rank, which are those of other pairs. The value is that
    of the pair's chosen side; the gradient reaches both its sides."""
    beta, share = pairs.options.beta, pairs.options.label_smoothing
    other = smoothed(beta * pairs.step.chosen - pairs.rejected, share)
    return smoothed(pairs.chosen - beta * pairs.step.rejected, share) + other - other.detach()


def robust(pairs: Ratios) -> Tensor:
    return smoothed(pairs.logits, -pairs.options.label_smoothing / (1 - 2 * pairs.options.label_smoothing))


def smoothed(logits: Tensor, share: float) -> Tensor:
    return -(1 - share) * logsigmoid(logits) - share * logsigmoid(-logits)


def discopop(pairs: Ratios) -> Tensor:
    """Blend -log sigmoid(logits) with exp(-logits), whose share is sigmoid(logits / discopop_tau)."""
    share = pairs.logits / pairs.options.discopop_tau
    exponential = (logsigmoid(share) - pairs.logits).clamp(max=LARGEST).exp()
    return exponential - logsigmoid(pairs.logits) * torch.sigmoid(-share)


def sft(pairs: Ratios) -> Tensor:
    """Return values whose mean over the step's pairs is the mean of -log p over the tokens of all chosen sides."""
    plain = pairs.scores.plain_chosen
    return -(pairs.scores.chosen if plain is None else plain).double() / pairs.step.mean_tokens


PAIR_LOSSES: dict[str, Callable[[Ratios], Tensor]] = {
    "sigmoid": lambda pairs: -logsigmoid(pairs.logits),
    "hinge": lambda pairs: (1 - pairs.logits).clamp(min=0),
    "ipo": lambda pairs: ((pairs.of_tokens - 0.5) / pairs.options.beta).square(),
    "exo_pair": exo_pair,
    "nca_pair": lambda pairs: (-logsigmoid(pairs.chosen) - 0.5 * logsigmoid(-pairs.chosen)
                               - 0.5 * logsigmoid(-pairs.rejected)),
    "bco_pair": lambda pairs: -logsigmoid(pairs.chosen) - logsigmoid(-pairs.rejected),
    "sppo_hard": lambda pairs: (
        (pairs.chosen - 0.5).square() + (pairs.rejected + 0.5).square()) / pairs.options.beta**2,
    "robust": robust, "aot": aot, "aot_unpaired": aot_unpaired,
    "apo_zero": lambda pairs: torch.sigmoid(-pairs.chosen) + torch.sigmoid(pairs.rejected),
    "apo_down": lambda pairs: torch.sigmoid(pairs.chosen) + torch.sigmoid(pairs.rejected - pairs.chosen),
    "discopop": discopop, "sft": sft,
    "sigmoid_norm": lambda pairs: -logsigmoid(pairs.of_tokens),
}
SMOOTHED = {"exo_pair", "robust", "aot", "aot_unpaired"}  # use label_smoothing
OF_DIFFERENCES = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}


def pair_losses(scores: PairScores, options: PreferenceSettings, step: StepPairs | None = None) -> Tensor:
    """Return the weighted sum (P,) of the losses in `loss_type`. `step` has what `step_pairs` returned for the whole
    step, at these pairs; None: they are the whole step."""
    ratios, tokens = log_ratios(scores), (scores.chosen_tokens, scores.rejected_tokens)
    sides = [options.beta * score(each, options) for each in ratios]
    means = [side / count.clamp(min=1) for side, count in zip(sides, tokens, strict=True)]
    pairs = Ratios(options.beta * ratios[0], options.beta * ratios[1], sides[0] - sides[1], means[0] - means[1],
                   scores, step or step_pairs(scores), options)
    weights = options.loss_weights or [1.0] * len(options.loss_type)
    losses = [weight * PAIR_LOSSES[name](pairs) for name, weight in zip(options.loss_type, weights, strict=True)]
    return torch.stack(losses).sum(0).to(scores.chosen.dtype)


def step_pairs(scores: PairScores) -> StepPairs:
    """Return what each pair needs of the others, for all pairs of a step."""
    chosen, rejected = (ratios.detach() for ratios in log_ratios(scores))
    margins = (scores.chosen.double() - scores.rejected.double()).detach()
    reference = scores.ref_chosen.double() - scores.ref_rejected.double()
    return StepPairs(at_rank(margins, reference), at_rank(chosen, rejected), at_rank(rejected, chosen),
                     scores.chosen_tokens.double().mean())


def at_rank(values: Tensor, others: Tensor) -> Tensor:
    """Return for each of `values` (P,) the one of `others` (P,) that has the same rank."""
    return others.sort().values[values.argsort(stable=True).argsort()]


def log_ratios(scores: PairScores) -> tuple[Tensor, Tensor]:
    return scores.chosen.double() - scores.ref_chosen.double(), scores.rejected.double() - scores.ref_rejected.double()


def score(ratios: Tensor, options: PreferenceSettings) -> Tensor:
    """Return f'(exp r) (P,) of an f-divergence: (exp((alpha - 1) r) - 1) / (alpha - 1), or log(2 / (1 + exp(-r)))."""
    if options.f_divergence_type == "js_divergence":
        return math.log(2) + logsigmoid(ratios)
    power = {"reverse_kl": 0.0, "forward_kl": -1.0}.get(options.f_divergence_type, options.f_alpha_divergence_coef - 1)
    return ratios if abs(power) < 1e-6 else torch.expm1((power * ratios).clamp(max=LARGEST)) / power


def tail_weights(sequence_ids: Tensor, partners: Tensor, alpha: float) -> Tensor:
    """Return the weight (N,) of each token in its side's sum for `ld_alpha`: `alpha` beyond the length of the pair's
    shorter side. `sequence_ids` (N,) int64 ascend and number the tokens' R completions; `partners` (R,) int64 name the
    other side of each completion's pair."""
    lengths = sequence_lengths(sequence_ids, len(partners))
    ends = torch.minimum(lengths, lengths[partners]) + lengths.cumsum(0) - lengths
    places = torch.arange(len(sequence_ids), device=sequence_ids.device)
    return torch.where(places < ends[sequence_ids], 1.0, alpha)


def pair_metrics(scores: PairScores, beta: float) -> dict[str, Tensor]:
    """Return TRL's metrics as values (P,) per pair, without gradient."""
    chosen, rejected = (beta * ratios for ratios in log_ratios(scores))
    return metrics_of(chosen, rejected, scores.chosen, scores.rejected)


def metrics_of(chosen: Tensor, rejected: Tensor, chosen_logps: Tensor, rejected_logps: Tensor) -> dict[str, Tensor]:
    """Return TRL's metrics of implicit rewards and log-probabilities, (P,) each."""
    found = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected,
             "rewards/accuracies": (chosen > rejected).double(),
             "logps/chosen": chosen_logps, "logps/rejected": rejected_logps}
    return {name: values.detach() for name, values in found.items()}


def log_odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return log(odds(chosen) / odds(rejected)) (P,), in float64, of mean log-probabilities (P,). A side that is sure
    counts as nearly so, and keeps its gradient."""
    sides = (side.double() for side in (chosen, rejected))
    sides = (side - (side - side.clamp(max=NEAREST)).detach() for side in sides)
    first, second = (side - torch.log(-torch.expm1(side)) for side in sides)
    return first - second


def odds_ratio_losses(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return ORPO's odds-ratio term (P,), -beta log sigmoid(log odds ratio), of mean log-probabilities (P,). The other
    term is the mean of -log p over the chosen sides with their prompts."""
    return (-beta * logsigmoid(log_odds_ratio(chosen, rejected))).to(chosen.dtype)


def odds_ratio_metrics(chosen: Tensor, rejected: Tensor, beta: float) -> dict[str, Tensor]:
    """Return TRL's metrics as values (P,) per pair, without gradient and without nll_loss."""
    odds = log_odds_ratio(chosen.detach(), rejected.detach())
    return metrics_of(beta * chosen, beta * rejected, chosen, rejected) | {
        "log_odds_ratio": logsigmoid(odds), "log_odds_chosen": odds}


def kto_losses(
    ratios: Tensor, desirable: Tensor, kl: Tensor | float, *, loss_type: str = "kto", beta: float = 0.1,
    desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
) -> Tensor:
    """Return the losses (C,) of completions with log ratios (C,) and labels `desirable` (C,) bool. `kl` is the mean log
    ratio of the step's mismatched completions, at least 0; the `loss_type` "apo_zero_unpaired" does not use it."""
    logits = beta * (ratios.double() - (kl if loss_type == "kto" else 0.0))
    losses = torch.where(desirable, desirable_weight * torch.sigmoid(-logits),
                         undesirable_weight * torch.sigmoid(logits))
    return losses.to(ratios.dtype)


def kto_metrics(logprobs: Tensor, ratios: Tensor, desirable: Tensor, beta: float) -> dict[str, Tensor]:
    """Return TRL's metrics as values of the completions of each kind, without gradient. "rewards/margins" is the
    difference of their means over the step."""
    found = {"rewards": beta * ratios.detach(), "logps": logprobs.detach()}
    return {f"{name}/{kind}": values[of_kind] for name, values in found.items()
            for kind, of_kind in (("chosen", desirable), ("rejected", ~desirable))}


def ranking_losses(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, center_rewards_coefficient: float | None = None,
) -> Tensor:
    """Return a reward model's losses (P,) for both sides' scores (P,): -log sigmoid(difference - margin), and, to keep
    scores around 0, the coefficient times the square of their sum."""
    chosen, rejected, dtype = chosen.double(), rejected.double(), chosen.dtype
    losses = -logsigmoid(chosen - rejected - (0.0 if margin is None else margin))
    return (losses + (center_rewards_coefficient or 0.0) * (chosen + rejected).square()).to(dtype)


def logsigmoid(values: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(values)
