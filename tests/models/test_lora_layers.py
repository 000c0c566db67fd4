"""While sampling keeps what layers compute with, a switch of the adapter, the mode or the precision is still seen."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import peft
import pytest
import torch
from small_models import SPLIT, random_model, scatter
from torch import Tensor

from lowmem_grpo.kernels.lora_factors import kept_factors
from lowmem_grpo.models import lora_layers
from lowmem_grpo.models.lean_modules import make_lean
from lowmem_grpo.models.lora_layers import use_kernel_layers

IDS = torch.arange(3, 20)[None]


def adapted(targets: list[str]) -> peft.PeftModel:
    """Return a model with two adapters, of which "default" is active, and dropout in training."""
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", lora_dropout=0.5)
    model = random_model("Qwen3").requires_grad_(False)
    use_kernel_layers(config, model)
    result = peft.get_peft_model(model, config)
    use_kernel_layers(other := peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"), model)
    result.add_adapter("other", other)
    make_lean(result.get_base_model(), None)
    return scatter(result, 0.2, of="lora_").eval()


@contextmanager
def other_adapter(model: peft.PeftModel) -> Iterator[None]:
    model.set_adapter("other")
    yield
    model.set_adapter("default")


@contextmanager
def training(model: peft.PeftModel) -> Iterator[None]:
    torch.manual_seed(0)
    model.train()
    yield
    model.eval()


def situations(model: peft.PeftModel) -> list[AbstractContextManager[object]]:
    return [nullcontext(), model.disable_adapter(), other_adapter(model), training(model),
            torch.autocast("cpu", torch.bfloat16), nullcontext()]


def outputs(model: peft.PeftModel) -> list[Tensor]:
    found = []
    for situation in situations(model):
        with situation:
            found.append(model(IDS).logits)
    return found


@pytest.mark.parametrize("targets", [SPLIT, ["v_proj", "down_proj"]], ids=["all layers", "not the first of a group"])
def test_a_switch_inside_kept_factors_changes_the_output_as_it_does_outside(targets: list[str]) -> None:
    model = adapted(targets)
    with torch.no_grad():
        expected = outputs(model)
        with kept_factors():
            found = outputs(model)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(not torch.equal(expected[0], other) for other in expected[1:-1]), "the situations differ"


def test_sampling_asks_each_layer_once_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = adapted(SPLIT), []
    computes = lora_layers.computes
    monkeypatch.setattr(lora_layers, "computes", lambda layer, x: asked.append(layer) or computes(layer, x))
    with torch.no_grad(), kept_factors():
        model(IDS)
        first = len(asked)
        model(IDS)
    assert first and len(asked) == first
    with torch.no_grad():
        model(IDS)
    assert len(asked) == 2 * first, "outside, nothing is kept"
