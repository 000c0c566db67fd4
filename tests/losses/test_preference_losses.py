"""Losses of preferences: against TRL's own trainers and formulas in float64, split over micro-batches, and where
exponentials overflow."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowmem_grpo.losses.preference_losses import (
    OF_DIFFERENCES,
    PAIR_LOSSES,
    PairScores,
    PreferenceSettings,
    kto_losses,
    kto_metrics,
    log_odds_ratio,
    odds_ratio_losses,
    odds_ratio_metrics,
    pair_losses,
    pair_metrics,
    ranking_losses,
    step_pairs,
    tail_weights,
)

SMOOTHING = {"exo_pair": 1e-3, "robust": 0.1, "aot": 0.2, "aot_unpaired": 0.2}
OTHER_DIVERGENCES = [("forward_kl", 0.5), ("js_divergence", 0.5), ("alpha_divergence", 0.5), ("alpha_divergence", 1.7),
                     ("alpha_divergence", 1.0)]
LENGTHS = [(5, 3), (2, 6), (4, 4), (1, 7), (6, 2), (3, 5)]  # tokens of the chosen and the rejected side of each pair


def options(*names: str, **others: Any) -> PreferenceSettings:
    smoothing = max([SMOOTHING.get(name, 0.0) for name in names])
    return PreferenceSettings(**{"loss_type": list(names), "label_smoothing": smoothing, **others})


def close(found: Any, expected: Any, most: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=most, atol=most)


class Tokens:
    """Log-probabilities of all tokens of P pairs, those of the policy with gradient: (2P, T), first the chosen sides,
    then the rejected ones, with 0 after a side's end."""

    def __init__(self, pairs: list[tuple[int, int]] = LENGTHS, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.tensor(pairs).T.flatten()
        self.mask = torch.arange(int(lengths.max())) < lengths[:, None]
        draw = torch.rand(2, *self.mask.shape, generator=generator, dtype=torch.float64).log().to(dtype)
        self.policy = torch.where(self.mask, draw[0], 0.0).requires_grad_()
        self.reference = torch.where(self.mask, draw[1], 0.0)

    def scores(self, weights: Tensor | float = 1.0, places: Any = slice(None)) -> PairScores:
        sums = [side[places] for values in (self.policy, self.reference)
                for side in (values * weights).sum(1).chunk(2)]
        counts = [side[places] for side in self.mask.sum(1).chunk(2)]
        return PairScores(*sums, *counts, plain_chosen=self.policy.sum(1).chunk(2)[0][places])

    def gradient(self, loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, self.policy)[0][self.mask]


# TRL's trainers, whose model is played by given log-probabilities


def trainer_of_trl(**values: Any) -> Any:
    """What TRL's trainers read of themselves in a loss."""
    model = torch.nn.Identity()
    model.is_gradient_checkpointing = False  # type: ignore[assignment]
    alone = SimpleNamespace(device=torch.device("cpu"), gather=lambda each: each, gather_for_metrics=lambda each: each)
    return SimpleNamespace(**{
        "accelerator": alone, "aux_loss_enabled": False, "_tp_size": 1, "_total_train_tokens": 0,
        "model": model, "precompute_ref_logps": False,
        "_metrics": {"train": defaultdict(list)}, **values})


def outputs_of_trl(tokens: Tokens, logprobs: Tensor) -> Callable[..., Any]:
    nothing = torch.zeros_like(logprobs)
    return lambda **_: SimpleNamespace(log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=tokens.mask)


def of_dpo_trainer(tokens: Tokens, settings: PreferenceSettings) -> tuple[Tensor, dict[str, float]]:
    from trl.trainer.dpo_trainer import DPOTrainer

    mask = torch.nn.functional.pad(tokens.mask.long(), (1, 0))  # prompts of one token
    trainer = trainer_of_trl(
        ref_model=outputs_of_trl(tokens, tokens.reference), loss_types=settings.loss_type, use_weighting=False,
        loss_weights=settings.loss_weights or [1.0] * len(settings.loss_type), args=settings, **{
            name: getattr(settings, name) for name in (
                "beta", "ld_alpha", "label_smoothing", "f_divergence_type", "f_alpha_divergence_coef")})
    trainer.args.gradient_checkpointing_kwargs = None  # type: ignore[attr-defined]
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    loss = DPOTrainer._compute_loss(trainer, outputs_of_trl(tokens, tokens.policy), inputs, False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def assert_as_trl(tokens: Tokens, settings: PreferenceSettings, weights: Tensor | float = 1.0) -> None:
    most = 1e-7 if tokens.policy.dtype == torch.float64 else 3e-6  # TRL has some constants in float32
    theirs, metrics = of_dpo_trainer(tokens, settings)
    scores = tokens.scores(weights)
    ours = pair_losses(scores, settings).mean()
    close(ours, theirs, most)
    close(tokens.gradient(ours), tokens.gradient(theirs), most)
    for name, values in pair_metrics(scores, settings.beta).items():
        assert values.mean().item() == pytest.approx(metrics[name], rel=1e-6), name


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_a_loss_type_would_differ_from_trls_in_value_gradient_or_metrics(name: str) -> None:
    assert_as_trl(Tokens(), options(name, beta=0.3))


@pytest.mark.parametrize(("divergence", "alpha"), OTHER_DIVERGENCES)
def test_an_f_divergence_would_differ_from_trls(divergence: str, alpha: float) -> None:
    dtype = torch.float32 if divergence == "alpha_divergence" else torch.float64  # TRL takes no float64 there
    settings = options(*sorted(OF_DIFFERENCES), f_divergence_type=divergence, label_smoothing=0.1,
                       f_alpha_divergence_coef=alpha)
    assert_as_trl(Tokens(dtype=dtype), settings)


def test_losses_of_a_list_would_be_weighed_otherwise_than_in_trl() -> None:
    assert_as_trl(Tokens(), options("sigmoid", "bco_pair", "sft", loss_weights=[0.8, 0.2, 1.0]))
    assert_as_trl(Tokens(), options("sigmoid", "hinge"))


def test_an_unusual_temperature_of_discopop_would_differ_from_trls() -> None:
    assert_as_trl(Tokens(), options("discopop", discopop_tau=0.7))


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_tokens_beyond_the_shorter_side_would_be_weighed_otherwise_than_in_trl(alpha: float) -> None:
    tokens, count = Tokens(), len(LENGTHS)
    sequence_ids = torch.arange(2 * count)[:, None].expand(tokens.mask.shape)[tokens.mask]
    flat = tail_weights(sequence_ids, torch.arange(2 * count).roll(count), alpha)
    weights = torch.zeros(tokens.mask.shape, dtype=torch.float64).masked_scatter(tokens.mask, flat.double())
    assert_as_trl(tokens, options("sigmoid", "sft", ld_alpha=alpha), weights)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("labels", [[1, 0, 0, 1, 1, 0], [1] * 6, [0] * 6])
def test_kto_would_differ_from_trls_in_value_gradient_or_metrics(loss_type: str, labels: list[int]) -> None:
    from trl.trainer.kto_trainer import KTOTrainer

    tokens, label = Tokens([(4, 2), (3, 5), (1, 6)]), torch.tensor(labels).bool()
    mask = torch.nn.functional.pad(tokens.mask.long(), (1, 0))
    played = outputs_of_trl(tokens, tokens.policy)
    ref = outputs_of_trl(tokens, tokens.reference)
    mismatched = {played: torch.full((6,), 0.9), ref: torch.full((6,), 0.2)}
    trainer = trainer_of_trl(
        loss_type=loss_type, beta=0.3, desirable_weight=1.3, undesirable_weight=0.6, ref_model=ref,
        calculate_KL=loss_type == "kto", _compute_kl_logps=lambda model, _: mismatched[model],
        args=SimpleNamespace(gradient_checkpointing_kwargs=None))
    theirs = KTOTrainer._compute_loss(
        trainer, played, {"input_ids": mask, "attention_mask": mask, "completion_mask": mask, "label": label}, False)
    sums = tokens.policy.sum(1)
    ratios = sums - tokens.reference.sum(1)
    ours = kto_losses(ratios, label, torch.tensor(0.9) - torch.tensor(0.2), loss_type=loss_type, beta=0.3,
                      desirable_weight=1.3, undesirable_weight=0.6).mean()
    close(ours, theirs)
    close(tokens.gradient(ours), tokens.gradient(theirs))
    for name, values in kto_metrics(sums, ratios, label, 0.3).items():
        metrics = trainer._metrics["train"]
        assert values.mean().item() == pytest.approx(metrics[name][-1]) if len(values) else name not in metrics, name


def test_orpos_odds_ratio_would_differ_from_trls() -> None:
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    chosen, rejected = torch.tensor([[-0.3, -2.0, -1e-3, -9.0, -0.7], [-0.9, -0.1, -5.0, -1e-3, -0.7]])
    trainer = trainer_of_trl(beta=0.2)
    theirs, rewards, other_rewards, ratio, odds = ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)
    close(odds_ratio_losses(chosen, rejected, 0.2), -theirs, 1e-4)  # TRL's are in float32
    metrics = odds_ratio_metrics(chosen, rejected, 0.2)
    close(metrics["rewards/chosen"], rewards)
    close(metrics["rewards/rejected"], other_rewards)
    close(metrics["log_odds_ratio"].mean().float(), ratio, 1e-4)
    close(metrics["log_odds_chosen"].mean().float(), odds, 1e-4)


@pytest.mark.parametrize(("margin", "center"), [(None, None), ([0.5, 2.0, 0.0], None), ([0.5, 2.0, 0.0], 0.01)])
def test_a_reward_models_loss_would_differ_from_trls(margin: list[float] | None, center: float | None) -> None:
    from trl.trainer.reward_trainer import RewardTrainer

    scores = torch.tensor([1.0, -0.5, 3.0, 0.5, 0.7, -2.0], dtype=torch.float64).requires_grad_()
    inputs: dict[str, Any] = {"attention_mask": torch.ones(6, 4)}
    margins = None if margin is None else torch.tensor(margin, dtype=torch.float64)
    trainer = trainer_of_trl(args=SimpleNamespace(center_rewards_coefficient=center))
    theirs = RewardTrainer.compute_loss(
        trainer, lambda **_: SimpleNamespace(logits=scores[:, None]),
        inputs if margins is None else {**inputs, "margin": margins})
    ours = ranking_losses(*scores.chunk(2), margins, center).mean()
    close(ours, theirs)
    close(*(torch.autograd.grad(loss, scores)[0] for loss in (ours, theirs)))


# Formulas of the papers, where TRL's code is no proof


def test_the_odds_ratio_would_not_be_that_of_the_probabilities() -> None:
    p, q = torch.tensor([0.9, 1e-3, 0.5, 0.999999], dtype=torch.float64), torch.tensor([0.2, 0.4, 0.5, 1e-9]).double()
    close(log_odds_ratio(p.log(), q.log()), torch.log((p / (1 - p)) / (q / (1 - q))), 1e-9)


def test_exo_would_not_be_the_kl_between_two_distributions_over_the_sides() -> None:
    scores, eps = Tokens().scores(), 0.05
    found = pair_losses(scores, options("exo_pair", label_smoothing=eps, beta=0.7))
    for place, loss in enumerate(found):
        ratios = torch.stack([scores.chosen[place] - scores.ref_chosen[place],
                              scores.rejected[place] - scores.ref_rejected[place]])
        q = (0.7 * ratios).softmax(0)
        close(loss, (q * (q / torch.tensor([1 - eps, eps], dtype=torch.float64)).log()).sum())


# Micro-batches


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_micro_batches_would_not_add_up_to_the_step(name: str) -> None:
    tokens, settings = Tokens(), options(name, beta=0.3)
    whole = pair_losses(tokens.scores(), settings).mean()
    step = step_pairs(tokens.scores())
    assert not any(values.requires_grad for values in vars(step).values())
    parts: list[Tensor] = []
    for places in (torch.tensor([4, 0, 1]), torch.tensor([5]), torch.tensor([3, 2])):
        parts.append(pair_losses(tokens.scores(places=places), settings, step.at(places)).sum() / len(LENGTHS))
    close(torch.stack(parts).sum(), whole)
    close(tokens.gradient(torch.stack(parts).sum()), tokens.gradient(whole))


@pytest.mark.parametrize("name", ["aot", "aot_unpaired", "sft"])
def test_losses_of_all_pairs_would_be_computed_for_each_micro_batch_alone(name: str) -> None:
    tokens, settings = Tokens(), options(name)
    alone = [pair_losses(tokens.scores(places=places), settings).sum() for places in (slice(0, 3), slice(3, 6))]
    assert abs(sum(alone).item() / 6 - pair_losses(tokens.scores(), settings).mean().item()) > 1e-4


# Extremes


FAR = [0.0, 1e-6, 30.0, 100.0, 1e4, 1e6]


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"])
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_log_ratios_however_far_would_give_losses_or_gradients_that_are_not_finite(name: str, divergence: str) -> None:
    if divergence != "reverse_kl" and name not in OF_DIFFERENCES:
        return
    far = torch.tensor([sign * value for value in FAR for sign in (1, -1)])
    chosen, rejected = (side.flatten().requires_grad_() for side in torch.meshgrid(far, far, indexing="ij"))
    nothing, lengths = torch.zeros(len(chosen)), torch.full((len(chosen),), 3)
    several: list[dict[str, Any]] = [{"f_alpha_divergence_coef": 2.5}] if divergence == "alpha_divergence" else []
    several += [{"discopop_tau": 3.0}] if name == "discopop" else []
    for others in ({}, *several):
        settings = options(name, f_divergence_type=divergence, **others)
        losses = pair_losses(PairScores(chosen, rejected, nothing, nothing, lengths, lengths), settings)
        assert losses.dtype == torch.float32 and losses.isfinite().all()
        for gradient in torch.autograd.grad(losses.sum(), [chosen, rejected], allow_unused=True):
            assert gradient is None or gradient.isfinite().all()


@pytest.mark.parametrize("name", ["sigmoid", "bco_pair", "nca_pair", "hinge", "sppo_hard"])
def test_a_pair_that_is_far_on_the_wrong_side_would_have_no_gradient(name: str) -> None:
    chosen, rejected = torch.tensor([-1e4]).requires_grad_(), torch.tensor([1e4]).requires_grad_()
    loss = pair_losses(PairScores(chosen, rejected, *[torch.zeros(1)] * 2, *[torch.ones(1)] * 2), options(name))
    first, second = torch.autograd.grad(loss.sum(), [chosen, rejected])
    assert first < -1e-2 and second > 1e-2


def test_a_nan_of_one_pair_would_spread_to_other_pairs() -> None:
    chosen = torch.tensor([math.nan, -2.0, -3.0])
    scores = PairScores(chosen, *[torch.tensor([-4.0, -5.0, -6.0])] * 3, *[torch.ones(3)] * 2)
    assert pair_losses(scores, options("sigmoid", "ipo", "apo_zero")).isnan().tolist() == [True, False, False]


def test_no_pairs_would_raise() -> None:
    scores = PairScores(*[torch.empty(0)] * 4, *[torch.empty(0, dtype=torch.long)] * 2)
    assert pair_losses(scores, options(*PAIR_LOSSES)).shape == (0,)
    assert kto_losses(torch.empty(0), torch.empty(0, dtype=torch.bool), 0.0).shape == (0,)


def test_odds_of_a_completion_that_is_certain_would_be_infinite_or_lose_their_gradient() -> None:
    sure = torch.tensor([0.0, -1e-9, -1e5, 0.0, -0.5], requires_grad=True)
    other = torch.tensor([0.0, -0.5, 0.0, -1e5, -1e-9], requires_grad=True)
    losses = odds_ratio_losses(sure, other, 0.1)
    first, second = torch.autograd.grad(losses.sum(), [sure, other])
    assert losses.isfinite().all() and first.isfinite().all() and second.isfinite().all()
    assert first[2] < 0 and second[4] > 0  # what is unlikely is raised, what is certain and wrong is lowered


def test_a_kto_log_ratio_however_far_would_give_nan() -> None:
    ratios = torch.tensor([1e6, -1e6, 1e6, -1e6], requires_grad=True)
    losses = kto_losses(ratios, torch.tensor([True, True, False, False]), torch.tensor(1e5), beta=1.0)
    close(losses, torch.tensor([0.0, 1.0, 1.0, 0.0]))
    assert torch.autograd.grad(losses.sum(), ratios)[0].isfinite().all()


# Settings


def test_a_name_alone_would_not_be_a_list_of_one() -> None:
    assert PreferenceSettings(loss_type="ipo").loss_type == ["ipo"] and PreferenceSettings().loss_type == ["sigmoid"]


def test_defaults_would_not_be_trls() -> None:
    from trl import DPOConfig

    theirs = {each.name: each.default for each in fields(DPOConfig)}
    for each in fields(PreferenceSettings):
        assert each.name == "loss_type" or theirs[each.name] == each.default, each.name


@pytest.mark.parametrize(("settings", "words"), [
    ({"loss_type": "dpo"}, "loss_type is 'dpo'; it must be one of sigmoid"),
    ({"loss_type": []}, "loss_type is ''"),
    ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "give one number for each loss"),
    ({"label_smoothing": 0.1}, "only loss_type aot, aot_unpaired, exo_pair, robust uses"),
    ({"loss_type": "exo_pair"}, "0.001 is usual"),
    ({"loss_type": "robust", "label_smoothing": 0.5}, "below 0.5"),
    ({"loss_type": "aot", "label_smoothing": 1.0}, "at least 0 and below 1"),
    ({"f_divergence_type": "tv"}, "one of reverse_kl"),
    ({"loss_type": "apo_zero", "f_divergence_type": "forward_kl"}, "take another one than 'reverse_kl'"),
    ({"f_alpha_divergence_coef": 0.3}, "only f_divergence_type alpha_divergence uses"),
    ({"discopop_tau": 0.1}, "only loss_type discopop uses"),
    ({"beta": 0.0}, "beta is 0.0; it must be above 0"), ({"ld_alpha": 1.5}, "from 0 to 1"),
    ({"loss_weights": [math.nan]}, "finite numbers"),
])
def test_wrong_or_unused_options_would_be_taken(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PreferenceSettings(**settings)
