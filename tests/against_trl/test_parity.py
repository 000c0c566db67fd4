"""Loss, metrics and gradients against real TRL 1.16, on the same weights, completions and rewards. Every combination of
settings is compared in float64: in float32 the model's own rounding, which each processor does in its own order, is
magnified by ratios of whole sequences and hides small mistakes. tests/losses says what float32 may add.

Where TRL differs, by design or by mistake, see test_differences.py.
"""

import itertools
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_runs import (
    OurRun,
    both,
    difference,
    gradients,
    our_groups,
    our_learner,
    our_step,
    our_trainer,
    stale,
    theirs,
    trl_steps,
)
from tables import pairwise
from trl_runs import END, Rollouts, TrlRun, make_trainer, prepare, random_rollouts, window

from lowmem_grpo import GRPOConfig
from lowmem_grpo.losses.advantages import assign_advantages
from lowmem_grpo.losses.loss_types import LOSS_TYPES

pytestmark = pytest.mark.filterwarnings("ignore:.*(rollout_func|supports vLLM).*")

Case = dict[str, Any]
TOLERANCE = 1e-5  # relative
FLOOR = 3e-6  # what float32 leaves of sums whose terms, up to 10 each, cancel
CLIPPED = {"epsilon": 0.1, "epsilon_high": 0.15}
OPTIONS: dict[str, Case] = {  # each loss type's own, so that its bounds are crossed
    "grpo": CLIPPED, "bnpo": CLIPPED, "dr_grpo": CLIPPED, "dapo": CLIPPED, "luspo": CLIPPED, "gspo": {},
    "cispo": {"epsilon_high": 5.0}, "sapo": {"sapo_temperature_neg": 1.2, "sapo_temperature_pos": 0.9},
    "vespo": {"vespo_k_pos": 1.5, "vespo_lambda_neg": 2.5}, "gmpo": {"epsilon": 0.3, "epsilon_high": 0.4},
}
SCALES: tuple[Case, ...] = (
    {"scale_rewards": "group"}, {"scale_rewards": "batch"}, {"scale_rewards": "none"},
    {"multi_objective_aggregation": "normalize_then_sum"},
)
BETAS: tuple[Case, ...] = (
    {}, {"beta": 0.05, "use_bias_correction_kl": True}, {"beta": 0.05, "use_bias_correction_kl": False},
)
BOUNDS = {"vllm_importance_sampling_clip_min": 0.7, "vllm_importance_sampling_clip_max": 2.0}
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CORRECTED: tuple[Case, ...] = (
    {}, *({"correction": True, "vllm_importance_sampling_mode": mode, **BOUNDS} for mode in MODES),
)
ROLLOUTS = random_rollouts()
TWO_REWARDS = {
    "exact": [0.0, 1.0, None, 1.0, None, 0.5, 2.0, 0.0, 1.0, 0.0, 0.0, 3.0],
    "close": [0.3, None, None, 0.1, 0.7, 0.2, 0.9, None, 0.4, 0.6, 0.5, 0.8],
}


def possible(loss_type: str, beta: Case, level: str, delta: float | None, correction: Case, **_: Any) -> bool:
    """Whether TRL and we have this combination; masks over tokens are refused with one ratio for a completion."""
    options = LOSS_TYPES[loss_type].options
    if loss_type == "gmpo" and (correction or beta == BETAS[1]):
        return False
    if (level == "sequence" and "importance_sampling_level" not in options) or (delta and "delta" not in options):
        return False
    whole = level == "sequence" or loss_type in ("gspo", "gmpo")
    return not (whole and correction.get("vllm_importance_sampling_mode") == "token_mask")


def case_of(loss_type: str, scale: Case, beta: Case, level: str, delta: float | None, correction: Case) -> Case:
    case = {"loss_type": loss_type} | OPTIONS[loss_type] | scale | beta | correction
    if level == "sequence":
        case["importance_sampling_level"] = level
        if loss_type == "cispo":
            case["epsilon_high"] = 1.1  # its bound of 5 is one for tokens, which no mean over a sequence reaches
    return case | ({"delta": delta} if delta else {})


def covering() -> list[Case]:
    """Every two settings meet in some case; with dapo, whose formula four others share, each pair of the others too."""
    rows = [pairwise(possible, loss_type=types, scale=SCALES, beta=BETAS, level=("token", "sequence"),
                     delta=(None, 1.25), correction=CORRECTED)[1] for types in (OPTIONS, ("dapo",))]
    cases = [case_of(*row.values) for row in itertools.chain(*rows)]
    return [case for number, case in enumerate(cases) if case not in cases[:number]]


EXTRAS: dict[str, Case] = {
    "on_policy": {}, "top_entropy": {"top_entropy_quantile": 0.5}, "entropy_bonus": {"entropy_coef": 0.05},
    "off_policy_mask": {"off_policy_mask_threshold": 0.05}, "truncated": {"mask_truncated_completions": True},
    "some_rewards": {"reward_weights": [1.0, 0.5]}, "temperature": {"temperature": 0.7},
}
NOT_IN_GMPO = {"top_entropy", "entropy_bonus", "off_policy_mask", "truncated"}  # test_differences.py


def extras() -> list[tuple[str, tuple[str, ...]]]:
    """Every two extras, and each with every loss type, on, off, and one of both; with one loss type each alone too."""
    def usable(loss_type: str, **used: bool) -> bool:
        unused = NOT_IN_GMPO if loss_type == "gmpo" else {"top_entropy"} if loss_type == "gspo" else set()
        return not any(used[name] for name in unused)

    rows = pairwise(usable, loss_type=OPTIONS, **dict.fromkeys(EXTRAS, (False, True)))[1]
    found = [(loss_type, tuple(itertools.compress(EXTRAS, used))) for loss_type, *used in (row.values for row in rows)]
    return [*found, *(("dapo", (name,)) for name in EXTRAS)]


def named(case: Case) -> str:
    return "-".join(str(value) for name, value in case.items() if name not in OPTIONS[case["loss_type"]] | BOUNDS)


def assert_equal(expected: TrlRun, result: OurRun, but: set[str] = frozenset()) -> None:
    """Loss, advantages, every gradient, and every metric that TRL logs but those named."""
    assert result.loss == pytest.approx(float(expected.loss), rel=TOLERANCE, abs=FLOOR)
    assert difference(result.gradients, expected.gradients) <= TOLERANCE
    assert result.advantages == pytest.approx(expected.batch["advantages"].tolist(), rel=TOLERANCE, abs=1e-6)
    names = expected.metrics.keys() - but - {"num_tokens"}  # of the whole run: see the trainer's test
    assert names <= result.metrics.keys()
    found = {name: result.metrics[name] for name in names}
    assert found == pytest.approx({name: expected.metrics[name] for name in names}, rel=TOLERANCE, abs=FLOOR)


def assert_crossed(metrics: dict[str, float]) -> None:
    """Every bound cuts some tokens or sequences off, and leaves others: a case where none does would prove little."""
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "cispo_clip_ratio"):
        assert 0 < metrics.get(name, 0.5) < 1, name
    ratio = "sampling/importance_sampling_ratio"
    assert metrics.get(f"{ratio}/min", 0) in (0, pytest.approx(BOUNDS["vllm_importance_sampling_clip_min"]))


@cache
def stale_rollouts() -> tuple[Rollouts, list[list[float]]]:
    return stale(ROLLOUTS)


@pytest.mark.parametrize("case", covering(), ids=named)
@pytest.mark.every(2)
def test_loss_gradients_and_metrics_are_trls(case: Case) -> None:
    rollouts, old = stale_rollouts()
    expected, result = both(rollouts, old_logprobs=old, exact=True, **case)
    assert_equal(expected, result)
    assert_crossed(expected.metrics)


@pytest.mark.parametrize(("loss_type", "chosen"), extras(), ids=str)
@pytest.mark.every(2)
def test_with_masks_bonus_missing_rewards_and_temperature_they_are_trls_too(
    loss_type: str, chosen: tuple[str, ...]
) -> None:
    case = {"loss_type": loss_type, "beta": 0.05, "use_bias_correction_kl": False} | OPTIONS[loss_type]
    for name in chosen:
        case |= EXTRAS[name]
    if loss_type != "gmpo":
        case |= CORRECTED[1]
    rollouts = replace(ROLLOUTS, rewards=TWO_REWARDS) if "some_rewards" in chosen else ROLLOUTS
    rollouts, old = stale(rollouts, case.get("temperature", 1.0))
    if "on_policy" in chosen:
        old = None
    expected, result = both(rollouts, old_logprobs=old, exact=True, **case)
    over_sequences = {name for name in expected.metrics if name.startswith(("clip_ratio/", "vespo/"))}
    masked = "truncated" in chosen and loss_type in ("gspo", "vespo")  # TRL counts masked ones: test_differences.py
    assert_equal(expected, result, but=over_sequences if masked else set())


@pytest.mark.parametrize("loss_type", [name for name in OPTIONS if name != "bnpo"])
@pytest.mark.every(3)
def test_the_gradient_of_many_micro_batches_is_trls_sum_over_them(loss_type: str) -> None:
    rollouts, old = stale(ROLLOUTS)
    case = {"loss_type": loss_type, "beta": 0.05, "use_bias_correction_kl": False} | OPTIONS[loss_type]
    masked = {} if loss_type == "gmpo" else {"mask_truncated_completions": True} | CORRECTED[1]
    theirs, ours = both(rollouts, old_logprobs=old, micro_batches=3, ours={"per_device_train_batch_size": 5},
                        **case, **masked)
    lengths = torch.tensor(ROLLOUTS.lengths).view(3, 4).sum(-1)
    assert len(lengths.unique()) == 3, "micro-batches of one length could hide a wrong denominator"
    assert ours.loss == pytest.approx(float(theirs.loss), rel=TOLERANCE, abs=FLOOR)
    assert difference(ours.gradients, theirs.gradients) <= TOLERANCE


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_adaptive_entropy_bonus_takes_the_same_course(share: float) -> None:
    trl_settings = {"use_adaptive_entropy": True, "entropy_coef": 0.05, "top_entropy_quantile": share,
                    "entropy_target": 4.7, "entropy_coef_delta": 0.01}
    trainer, gone = make_trainer(ROLLOUTS, settings=trl_settings), []
    batch = prepare(trainer, ROLLOUTS)
    learner = our_learner(trainer.model, **trl_settings)
    for step in range(4):
        trainer.args.entropy_target = learner.objective.entropy.target = (4.7, 4.0, 4.0, 5.2)[step]
        trainer._metrics["train"].clear()
        expected, result = window(trainer, batch), our_step(learner, ROLLOUTS)
        assert result.loss == pytest.approx(float(expected.loss), rel=TOLERANCE, abs=FLOOR)
        assert difference(result.gradients, expected.gradients) <= TOLERANCE
        assert result.metrics["entropy_coef"] == pytest.approx(expected.metrics["entropy_coef"])
        assert learner.objective.entropy.coef == pytest.approx(trainer.entropy_coef)
        gone.append(trainer.entropy_coef)
    assert len(set(gone)) > 2, "the coefficient has to go up and down"


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.every(2)
def test_advantages_are_trls_for_rewards_that_are_missing_equal_or_alone(scale: Case) -> None:
    generator = random.Random(0)
    for few in (0.1, 0.4, 0.8):
        for _ in range(2):
            drawn = [[None if generator.random() < few else generator.choice([0.0, 0.5, 1.0, 2.0]) for _ in range(8)]
                     for _ in range(2)]
            rewards = {"a": [1.0, None, 1.0, 1.0, *drawn[0]], "b": [0.5, None, None, None, *drawn[1]]}
            rollouts, weighed = replace(ROLLOUTS, rewards=rewards), {"reward_weights": [1.0, 0.5]}
            trainer, groups = make_trainer(rollouts, settings=scale | weighed), our_groups(rollouts)
            expected = prepare(trainer, rollouts)["advantages"].tolist()
            assign_advantages(groups, ["a", "b"], GRPOConfig(num_generations=4, **scale, **weighed))
            result = [rollout.advantage for group in groups for rollout in group.rollouts]
            assert result == pytest.approx(expected, rel=TOLERANCE, abs=1e-6)


@pytest.mark.parametrize("ends", ["all", "none"])
def test_completion_lengths_are_trls_where_all_or_none_have_ended(ends: str) -> None:
    last = {"all": END, "none": 5}[ends]
    rollouts = replace(ROLLOUTS, completion_ids=[[*ids[:-1], last] for ids in ROLLOUTS.completion_ids])
    assert_equal(*both(rollouts))


@pytest.mark.parametrize("beta", [{}, BETAS[2]], ids=str)
def test_the_token_form_of_gspo_has_the_gradient_that_trl_gives_its_sequence_form(beta: Case) -> None:
    rollouts, old = stale(ROLLOUTS)
    theirs, ours = both(rollouts, old_logprobs=old, loss_type="gspo_token", **beta)
    assert ours.loss == pytest.approx(float(theirs.loss), rel=TOLERANCE, abs=FLOOR)
    assert difference(ours.gradients, theirs.gradients) <= TOLERANCE


@pytest.mark.parametrize("loss_type", [name for name in OPTIONS if name not in ("gmpo", "gspo")])
@pytest.mark.every(2)
def test_optimizer_steps_that_share_a_generation_are_trls(loss_type: str, tmp_path: Path) -> None:
    per_step = 1 if loss_type == "bnpo" else 2  # TRL's micro-batches; for bnpo more are test_differences.py's
    settings = OPTIONS[loss_type] | {"loss_type": loss_type, "beta": 0.05, "num_iterations": 2, "learning_rate": 1e-2}
    trainer, rollouts = our_trainer(
        tmp_path, random_rollouts(prompts=4), steps_per_generation=2, per_device_train_batch_size=8, max_steps=4,
        **settings
    )
    expected = trl_steps(rollouts, 4, 2 * per_step, gradient_accumulation_steps=per_step, **settings)
    found: list[dict[str, torch.Tensor]] = []
    trainer.learner.optimizer.register_step_pre_hook(lambda *_: found.append(gradients(trainer.model)))
    trainer.update(trainer.rollout())
    assert len(found) == len(expected) == 4
    differences = [difference(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
    assert differences[0] <= TOLERANCE
    assert max(differences) <= 10 * TOLERANCE, differences  # the weights, in float32, have gone apart a little


def test_the_line_that_a_run_logs_has_every_metric_of_trls(tmp_path: Path) -> None:
    settings = {"beta": 0.05, "per_device_train_batch_size": 12, "entropy_coef": 0.02, "reward_weights": [1.0, 0.5],
                "parity_steps": 1, "parity_bound": 100.0, "vllm_importance_sampling_correction": True, **BOUNDS}
    rollouts = replace(ROLLOUTS, rewards=TWO_REWARDS, rollout_logprobs=[[-5.0] * n for n in ROLLOUTS.lengths])
    trainer, rollouts = our_trainer(tmp_path, rollouts, max_steps=1, **settings)
    same = {name: value for name, value in settings.items() if "parity" not in name}
    trl = theirs(rollouts, correction=True, vllm_importance_sampling_mode="token_truncate", **same)
    trainer.train()
    line = trainer.state.log_history[-2]
    assert trl.metrics.keys() <= line.keys()
    assert {name: line[name] for name in trl.metrics} == pytest.approx(trl.metrics, rel=TOLERANCE, abs=FLOOR)


def test_reinforce_has_the_gradient_of_trls_bnpo_on_policy() -> None:
    theirs, ours = both(ROLLOUTS, loss_type="bnpo", ours={"loss_type": "reinforce"})
    assert difference(ours.gradients, theirs.gradients) <= TOLERANCE
