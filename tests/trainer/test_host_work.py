"""What a step does on the host, whatever its tokens: the model's modules are walked as seldom as can be."""

from typing import Any

import pytest
from small_models import random_model, with_adapter
from torch import nn

from lowmem_grpo.models.policy import evaluating, set_mode


@pytest.fixture
def model() -> Any:
    return with_adapter(random_model("Llama"), lora_dropout=0.1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The modes that modules were set to, one by one."""
    seen: list[bool] = []
    own = nn.Module.train
    monkeypatch.setattr(nn.Module, "train", lambda module, mode=True: seen.append(mode) or own(module, mode))
    return seen


@pytest.mark.parametrize("training", [True, False])
def test_a_mode_is_set_only_where_some_module_has_another(model: Any, calls: list[bool], training: bool) -> None:
    model.train(training)
    calls.clear()
    set_mode(model, training)
    assert calls == []
    part = next(module for module in model.modules() if isinstance(module, nn.Dropout))
    part.train(not training)
    set_mode(model, training)
    assert part.training == training and len(calls) > 1
    set_mode(model, not training)
    assert {module.training for module in model.modules()} == {not training}


def test_a_model_in_evaluation_mode_samples_without_setting_it(model: Any, calls: list[bool]) -> None:
    model.eval()
    calls.clear()
    with evaluating(model):
        assert not model.training
    assert calls == []
    model.train()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert all(module.training for module in model.modules())
