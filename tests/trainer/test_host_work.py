"""What a step does on the host, whatever its tokens: the model's modules are walked as seldom as can be, and random
states are kept only for as long as something drops."""

from typing import Any

import pytest
import torch
from checkpointed_stack import offloading
from small_models import random_model, with_adapter
from torch import Tensor, nn
from trainer_runs import learner

from lowmem_grpo.memory.offload.activations import drops, enable_checkpointing, storage_id, storage_ids
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy, evaluating
from lowmem_grpo.types import Rollout, RolloutGroup

GROUPS = [RolloutGroup({}, [5, 6, 7], [Rollout([8 + n, 9, 10], [-3.0] * 3, "stop", advantage=1.0 - 2 * n)
                                       for n in range(2)])]


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


def test_a_model_in_evaluation_mode_samples_without_setting_it(model: Any, calls: list[bool]) -> None:
    model.eval()
    calls.clear()
    with evaluating(model):
        assert not model.training
    assert calls == []
    model.train()
    dropout = next(module for module in model.modules() if isinstance(module, nn.Dropout)).eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module for module in model.modules() if not module.training] == [dropout]


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules through all of whose parameters somebody walked."""
    seen: list[nn.Module] = []
    own = nn.Module.named_parameters

    def walked(module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        seen.extend([module] if recurse else [])
        return own(module, prefix, recurse, remove_duplicate)

    monkeypatch.setattr(nn.Module, "named_parameters", walked)
    return seen


def test_an_optimizer_step_neither_sets_modes_nor_looks_for_its_parameters(
    model: Any, calls: list[bool], walks: list[nn.Module]
) -> None:
    made = learner(Policy(model.train()))
    calls.clear()
    walks.clear()
    made.prepare(GROUPS, 1)
    made.forward_backward(GROUPS)
    assert made.optim_step()["grad_norm"] > 0
    assert (calls, walks) == ([], [])


def test_a_parameter_of_the_optimizer_is_trained_whenever_it_is_not_frozen(model: Any) -> None:
    made = learner(Policy(model))
    name, parameter = next(iter(made.trained.items()))
    parameter.requires_grad_(False)
    assert name not in made.trained
    parameter.requires_grad_(True)
    assert made.trained[name] is parameter
    frozen = dict(model.named_parameters()).keys() - made.trained.keys()
    assert frozen and not any("lora" in each for each in frozen)


def test_weights_in_checkpointed_layers_are_not_looked_through(model: Any, walks: list[nn.Module]) -> None:
    model.train()
    everything = {storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    assert storage_ids(model) == everything
    enable_checkpointing(model.get_base_model(), True)
    inside = {storage_id(tensor) for tensor in model.get_base_model().model.layers.parameters()}
    assert storage_ids(model) == everything - inside
    assert storage_ids(model.eval()) == everything, "layers checkpoint only in train mode"


def test_only_activations_go_to_the_host_and_gradients_are_the_same() -> None:
    found = []
    for offloads in (False, True):
        torch.manual_seed(0)
        policy = Policy(with_adapter(random_model("Llama")).train())
        enable_checkpointing(policy.base, True)
        made = learner(policy)
        if offloads:
            made.offload = offload = offloading(policy.model)
        made.forward_backward(GROUPS)
        found.append([p.grad.clone() for p in policy.trainable if p.grad is not None])
    assert found[0] and all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert offload.store.copies.log.count("out") == policy.base.config.num_hidden_layers + 2


# Random states


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
    made.logprobs(pack(GROUPS)[0], 1.0)[0].sum().backward()
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
