"""RLOO under TRL's names: its defaults, and its gradient written out in plain transformers and PEFT."""

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from small_models import shallow
from trainer_runs import ROWS, digit_sum, load, moved, naive_logprobs, plain_peft
from transformers import AutoModelForCausalLM

from lowmem_grpo import GRPOConfig, RLOOConfig, RLOOTrainer
from lowmem_grpo.config.from_trl import settings_of

SMALL: dict[str, Any] = {"per_device_train_batch_size": 4, "max_completion_length": 8, "max_steps": 1,
                         "save_strategy": "no", "learning_rate": 1e-2, "disable_tqdm": True}


def test_the_defaults_are_trls_and_its_own_settings_are_read(tmp_path: Path) -> None:
    theirs, ours = trl.RLOOConfig(str(tmp_path), use_cpu=True), RLOOConfig()
    for name in ("num_generations", "beta", "learning_rate", "num_iterations", "temperature", "max_completion_length",
                 "normalize_advantages", "reward_clip_range", "mask_truncated_completions", "sync_ref_model"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert theirs.epsilon == ours.chosen()["epsilon"]
    given = trl.RLOOConfig(str(tmp_path), use_cpu=True, normalize_advantages=True, reward_clip_range=(-1.0, 1.0),
                           beta=0.2)
    found = settings_of(given, RLOOConfig)
    assert (found.normalize_advantages, found.reward_clip_range, found.beta) == (True, (-1.0, 1.0), 0.2)
    with pytest.raises(TypeError, match="allowed are GRPOConfig of lowmem_grpo"):
        settings_of(given, GRPOConfig)


@pytest.mark.parametrize("settings", [{"beta": 0.1}, {"beta": 0.1, "normalize_advantages": True}, {"beta": 0.0}])
def test_the_gradient_is_that_of_whole_completions_whose_rewards_hold_the_kl(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """loss = -mean over completions of A sum_t log p_t, with A = R - beta sum_t (log p_t - log ref_t), less the mean of
    the others."""
    config = RLOOConfig(output_dir=str(tmp_path / "run"), kl_reference="base", **SMALL, **settings)
    trainer = RLOOTrainer(moved(load()), digit_sum, config, ROWS)
    groups = trainer.rollout()
    plain, base = plain_peft(trainer.model, tmp_path / "plain"), AutoModelForCausalLM.from_pretrained(shallow())
    logps, advantages, kls = [], [], []
    for group in groups:
        paid = []
        for one in group.rollouts:
            logp = naive_logprobs(plain, group.prompt_ids, one.completion_ids)
            with torch.no_grad():
                kl = logp - naive_logprobs(base, group.prompt_ids, one.completion_ids)
            logps.append(logp.sum())
            kls.append(kl)
            paid.append(one.reward - settings["beta"] * kl.sum().item())
        advantages += [paid[0] - paid[1], paid[1] - paid[0]]
    weights = torch.tensor(advantages)
    if settings.get("normalize_advantages"):
        weights = (weights - weights.mean()) / (weights.std() + 1e-4)
    (-(weights * torch.stack(logps)).mean()).backward()
    trainer.learner.prepare(groups, 1)
    metrics = trainer.learner.forward_backward(groups)
    assert metrics["loss"] == pytest.approx(-weights.mean().item(), rel=1e-3, abs=1e-5)
    if settings["beta"]:
        assert metrics["kl"] == pytest.approx(torch.cat(kls).mean().item(), rel=1e-3)
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    assert wanted.keys() == found.keys()
    scale = max(float(grad.abs().max()) for grad in wanted.values())
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 2e-4 * scale


@pytest.mark.parametrize(("settings", "message"), [
    ({"normalize_advantages": True}, "normalize_advantages=True is an option of advantage_estimator='rloo'"),
    ({"reward_clip_range": (1.0, 1.0)}, r"reward_clip_range is \(1.0, 1.0\); it must be \(lowest, highest\)"),
    ({"reward_clip_range": (0.0, 1.0), "multi_objective_aggregation": "normalize_then_sum"}, "which has none"),
    ({"loss_type": "rloo", "advantage_estimator": "rloo", "beta": 0.1, "turn_discount": 0.5}, "set beta=0, or leave"),
])
def test_options_of_rloo_are_refused_where_they_have_no_meaning(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**settings)


def test_a_run_learns_and_ends_with_its_summary(tmp_path: Path) -> None:
    trainer = RLOOTrainer(load(), digit_sum, RLOOConfig(output_dir=str(tmp_path), **SMALL), ROWS, eval_dataset=ROWS[:1])
    assert trainer.train().finished and "train_loss" in trainer.state.log_history[-1]
    assert {"eval_loss", "eval_kl", "eval_clip_ratio/low_mean"} <= trainer.evaluate().keys()
