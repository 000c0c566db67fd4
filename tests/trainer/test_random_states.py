"""Checkpointed layers and random states: kept for as long as something drops."""

from typing import Any

import pytest
import torch
from small_models import random_model, with_adapter
from torch import Tensor, nn

from lowmem_grpo.memory.offload.activations import drops, enable_checkpointing
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import MicroBatch, Rollout, RolloutGroup


def batch() -> MicroBatch:
    rollouts = [Rollout([8 + n, 9, 10, 11], [0.0] * 4, "stop") for n in range(3)]
    (made,) = pack([RolloutGroup({}, [5, 6, 7], rollouts)])
    return made


def policy(rate: float, checkpointing: bool) -> Policy:
    torch.manual_seed(0)
    model = with_adapter(random_model("Llama"), lora_dropout=rate).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    enable_checkpointing(model.get_base_model(), checkpointing)
    return Policy(model)


def gradients(made: Policy) -> list[Tensor]:
    torch.manual_seed(3)
    made.model.zero_grad()
    made.logprobs(batch(), 1.0)[0].sum().backward()
    return [parameter.grad.clone() for parameter in made.trainable if parameter.grad is not None]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return bool(first) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def rate_of(made: Policy, rate: float) -> None:
    for module in made.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each time that a random state is saved."""
    seen: list[int] = []
    own = torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: seen.append(1) or own())
    return seen


def test_random_states_are_saved_only_where_something_drops_and_the_gradient_is_the_same(saved: list[int]) -> None:
    made = policy(0.0, True)
    found = gradients(made)
    assert saved == []
    made.base.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": True})
    assert same(found, gradients(made))
    assert len(saved) >= made.base.config.num_hidden_layers
    assert same(found, gradients(policy(0.0, False)))


def test_dropout_that_is_turned_on_later_is_recomputed_with_the_same_numbers(saved: list[int]) -> None:
    kept, made = policy(0.3, False), policy(0.3, True)
    for rate in (0.3, 0.0, 0.5, 0.0, 0.2):
        for each in (kept, made):
            rate_of(each, rate)
        saved.clear()
        found = gradients(made)
        assert bool(saved) == (rate > 0)
        assert same(found, gradients(kept)), rate


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("attention_dropout", 0.1, True), ("attention_dropout", 0.0, False), ("resid_pdrop", 0.2, True),
    ("hidden_size", 32, False),
])
def test_every_rate_of_the_config_is_seen(name: str, value: Any, expected: bool) -> None:
    model = random_model("Llama")
    assert not drops(model)
    setattr(model.config, name, value)
    assert drops(model) == expected
