"""What the memory plan and its estimate of time are told of a run's teacher."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import shallow
from trainer_runs import ROWS, SMALL, digit_sum, load, moved
from transformers import AutoConfig, AutoModelForCausalLM

from bench.memory.fake_models import meta_model, stored
from lowmem_grpo import DistillationConfig, DistillationTrainer, FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.memory.model_shape import named_config
from lowmem_grpo.models.teacher import weight_bytes
from lowmem_grpo.trainer.preflight.subject import Subject


def trainer(folder: Path, teacher: Any = "base", model: Any = None, **settings: Any) -> DistillationTrainer:
    own = {"num_generations": 2, "distillation_weight": 0.9}
    config = DistillationConfig(output_dir=str(folder), **(SMALL | own | settings))
    return DistillationTrainer(model or load(), teacher, config, ROWS)


@pytest.mark.parametrize(("kind", "adapter"), [("base", False), ("ema", True), ("saved", True)])
def test_a_teacher_on_the_students_weights_would_be_planned_as_another_model(
    kind: str, adapter: bool, tmp_path: Path
) -> None:
    if kind == "saved":
        moved(load()).save_lora(kind := str(tmp_path / "saved"))
    settings = SMALL | {"teacher": kind, "distillation_mode": "full_logits", "max_completion_length": 16}
    made = GRPOTrainer(load(), digit_sum, GRPOConfig(output_dir=str(tmp_path / "run"), **settings), ROWS)
    completions, size = made.args.prompts_per_generation * 4, made.policy.head.weight.shape[1]
    assert made.teaching.planned == {"keeps_teacher": adapter, "teacher_bytes": 0,
                                     "teacher_hidden_bytes": completions * 16 * size * 4}


def test_the_sampled_token_would_be_planned_with_hidden_states(tmp_path: Path) -> None:
    made = trainer(tmp_path, distillation_mode="sampled_token")
    assert made.teaching.planned["teacher_hidden_bytes"] == 0


@pytest.mark.parametrize(("mode", "copied"), [("full_logits", True), ("sampled_token", False)])
def test_the_teachers_copy_of_a_trained_head_would_be_missing_in_the_plan(
    mode: str, copied: bool, tmp_path: Path
) -> None:
    bare, _ = FastLanguageModel.from_pretrained(str(shallow()), load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=2, trainable_token_indices=[5, 7])
    made = trainer(tmp_path, model=model, distillation_mode=mode)
    assert made.teaching.planned["teacher_bytes"] == copied * 384 * made.policy.head.weight.shape[1] * 4


def test_another_models_weights_would_be_missing_in_the_plan(tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(shallow())
    wanted = sum(p.numel() for p in other.parameters()) * 4
    assert wanted <= trainer(tmp_path, other).teaching.planned["teacher_bytes"] < 1.01 * wanted


def test_the_scales_of_4_bit_weights_would_not_be_counted() -> None:
    config = named_config("qwen2.5-1.5b") | {"num_hidden_layers": 2, "vocab_size": 64}
    model = meta_model(AutoConfig.for_model(**config), torch.bfloat16, nf4=True)
    assert weight_bytes(model) == pytest.approx(sum(tensor.nbytes for tensor in stored(model)), rel=0.005)


def test_the_last_updates_hidden_states_would_wait_on_the_host_beside_the_next(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    first, second = made.rollout(), made.rollout()
    for groups in (first, second):
        made.update(groups)
        assert all("teacher_hidden" in rollout.fields for group in groups for rollout in group.rollouts)
    assert not any("teacher_hidden" in rollout.fields for group in first for rollout in group.rollouts)


def test_a_password_in_a_teachers_address_would_be_kept_in_records() -> None:
    with pytest.raises(ValueError, match="has a name or password, which the records of the run would keep") as raised:
        DistillationConfig(teacher="https://me:secret@host/v1", distillation_mode="sampled_token")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(("teacher", "passes"), [("base", 1), ("http", 0)])
def test_the_estimate_of_time_would_miss_the_pass_of_a_teacher(
    teacher: str, passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(tmp_path)
    if teacher == "http":  # it is asked before the update, and computes elsewhere
        monkeypatch.setattr(made.parts.objective, "teacher", None)
    assert Subject(made).passes(1) == passes
