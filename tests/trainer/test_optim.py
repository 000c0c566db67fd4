"""The optimizer's numbers: the norms of gradients by group, and the learning rate of each step."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lowmem_grpo import GRPOConfig
from lowmem_grpo.recipes.arithmetic import DEFAULTS
from lowmem_grpo.trainer.optim import allocates_each_step, gradient_norms, make_optimizer, make_scheduler


def test_a_trained_parameter_that_is_no_adapters_is_in_the_norms() -> None:
    parameters = {name: torch.nn.Parameter(torch.zeros(3)) for name in (
        "layers.0.q_proj.lora_A.default.weight", "layers.1.q_proj.lora_B.default.weight", "norm.weight", "unused")}
    for number, parameter in enumerate(list(parameters.values())[:3]):
        parameter.grad = torch.full((3,), float(number + 1))
    total, metrics = gradient_norms(parameters)
    expected = {"grad_norm": 42**0.5, "grad_norm/q_proj": 15**0.5, "grad_norm/other": 27**0.5}
    assert metrics == pytest.approx(expected, rel=1e-3)
    assert total.item() == pytest.approx(42**0.5, rel=1e-3)


def test_the_usual_optimizer_is_transformers_own_and_a_step_of_it_takes_no_memory_on_a_card(tmp_path: Path) -> None:
    config, held = GRPOConfig(learning_rate=0.1, weight_decay=0.1), torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    assert config.optim == transformers.TrainingArguments(str(tmp_path), use_cpu=True).optim
    optimizer = make_optimizer([held], config)
    assert not allocates_each_step(optimizer, torch.device("cuda"))
    held.grad = torch.tensor([0.5, -0.25])
    optimizer.step()  # the first step of Adam is the rate, whatever the gradient; the decay comes before it
    assert held.tolist() == pytest.approx([1 - 0.01 - 0.1, -2 + 0.02 + 0.1], rel=1e-6)
    assert DEFAULTS["optim"] == "adamw_torch"  # of the demo, whose figures were made with it


def rates(scheduler: Any, steps: int) -> list[float]:
    """The learning rate of each step."""
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.mark.parametrize("total", [1, 9, 10, 12, 25, 30])
@pytest.mark.parametrize("warmup", [0, 0.05, 0.1, 0.34, 1, 2.7, 3])
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
@pytest.mark.every(3)
def test_every_learning_rate_is_the_one_that_transformers_trainer_has(
    kind: str, warmup: float, total: int, tmp_path: Path
) -> None:
    theirs = transformers.TrainingArguments(str(tmp_path), warmup_steps=warmup, use_cpu=True)
    expected = transformers.get_scheduler(
        kind, adamw(), num_warmup_steps=theirs.get_warmup_steps(total), num_training_steps=total)
    wanted = rates(expected, total)
    names = ["warmup_steps", "warmup_ratio"] if warmup < 1 else ["warmup_steps"]
    for name in names:
        config = GRPOConfig(output_dir=str(tmp_path), lr_scheduler_type=kind, **{name: warmup})
        assert rates(make_scheduler(adamw(), config, total), total) == wanted


@pytest.mark.parametrize(("kind", "options"), [
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}), ("polynomial", {"power": 2.0}), ("cosine", {"num_cycles": 1.5}),
    ("warmup_stable_decay", {"num_decay_steps": 3, "min_lr_ratio": 0.2}), ("cosine_with_restarts", {"num_cycles": 2}),
])
def test_a_schedule_has_the_options_that_it_has_in_transformers(kind: str, options: dict[str, Any]) -> None:
    config = GRPOConfig(lr_scheduler_type=kind, lr_scheduler_kwargs=options, warmup_steps=2)
    expected = transformers.get_scheduler(kind, adamw(), 2, 12, scheduler_specific_kwargs=options)
    assert rates(make_scheduler(adamw(), config, 12), 12) == rates(expected, 12)


@pytest.mark.parametrize(("kind", "options", "message"), [
    ("linear", {"power": 2.0}, "lr_scheduler_type 'linear' takes none; leave it out"),
    ("cosine", {"power": 2.0}, r"lr_scheduler_kwargs is .* which lr_scheduler_type 'cosine' does not take: .*power"),
    ("cosine_with_min_lr", {}, "lr_scheduler_type 'cosine_with_min_lr' does not take: .*min_lr"),
])
def test_options_that_a_schedule_does_not_have_are_named(kind: str, options: dict[str, Any], message: str) -> None:
    config = GRPOConfig(lr_scheduler_type=kind, lr_scheduler_kwargs=options)
    with pytest.raises(ValueError, match=message):
        make_scheduler(adamw(), config, 12)
