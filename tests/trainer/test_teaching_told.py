"""What a run with a teacher tells: its metrics, against plain arithmetic on all logits, its log, page and card."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from run_pages import Page
from torch import Tensor
from trainer_runs import ROWS, SMALL, digit_sum, load, moved

from lowmem_grpo import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, SDPOConfig, SDPOTrainer
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.teacher import Teacher
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.trainer.learner import Learner
from lowmem_grpo.trainer.teacher_objective import TeacherObjective
from lowmem_grpo.types import Rollout, RolloutGroup

PROMPT, COMPLETIONS = [5, 9, 30, 41], ([7, 8, 20, 2], [11, 12], [13, 14, 15])
MODES: dict[str, dict[str, Any]] = {"full_logits": {}, "topk_logits": {"distillation_topk": 60}, "sampled_token": {}}
OF_REWARDS = {"reward", "reward_std", "frac_reward_zero_std", "groups/total", "groups/with_signal",
              "groups/signal_share"}


def groups() -> list[RolloutGroup]:
    return [RolloutGroup({}, PROMPT, [Rollout(ids, [0.0] * len(ids), "stop", advantage=1.0 - n, reward=1.0 - n)
                                      for n, ids in enumerate(COMPLETIONS)])]


def learner(mode: str, weight: float = 1.0, size: int = 64, policy: Policy | None = None) -> Learner:
    policy = policy or Policy(moved(load()))
    config = GRPOConfig(teacher="base", distillation_mode=mode, distillation_weight=weight, **MODES[mode],
                        per_device_train_batch_size=size)
    objective = TeacherObjective(config, True, policy, Teacher("base", policy))
    return Learner(policy, config, objective, torch.optim.SGD(policy.trainable, lr=0.0))


def plainly(model: Any) -> Tensor:
    """log p (N, V) of the completions' tokens."""
    return torch.cat([model(input_ids=torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
                      for ids in COMPLETIONS])


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_entropies_and_agreement_would_not_be_those_of_all_logits(mode: str) -> None:
    made = learner(mode)
    metrics, own = made.measure(groups()), plainly(made.policy.model)
    with made.policy.base_model():
        taught = plainly(made.policy.model)
    entropy, other = (float(-(each.exp() * each).sum(-1).mean()) for each in (own, taught))
    assert metrics["entropy"] == pytest.approx(entropy, rel=1e-5)
    assert metrics["distillation/teacher_entropy"] == pytest.approx(other, rel=1e-5) and abs(entropy - other) > 1e-3
    if mode != "sampled_token":
        same = float((own.argmax(-1) == taught.argmax(-1)).float().mean())
        assert metrics["distillation/agreement"] == pytest.approx(same)


@pytest.mark.parametrize("size", [64, 1])
def test_the_parts_of_the_loss_would_not_add_up_over_micro_batches(size: int) -> None:
    policy = Policy(moved(load()))
    both, alone = (learner("full_logits", weight, size, policy).measure(groups()) for weight in (0.25, 1.0))
    parts = [both[f"self_distillation/{name}_loss"] for name in ("policy", "distillation")]
    assert both["loss"] == pytest.approx(0.75 * parts[0] + 0.25 * parts[1], rel=1e-5) and parts[0] != parts[1]
    assert parts[1] == pytest.approx(alone["loss"], rel=1e-5) == alone["self_distillation/distillation_loss"]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
            and "OMP_NUM_THREADS" not in record.getMessage()]


def test_a_run_without_rewards_would_be_told_as_one_whose_rewards_are_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    moved(load()).save_lora(tmp_path / "teacher")
    config = DistillationConfig(output_dir=str(tmp_path / "run"), **SMALL | {
        "max_steps": 11, "logging_steps": 1, "learning_rate": 1e-4, "num_generations": 1})
    trainer = DistillationTrainer(load(), tmp_path / "teacher", config, ROWS)
    findings = " ".join(map(str, trainer.preflight()))
    assert "that a teacher does not work" in findings and "reward" not in findings
    trainer.train()
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert not OF_REWARDS & {name for line in lines for name in line}
    assert not [text for text in told(caplog) if "same reward" in text or "signal" in text or "all rewards" in text]
    printed = capsys.readouterr().out
    assert "divergence" in printed and "rewards, disk" not in printed and "groups with" not in printed
    page = Page(tmp_path / "run" / "report.html")
    charts = {chart["title"]: chart for chart in page.data["charts"]}
    assert {"Divergence", "Agreement", "Entropy"} <= charts.keys() and "Groups with signal" not in charts
    assert "reward" not in charts["Loss"]["note"] and page.data["top"]["about"].endswith("distillation")
    assert any("divergence from the teacher" in words for words, _ in page.data["top"]["tiles"])
    card = (tmp_path / "run" / "adapter" / "README.md").read_text()
    assert "## Distillation, 11 steps" in card and "teacher: teacher" in card and str(tmp_path) not in card
    assert "distillation_mode full_logits" in card and "distillation/divergence: " in card


@pytest.mark.parametrize("alone", [True, False])
def test_equal_rewards_would_be_called_nothing_to_learn_although_a_teacher_teaches(
    alone: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def always(completions: list[Any], **_: Any) -> list[float]:
        return [1.0 for _ in completions]

    settings = SMALL | {"output_dir": str(tmp_path), "nothing_to_learn_steps": 2, "max_steps": 3, "logging_steps": 1}
    if alone:
        SDPOTrainer(load(max_seq_length=512), always, SDPOConfig(**settings), ROWS).train()
    else:
        GRPOTrainer(moved(load()), always, GRPOConfig(teacher="base", **settings), ROWS).train()
    assert not [text for text in told(caplog) if "nothing to learn" in text or "no gradient" in text]
    lines = read_lines(tmp_path / "metrics.jsonl")
    names = {"self_distillation/distillation_loss"} | (set() if alone else {"self_distillation/policy_loss"})
    assert all(names <= line.keys() for line in lines if "loss" in line)
    if alone:
        assert json.loads((tmp_path / "summary.json").read_text())["method"] == "sdpo"
        assert all(line["self_distillation/success_group_fraction"] == 1 for line in lines if "loss" in line)


def test_the_divergences_beta_would_weigh_a_kl_term_of_the_policy_loss(tmp_path: Path) -> None:
    config = DistillationConfig(output_dir=str(tmp_path), distillation_weight=0.5, **SMALL | {"num_generations": 2})
    made = DistillationTrainer(moved(load()), "base", config, ROWS)
    assert made.update(made.rollout())["self_distillation/policy_loss"] == 0, "there are no rewards, and no KL term"


@pytest.mark.parametrize("settings", [
    {"advantage_estimator": "reinforce++"}, {"advantage_estimator": "rloo", "loss_type": "rloo"}], ids=["r++", "rloo"])
def test_the_divergences_beta_would_put_a_kl_term_into_the_rewards(settings: dict[str, Any], tmp_path: Path) -> None:
    config = DistillationConfig(output_dir=str(tmp_path), distillation_weight=0.5,
                                **SMALL | {"scale_rewards": None} | settings)
    assert not config.kl_in_reward
    made = DistillationTrainer(moved(load()), "base", config, ROWS, reward_funcs=digit_sum)
    metrics = made.update(made.rollout())
    assert math.isfinite(metrics["loss"]) and "kl" not in metrics


def test_the_entropy_of_tokens_that_no_teacher_reads_would_count_less() -> None:
    made, read = learner("full_logits", 0.5, size=1), groups()
    read[0].rollouts[0].fields["teacher_mask"] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    with torch.no_grad():
        own = plainly(made.policy.model)
    assert made.measure(read)["entropy"] == pytest.approx(float(-(own.exp() * own).sum(-1).mean()), rel=1e-5)
