"""Where TRL 1.16 and we differ, by design or because TRL is wrong: TRL's value, the reason, and ours against float64.

The formulas here stand on their own: every completion by itself in float64, no code of TRL's or ours.
"""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from parity_runs import Exact, OurRun, both, difference, our_run, stale
from tables import every_row
from torch import Tensor
from trl_runs import END, TrlRun, make_trainer, random_rollouts

from lowmem_grpo import GRPOConfig
from lowmem_grpo.losses.advantages import AdvantageSettings
from lowmem_grpo.losses.loss_settings import LossSettings

pytestmark = pytest.mark.filterwarnings("ignore:.*(rollout_func|supports vLLM).*")

TOLERANCE = 1e-5  # ours against float64
APART = 1e-2  # at least, TRL's from float64
LOW, HIGH = 0.1, 0.15
CLIPPED = {"epsilon": LOW, "epsilon_high": HIGH}
ROLLOUTS = random_rollouts()


def rows(values: list[list[float]]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in values]


def clipped(exact: Exact, old: list[Tensor], advantages: list[float]) -> list[Tensor]:
    """-min(w A, clip(w) A) of each token, (C,) of each completion."""
    found = []
    for new, before, advantage in zip(exact.logprobs, old, advantages, strict=True):
        weight = (new - before).exp()
        found.append(-torch.min(weight * advantage, weight.clamp(1 - LOW, 1 + HIGH) * advantage))
    return found


def mean_over_tokens(values: list[Tensor]) -> Tensor:
    return torch.cat(values).mean()


def mean_over_micro_batches(values: list[Tensor]) -> Tensor:
    """The mean of the means of three micro-batches."""
    return torch.stack([mean_over_tokens(values[at : at + 4]) for at in (0, 4, 8)]).mean()


def assert_ours(ours: OurRun, exact: Exact, loss: Tensor) -> None:
    """Loss and gradients are the formula's."""
    assert ours.loss == pytest.approx(loss.item(), rel=TOLERANCE, abs=3e-6)
    assert difference(ours.gradients, exact.gradients(loss)) <= TOLERANCE


def assert_trl_apart(theirs: TrlRun, exact: Exact, loss: Tensor) -> None:
    """TRL's gradient is another one."""
    assert difference(theirs.gradients, exact.gradients(loss)) > APART


@pytest.mark.parametrize(("settings", "bonus"), [({"loss_type": "bnpo"}, 0.0), ({"entropy_coef": 0.3}, 0.3)], ids=str)
def test_bnpo_and_the_entropy_bonus_are_means_over_the_step_and_over_each_micro_batch_in_trl(
    settings: dict[str, Any], bonus: float
) -> None:
    rollouts, old = stale(ROLLOUTS)
    theirs, ours = both(rollouts, old_logprobs=old, micro_batches=3, **settings, **CLIPPED)
    exact = Exact(theirs.trainer.model, rollouts)
    tokens = clipped(exact, rows(old), ours.advantages)
    loss = mean_over_tokens(tokens) - bonus * mean_over_tokens(exact.entropy)
    assert_ours(ours, exact, loss)
    assert_trl_apart(theirs, exact, loss)
    policy = mean_over_tokens(tokens) if bonus else mean_over_micro_batches(tokens)  # that of dapo is over the step
    of_trl = policy - bonus * mean_over_micro_batches(exact.entropy)
    assert float(theirs.loss) == pytest.approx(of_trl.item(), rel=TOLERANCE, abs=3e-6)


def test_the_tokens_of_highest_entropy_are_those_of_the_step_and_of_each_micro_batch_in_trl() -> None:
    rollouts, old = stale(ROLLOUTS)
    theirs, ours = both(rollouts, old_logprobs=old, micro_batches=3, top_entropy_quantile=0.3, **CLIPPED)
    exact = Exact(theirs.trainer.model, rollouts)
    entropy = torch.cat(exact.entropy).detach()
    chosen = entropy >= entropy.quantile(0.7)
    loss = (torch.cat(clipped(exact, rows(old), ours.advantages)) * chosen).sum() / len(entropy)
    assert_ours(ours, exact, loss)
    assert_trl_apart(theirs, exact, loss)


def gmpo_terms(exact: Exact, old: list[Tensor], advantages: list[float]) -> list[Tensor]:
    """-exp(mean of the clipped log ratio) A of each completion, a scalar each; epsilon is 0.4 on both sides."""
    found = []
    for new, before, advantage in zip(exact.logprobs, old, advantages, strict=True):
        ratio = new - before
        bounded = ratio.clamp(max=0.4) if advantage > 0 else ratio.clamp(min=-0.4)
        found.append(-bounded.mean().exp() * advantage)
    return found


def kl_terms(exact: Exact) -> list[Tensor]:
    """k3 of each token against the model without its adapter."""
    apart = [reference - new for new, reference in zip(exact.logprobs, exact.reference, strict=True)]
    return [d.exp() - d - 1 for d in apart]


def gmpo_with_option(name: str, exact: Exact, terms: list[Tensor], old: list[Tensor], sampled: list[Tensor],
                     advantages: list[float]) -> Tensor:
    """The formula of GMPO with one option in effect, which TRL's GMPOTrainer takes and leaves out."""
    new = exact.logprobs
    if name == "entropy_coef":
        return torch.stack(terms).mean() - 0.3 * mean_over_tokens(exact.entropy)
    if name == "off_policy_mask_threshold":
        drift = [(s - n).mean().item() for s, n in zip(sampled, new, strict=True)]
        kept = [float(a >= 0 or d <= 0.05) for a, d in zip(advantages, drift, strict=True)]
        assert 0 < sum(kept) < len(kept)
        return torch.stack([k * term for k, term in zip(kept, terms, strict=True)]).mean()
    if name == "correction":
        weights = [(o - s).exp().clamp(max=2.0).mean() for o, s in zip(old, sampled, strict=True)]
        return torch.stack([w * term for w, term in zip(weights, terms, strict=True)]).mean()
    ratios = [(n - o).exp() for n, o in zip(new, old, strict=True)]
    kl = [(r * k).mean() for r, k in zip(ratios, kl_terms(exact), strict=True)]
    return (torch.stack(terms) + 0.2 * torch.stack(kl)).mean()


GMPO_OPTIONS: dict[str, dict[str, Any]] = {
    "entropy_coef": {"entropy_coef": 0.3}, "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.05},
    "correction": {"correction": True, "vllm_importance_sampling_mode": "token_truncate",
                   "vllm_importance_sampling_clip_max": 2.0},
    "use_bias_correction_kl": {"beta": 0.2, "use_bias_correction_kl": True},
}


@pytest.mark.parametrize("option", GMPO_OPTIONS)
@pytest.mark.every(2)
def test_gmpo_takes_options_here_that_trls_trainer_of_it_leaves_out_in_silence(option: str) -> None:
    rollouts, old = stale(ROLLOUTS)
    settings = GMPO_OPTIONS[option]
    theirs, ours = both(rollouts, old_logprobs=old, loss_type="gmpo", **settings)
    without = {"beta": 0.2, "use_bias_correction_kl": False} if option == "use_bias_correction_kl" else {}
    unchanged, _ = both(rollouts, old_logprobs=old, loss_type="gmpo", **without)
    assert float(theirs.loss) == float(unchanged.loss)
    exact = Exact(theirs.trainer.model, rollouts)
    terms = gmpo_terms(exact, rows(old), ours.advantages)
    loss = gmpo_with_option(option, exact, terms, rows(old), rows(rollouts.rollout_logprobs), ours.advantages)
    assert_ours(ours, exact, loss)
    assert_trl_apart(theirs, exact, loss)


def test_gmpo_leaves_masked_completions_out_of_the_loss_and_trl_adds_a_constant_for_them() -> None:
    rollouts, old = stale(ROLLOUTS)
    theirs, ours = both(rollouts, old_logprobs=old, loss_type="gmpo", mask_truncated_completions=True)
    exact = Exact(theirs.trainer.model, rollouts)
    masked = torch.tensor([ids[-1] != END for ids in rollouts.completion_ids])
    terms = torch.stack(gmpo_terms(exact, rows(old), ours.advantages))
    loss = terms.masked_fill(masked, 0.0).mean()
    assert_ours(ours, exact, loss)
    assert difference(theirs.gradients, exact.gradients(loss)) <= TOLERANCE  # a constant has no gradient
    constant = -torch.tensor(ours.advantages)[masked].sum() / len(terms)
    assert float(theirs.loss) == pytest.approx((loss + constant).item(), abs=3e-6) and abs(constant) > APART


def test_cispo_with_trls_default_bound_shrinks_gradients_on_policy_to_a_fifth_and_is_refused_here() -> None:
    theirs, ours = both(ROLLOUTS, loss_type="cispo", ours={"epsilon_high": None})  # TRL's: epsilon, which is 0.2
    exact = Exact(theirs.trainer.model, ROLLOUTS)
    weighed = [-advantage * new for advantage, new in zip(ours.advantages, exact.logprobs, strict=True)]
    assert_ours(ours, exact, mean_over_tokens(weighed))
    assert difference(theirs.gradients, exact.gradients(0.2 * mean_over_tokens(weighed))) <= TOLERANCE
    with pytest.raises(ValueError, match="below 1 it would shrink every gradient"):
        GRPOConfig(loss_type="cispo", epsilon_high=0.2)


def test_loss_metrics_are_over_trained_tokens_here_and_over_all_in_trl() -> None:
    """Without a KL term, completions of a group without spread need no forward pass, and have none."""
    equal = replace(ROLLOUTS, rewards={"reward": [0.5] * 4 + ROLLOUTS.rewards["reward"][4:]})
    rollouts, old = stale(equal)
    theirs, ours = both(rollouts, old_logprobs=old, **CLIPPED)
    exact = Exact(theirs.trainer.model, rollouts)
    trained = mean_over_tokens(exact.entropy[4:]).item()
    assert ours.metrics["entropy"] == pytest.approx(trained, rel=TOLERANCE)
    assert theirs.metrics["entropy"] == pytest.approx(mean_over_tokens(exact.entropy).item(), rel=TOLERANCE)
    share = sum(rollouts.lengths[4:]) / sum(rollouts.lengths)
    for name in ("low_mean", "high_mean", "region_mean"):
        expected = theirs.metrics[f"clip_ratio/{name}"] / share
        assert ours.metrics[f"clip_ratio/{name}"] == pytest.approx(expected, rel=TOLERANCE) and expected > 0
    assert_ours(ours, exact, mean_over_tokens(clipped(exact, rows(old), ours.advantages)))
    assert difference(ours.gradients, theirs.gradients) <= TOLERANCE  # the gradient is the same


def test_a_group_without_spread_has_exactly_no_advantage_here_and_noise_in_trl() -> None:
    rollouts = random_rollouts(prompts=2, num_generations=6)
    equal = replace(rollouts, rewards={"reward": [0.9] * 6 + rollouts.rewards["reward"][6:]})
    theirs, ours = both(equal, ours={"num_generations": 6})
    assert ours.advantages[:6] == [0.0] * 6
    assert theirs.batch["advantages"][:6].abs().max() > 1e-4


@pytest.mark.parametrize("scale", [{"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}],
                         ids=str)
def test_groups_without_spread_are_counted_here_and_in_trl_only_where_the_scale_is_the_groups(
    scale: dict[str, Any]
) -> None:
    """TRL asks whether the scale that it divides by is 0, which for that of the batch is so for all or for none."""
    equal = replace(ROLLOUTS, rewards={"reward": [0.5] * 4 + ROLLOUTS.rewards["reward"][4:]})
    theirs, ours = both(equal, **scale)
    assert theirs.metrics["frac_reward_zero_std"] == 0
    assert ours.metrics["frac_reward_zero_std"] == pytest.approx(1 / 3)


def test_the_spread_of_one_reward_is_0_here_and_not_a_number_in_trl() -> None:
    rewards = {"all": ROLLOUTS.rewards["reward"], "one": [None] * 11 + [1.0], "none": [None] * 12}
    theirs, ours = both(replace(ROLLOUTS, rewards=rewards))
    assert ours.metrics["rewards/one/std"] == 0 and math.isnan(theirs.metrics["rewards/one/std"])
    assert "rewards/none/mean" not in ours.metrics and math.isnan(theirs.metrics["rewards/none/mean"])
    assert ours.advantages == pytest.approx(theirs.batch["advantages"].tolist(), rel=TOLERANCE, abs=1e-6)


def test_metrics_are_of_the_step_here_and_means_over_micro_batches_in_trl() -> None:
    rollouts, old = stale(ROLLOUTS)
    theirs, ours = both(rollouts, old_logprobs=old, micro_batches=3, beta=0.05, entropy_coef=0.1,
                        use_bias_correction_kl=False, **CLIPPED)
    exact = Exact(theirs.trainer.model, rollouts)
    kl, policy = kl_terms(exact), clipped(exact, rows(old), ours.advantages)
    weight = [(new - before).exp() for new, before in zip(exact.logprobs, rows(old), strict=True)]
    above = [(w > 1 + HIGH).double() * (a > 0) for w, a in zip(weight, ours.advantages, strict=True)]
    tokens = {"kl": kl, "entropy": exact.entropy, "clip_ratio/high_mean": above}
    for name, values in tokens.items():
        assert theirs.metrics[name] == pytest.approx(mean_over_micro_batches(values).item(), rel=TOLERANCE), name
        assert ours.metrics[name] == pytest.approx(mean_over_tokens(values).item(), rel=TOLERANCE), name
    for name in ("kl", "clip_ratio/high_mean"):
        assert ours.metrics[name] != pytest.approx(theirs.metrics[name], rel=1e-3), name
    loss = (mean_over_tokens(policy) + 0.05 * mean_over_tokens(kl)).item()
    assert ours.metrics["policy_loss"] == pytest.approx(loss, rel=TOLERANCE)
    assert theirs.metrics["policy_loss"] == pytest.approx(loss / 3, rel=TOLERANCE)  # of dapo: a third of the loss


@pytest.mark.parametrize("loss_type", ["gspo", "vespo"])
def test_metrics_over_sequences_leave_masked_ones_out_here_and_count_them_in_trl(loss_type: str) -> None:
    """In TRL a masked completion counts as a sequence whose ratio is 1."""
    rollouts, old = stale(ROLLOUTS)
    theirs, ours = both(rollouts, old_logprobs=old, loss_type=loss_type, mask_truncated_completions=True)
    masked = sum(ids[-1] != END for ids in rollouts.completion_ids)
    total = len(rollouts.completion_ids)
    name, of_ones = ("vespo/phi_seq_mean", 1.0) if loss_type == "vespo" else ("clip_ratio/high_mean", 0.0)
    with_them = (ours.metrics[name] * (total - masked) + of_ones * masked) / total
    assert theirs.metrics[name] == pytest.approx(with_them, rel=TOLERANCE)
    assert ours.metrics[name] != pytest.approx(theirs.metrics[name], rel=1e-2)


def test_the_sampler_is_the_measure_of_the_off_policy_mask_whatever_the_sampler() -> None:
    """TRL takes the old policy's log-probabilities where its sampler is not vLLM; ours always gives its own."""
    rollouts, old = stale(ROLLOUTS)
    settings = {"off_policy_mask_threshold": 0.2, **CLIPPED}
    theirs, _ = both(replace(rollouts, rollout_logprobs=None), old_logprobs=old, **settings)
    ours = our_run(theirs.trainer.model, rollouts, old, **settings)
    exact = Exact(theirs.trainer.model, rollouts)

    def masked_by(reference: list[Tensor]) -> Tensor:
        kept = [float(advantage >= 0 or (before - new).mean() <= 0.2) for before, new, advantage in
                zip(reference, exact.logprobs, ours.advantages, strict=True)]
        tokens = clipped(exact, rows(old), ours.advantages)
        return mean_over_tokens([k * values for k, values in zip(kept, tokens, strict=True)])

    assert_ours(ours, exact, masked_by(rows(rollouts.rollout_logprobs)))
    assert difference(theirs.gradients, exact.gradients(masked_by(rows(old)))) <= TOLERANCE
    assert_trl_apart(theirs, exact, masked_by(rows(rollouts.rollout_logprobs)))


SEQUENCE = {"importance_sampling_level": "sequence"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a mask over tokens of sequences": ({"top_entropy_quantile": 0.5} | SEQUENCE, "one ratio for all tokens"),
    "a correction that masks tokens of sequences": (
        {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_mask"} | SEQUENCE,
        "one ratio for all tokens"),
    "a level that vespo has not": ({"loss_type": "vespo"} | SEQUENCE, "does not use it"),
    "clipping that sapo has not": ({"loss_type": "sapo", "epsilon": 0.1}, "does not use it"),
    "a two-sided bound inside of the clip": ({"delta": 1.1}, "must be above 1 \\+ epsilon_high"),
    "scales of GDPO": ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch"},
                       "does not use"),
}


@every_row("what", REFUSED)
def test_what_trl_takes_and_leaves_out_or_breaks_up_is_refused_by_name(what: str) -> None:
    settings, words = REFUSED[what]
    make_trainer(ROLLOUTS, settings=settings)
    with pytest.raises(ValueError, match=words):
        GRPOConfig(**settings)


DEFAULTS = {  # of a field with the same name: (TRL's, ours)
    "vllm_importance_sampling_mode": ("sequence_mask", "token_truncate"),  # no completion is lost for its length
    "vllm_importance_sampling_clip_max": (3.0, 2.0),
    "vllm_importance_sampling_correction": (True, None),  # where sampler and trainer were seen to differ
}


def test_defaults_are_trls_but_for_those_listed() -> None:
    """None is the loss type's own default here."""
    theirs, ours = make_trainer(ROLLOUTS).args, GRPOConfig()
    names = {field.name for kind in (LossSettings, AdvantageSettings) for field in fields(kind)}
    shared = [name for name in names if hasattr(theirs, name)]
    resolved = {"scale_rewards": ours.scale} | {k: v for k, v in ours.chosen().items() if k != "epsilon_high"}
    for loss_type in ("sapo", "vespo"):
        resolved |= GRPOConfig(loss_type=loss_type).chosen()
    own = {name: resolved.get(name, getattr(ours, name)) for name in shared}
    different = {name: (getattr(theirs, name), own[name]) for name in shared if getattr(theirs, name) != own[name]}
    different.pop("max_completion_length")  # what these runs are made with
    assert different == DEFAULTS
