"""Teachers on the policy's own base model, against plain transformers and PEFT."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from small_models import shallow
from trainer_runs import adapter_of, load, moved, naive_logprobs, plain_peft
from transformers import AutoModelForCausalLM

from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.teacher import Teacher
from lowmem_grpo.models.teacher import adapter_of as read_teacher
from lowmem_grpo.runs.saved_adapter import AdapterError
from lowmem_grpo.types import Rollout, RolloutGroup

PROMPT, COMPLETION = [5, 9, 30, 41], [7, 8, 20, 2]


def logprobs(policy: Policy) -> torch.Tensor:
    """(C,) of the completion."""
    batch = pack([RolloutGroup({}, PROMPT, [Rollout(COMPLETION, [0.0] * 4, "stop")])])[0]
    with torch.no_grad():
        return policy.logprobs(batch, 1.0)[0]


def plainly(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return naive_logprobs(model, PROMPT, COMPLETION)


def told_by(teacher: Teacher) -> torch.Tensor:
    with teacher.reading() as policy:
        return logprobs(policy)


def trained(**lora: Any) -> FastPeftModel:
    return moved(load(**lora))


def test_the_base_would_be_read_with_the_adapter(tmp_path: Path) -> None:
    policy = Policy(trained())
    before, plain = logprobs(policy), AutoModelForCausalLM.from_pretrained(shallow())
    torch.testing.assert_close(told_by(Teacher("base", policy)), plainly(plain), rtol=0, atol=1e-5)
    assert torch.equal(logprobs(policy), before) and not torch.allclose(before, plainly(plain))


def test_a_live_teacher_would_read_with_dropout(tmp_path: Path) -> None:
    model = trained(lora_dropout=0.5)
    policy, plain = Policy(model), plain_peft(model, tmp_path)
    model.train()
    torch.testing.assert_close(told_by(Teacher("live", policy)), plainly(plain), rtol=0, atol=1e-5)
    assert all(module.training for module in model.modules())


def test_an_average_would_move_at_the_inverse_rate() -> None:
    model = trained()
    teacher, begun = Teacher("ema", Policy(model)), adapter_of(model)
    with torch.no_grad():
        for parameter in teacher.student.trainable:
            parameter.add_(1.0)
    teacher.follow(0.05)
    kept = teacher.student.teacher_adapter or {}
    assert kept.keys() == begun.keys()
    for name, value in kept.items():
        torch.testing.assert_close(value, 0.95 * begun[name] + 0.05 * (begun[name] + 1.0))
    assert not torch.equal(told_by(teacher), logprobs(teacher.student))


def test_a_saved_adapter_would_be_read_as_another_one(tmp_path: Path) -> None:
    other, model = trained(), load()
    other.save_lora(tmp_path / "teacher")
    policy = Policy(model)
    teacher = Teacher("saved", policy, read_teacher(tmp_path / "teacher", policy, model.loaded))
    wanted = plainly(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(shallow()),
                                                    tmp_path / "teacher"))
    torch.testing.assert_close(told_by(teacher), wanted, rtol=0, atol=1e-5)
    assert all(not value.any() for name, value in adapter_of(model).items() if "lora_B" in name)


@pytest.mark.parametrize(("lora", "base", "message"), [
    ({"r": 8}, None, "is \\[8, .*Both are on one base model, so they need equal settings"),
    ({"lora_alpha": 64}, None, "lora_alpha is 64 in the checkpoint"),
    ({"target_modules": ("q_proj",)}, None, "is absent in the checkpoint"),
    ({}, "someone/else", "was trained on someone/else, and this model is"),
])
def test_an_adapter_that_does_not_fit_the_student_would_teach_nonsense(
    lora: dict[str, Any], base: str | None, message: str, tmp_path: Path
) -> None:
    load(**lora).save_lora(tmp_path)
    if base:
        path = tmp_path / "base_model.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model": base}))
    model = load()
    with pytest.raises(AdapterError, match=message):
        read_teacher(tmp_path, Policy(model), model.loaded)
