"""Optimizer steps that can be undone: what is copied, when, and what it costs."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from card import CARD, gpu
from tables import every_row
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_grpo.trainer import rewind
from lowmem_grpo.trainer.optim import allocates_each_step
from lowmem_grpo.trainer.rewind import OptimizerCopy

CPU = torch.device("cpu")


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
    monkeypatch.setattr(rewind.torch, "empty", lambda *args, **options: taken.append(args) or empty(*args, **options))
    for _ in range(4):
        copy.copy_state(held)
        optimizer.step()
    assert len(taken) == 1
    with Fresh() as fresh:
        copy.copy_state(held)
    assert fresh.bytes == 0


def test_paged_states_are_read_only_after_kernels_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(rewind.torch.cuda, "synchronize", waited.append)
    paged, card = torch.zeros(3), cast(Tensor, SimpleNamespace(device="cuda:0", is_cuda=True))
    rewind.wait_for_paged([paged], [card])
    assert waited == []
    paged.is_paged = True  # type: ignore[attr-defined]
    rewind.wait_for_paged([paged], [card])
    assert waited == ["cuda:0"]
