"""The optimizer: norms of gradients by group, the learning rate of each step, and steps that can be undone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from card import CARD, CPU, gpu
from tables import every_row
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_grpo import GRPOConfig
from lowmem_grpo.recipes.arithmetic import DEFAULTS
from lowmem_grpo.trainer import optim
from lowmem_grpo.trainer.optim import OptimizerCopy, allocates_each_step, gradient_norms, make_optimizer, make_scheduler


def test_a_trained_parameter_that_is_no_adapters_is_in_the_norms() -> None:
    parameters = {name: torch.nn.Parameter(torch.zeros(3)) for name in (
        "layers.0.q_proj.lora_A.default.weight", "layers.1.q_proj.lora_B.default.weight", "norm.weight",
        "lm_head.modules_to_save.default.weight", "unused")}
    for number, parameter in enumerate(list(parameters.values())[:4]):
        parameter.grad = torch.full((3,), float(number + 1))
    total, metrics = gradient_norms(parameters)
    expected = {"grad_norm": 90**0.5, "grad_norm/q_proj": 15**0.5, "grad_norm/other": 27**0.5,
                "grad_norm/lm_head": 48**0.5}
    assert metrics == pytest.approx(expected, rel=1e-3)
    assert total.item() == pytest.approx(90**0.5, rel=1e-3)


def test_norms_of_gradients_on_the_host_and_on_a_card_are_summed_on_the_card() -> None:
    places: list[set[torch.device]] = []

    class Stacks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.stack.default:
                places.append({tensor.device for tensor in args[0]})
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(shape_env=ShapeEnv()), Stacks():
        parameters = {name: torch.nn.Parameter(torch.zeros(3, device=device)) for name, device in (
            ("embed_tokens.modules_to_save.default.weight", CPU), ("layers.0.q_proj.lora_A.default.weight", CARD))}
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        total, _ = gradient_norms(parameters)
    assert places and all(len(devices) == 1 for devices in places)
    assert total.device == CARD


def test_the_usual_optimizer_is_transformers_own_and_a_step_of_it_takes_no_memory_on_a_card(tmp_path: Path) -> None:
    config, held = GRPOConfig(learning_rate=0.1, weight_decay=0.1), torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    assert config.optim == transformers.TrainingArguments(str(tmp_path), use_cpu=True).optim
    optimizer = make_optimizer([held], config)
    assert not allocates_each_step(optimizer, CARD)
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


def parameters(count: int = 6, device: torch.device = CPU) -> list[nn.Parameter]:
    """Matrices, a vector and a single number, with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(3, 5), (4096, 2), (7,), ()]
    made = [nn.Parameter(torch.randn(shapes[n % 4], generator=generator).to(device)) for n in range(count)]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def make(name: str, held: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name.startswith("adamw"):
        return torch.optim.AdamW(held, lr=0.1, fused=name == "adamw_fused")
    import bitsandbytes

    return {"8bit": bitsandbytes.optim.AdamW8bit, "paged": bitsandbytes.optim.PagedAdamW8bit}[name](held, lr=0.1)


NAMES = ["adamw", "adamw_fused", "8bit", "paged"]


def everything(optimizer: torch.optim.Optimizer, held: list[nn.Parameter]) -> dict[Any, Tensor]:
    """The values of parameters and states, by number, name and the tensor itself."""
    found = {number: parameter.detach().clone() for number, parameter in enumerate(held)}
    return found | {(number, name, id(value) if torch.is_tensor(value) else 0): torch.as_tensor(value).clone()
                    for number, parameter in enumerate(held)
                    for name, value in optimizer.state.get(parameter, {}).items()}


def same(first: dict[Any, Tensor], second: dict[Any, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@every_row("name", NAMES)
@every_row("steps", [0, 1, 3])
def test_a_step_that_is_undone_leaves_nothing_changed(name: str, steps: int) -> None:
    held = parameters()
    optimizer = make(name, held)
    copy = OptimizerCopy(optimizer, each_step=True)
    for _ in range(steps):
        assert copy.copy_state(held)
        optimizer.step()
    before = everything(optimizer, held)
    assert copy.copy_state(held)
    optimizer.step()
    assert not same(everything(optimizer, held), before)
    copy.restore()
    assert same(everything(optimizer, held), before)


def test_a_parameter_that_is_new_to_the_optimizer_is_restored_too() -> None:
    held = parameters()
    optimizer = make("adamw_fused", held)
    copy = OptimizerCopy(optimizer, each_step=False)
    later = held[0].grad
    held[0].grad = None
    assert copy.copy_state(held[1:])
    optimizer.step()
    assert not copy.copy_state(held[1:]), "all states are there"
    held[0].grad = later
    before = everything(optimizer, held)
    assert copy.copy_state(held)
    optimizer.step()
    copy.restore()
    assert same(everything(optimizer, held), before)


class Fresh(TorchDispatchMode):
    """Bytes of results that share no memory with what an operation was given."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in flat((args, kwargs or {}))}
        self.bytes += sum(t.nbytes for t in flat(out) if t.untyped_storage().data_ptr() not in given)
        return out


def flat(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if torch.is_tensor(leaf)]


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_that_is_said_to_work_in_place_allocates_nothing(name: str) -> None:
    held = parameters()
    optimizer = make(name, held)
    optimizer.step()
    with Fresh() as fresh:
        optimizer.step()
    assert allocates_each_step(optimizer, CPU) == (name != "adamw_fused")
    assert name != "adamw_fused" or not fresh.bytes
    assert name != "adamw" or fresh.bytes  # what bitsandbytes does within its own operations is not seen


@gpu
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_that_is_said_to_work_in_place_allocates_nothing_on_a_card(name: str) -> None:
    held = parameters(device=CARD)
    optimizer = make(name, held)
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(CARD)["allocation.all.allocated"]
    optimizer.step()
    allocated = torch.cuda.memory_stats(CARD)["allocation.all.allocated"] - before
    assert allocates_each_step(optimizer, CARD) or not allocated


def test_every_step_uses_the_same_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    held = parameters(40)
    optimizer = make("adamw", held)
    optimizer.step()
    copy, taken, empty = OptimizerCopy(optimizer, each_step=True), list[Any](), torch.empty
    monkeypatch.setattr(optim.torch, "empty", lambda *args, **options: taken.append(args) or empty(*args, **options))
    for _ in range(4):
        copy.copy_state(held)
        optimizer.step()
    assert len(taken) == 1
    with Fresh() as fresh:
        copy.copy_state(held)
    assert fresh.bytes == 0


def test_paged_states_are_read_only_after_kernels_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(optim.torch.cuda, "synchronize", waited.append)
    paged, card = torch.zeros(3), cast(Tensor, SimpleNamespace(device="cuda:0", is_cuda=True))
    optim.wait_for_paged([paged], [card])
    assert waited == []
    paged.is_paged = True  # type: ignore[attr-defined]
    optim.wait_for_paged([paged], [card])
    assert waited == ["cuda:0"]
