"""What is sent to the host comes back as it was: the order of copies, changes in place, pages used again."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from checkpointed_stack import LAYERS, LateCopies, Stack, grads, inputs, offloading, same, step
from torch import Tensor, nn

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(8, 40), "bfloat16": lambda: torch.randn(8, 40).bfloat16(),
    "float64": lambda: torch.randn(8, 40, dtype=torch.float64), "transposed": lambda: torch.randn(8, 40).T,
    "channels last": lambda: torch.randn(2, 4, 6, 8).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(1, 300).expand(5, 300), "a leaf without grad": lambda: torch.randn(100).detach(),
    "half of the columns": lambda: torch.randn(20, 40)[:, 20:],
    "from within a storage": lambda: torch.randn(2000)[700:1400],
}


def test_a_tensor_comes_back_with_its_values_strides_and_dtype() -> None:
    for name, make in LAYOUTS.items():
        tensor = make()
        expected, strides = tensor.clone(), tensor.stride()
        offload = offloading(nn.Linear(1, 1))
        packed = [offload.pack(tensor), *(offload.pack(torch.randn(100)) for _ in range(2))]
        del tensor  # two more have gone since: the device no longer keeps it
        back = offload.unpack(packed[0])
        assert "back" in offload.store.copies.log, name
        assert torch.equal(back, expected), name
        assert (back.stride(), back.dtype) == (strides, expected.dtype), name


def test_views_of_one_tensor_are_told_apart() -> None:
    base = torch.randn(30, 30)
    views = [base, base.T, base[:25], base.view(900), base[5:], base]
    offload = offloading(nn.Linear(1, 1))
    packed = [offload.pack(view) for view in views]
    assert packed[0] is packed[-1]
    assert offload.store.copies.log.count("out") == 5
    for saved, view in zip(packed, views, strict=True):
        assert torch.equal(offload.unpack(saved), view)


# The order of copies


@pytest.mark.parametrize("ahead", [False, True])
def test_at_most_two_copies_are_under_way_and_one_tensor_and_the_one_read_ahead_are_on_the_device(ahead: bool) -> None:
    model = Stack(12)
    offload = offloading(model)
    offload.read_ahead(ahead)
    most: list[int] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: most.append(len(offload.store.residents)))
    assert same(step(model, offload), step(Stack(12), nullcontext()))
    waits = [word for word in offload.store.copies.log if word.startswith("wait")]
    assert len(waits) == len(set(waits)) == offload.store.copies.started
    assert (len(most), max(most)) == (24, 1 + ahead)
    assert not ahead or (offload.store.copies.most, offload.store.residents) == (2, {})


def test_backward_brings_the_next_layers_input_while_one_is_recomputed() -> None:
    model = Stack(6)
    offload = offloading(model)
    arrived: list[tuple[int, int]] = []  # copies back when a layer is recomputed: started, waited for
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: arrived.append(count(offload.store.copies)))

    def count(copies: LateCopies) -> tuple[int, int]:
        started = [word for word in copies.log if not word.startswith("wait")]
        backs = [number + 1 for number, word in enumerate(started) if word == "back"]
        return len(backs), sum(number <= copies.started - len(copies.pending) for number in backs)

    with offload:
        out = model(inputs()[0], torch.ones(1))
    del arrived[:]
    out.sum().backward()
    # the last layer's input never left; one copy is always ahead of those that were waited for, until none is left
    assert arrived == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (5, 5)]


def test_a_tensor_that_backward_wants_at_once_is_not_copied_back() -> None:
    offload = offloading(nn.Linear(1, 1))
    first, second = (inputs(seed)[0] for seed in (1, 2))
    packed = [offload.pack(first), offload.pack(second)]
    for saved, original in zip(packed[::-1], (second, first), strict=True):
        back = offload.unpack(saved)
        assert back.data_ptr() == original.data_ptr()
    assert offload.store.copies.log.count("back") == 0


def test_any_order_of_backward_gets_the_right_tensors() -> None:
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3], [3, 3, 0, 0, 4, 4]):
        offload = offloading(nn.Linear(1, 1))
        originals = [torch.randn(100) for _ in range(5)]
        expected = [original.clone() for original in originals]
        packed: list[Any] = [offload.pack(original) for original in originals]
        del originals
        for index in order:
            assert torch.equal(offload.unpack(packed[index]), expected[index])
            assert len(offload.store.residents) <= 2
        del packed
        assert offload.host_bytes == 0
        assert offload.store.residents == {}


def test_the_copy_that_is_ahead_is_the_one_that_backward_wants_next() -> None:
    for given, ahead in (
        ([5, 4, 3], 2), ([0, 1, 2], 3), ([5, 4, 3, 2, 1, 0, 5, 4], 3), ([5, 1, 4, 1, 3, 1, 2, 1], 0), ([5, 5, 4, 4], 3),
    ):
        offload = offloading(nn.Linear(1, 1))
        packed: list[Any] = [offload.pack(torch.randn(100)) for _ in range(6)]
        for index in given:
            offload.unpack(packed[index])
        assert set(offload.store.residents) == {given[-1], ahead}


# Changes in place


@pytest.mark.parametrize("size", [10, 900])
def test_a_saved_tensor_changed_in_place_is_an_error_as_without_hooks(size: int) -> None:
    for context in (nullcontext(), offloading(nn.Linear(1, 1))):
        with context:
            base = torch.randn(size, requires_grad=True) * 1
            loss = base.square().sum()
        base.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            loss.backward()


def test_a_tensor_changed_while_it_is_copied_is_an_error_even_when_it_left_the_device_since() -> None:
    offload = offloading(nn.Linear(1, 1))
    tensor = torch.randn(900)
    packed = offload.pack(tensor)
    tensor.add_(1)
    others = [offload.pack(torch.randn(900)) for _ in range(3)]
    with pytest.raises(RuntimeError, match=r"shape \(900,\).*clone it before"):
        offload.unpack(packed)
    assert len(others) == 3


def test_a_tensor_changed_after_it_was_copied_comes_back_as_it_was_saved() -> None:
    offload = offloading(nn.Linear(1, 1))
    tensor = torch.randn(900)
    before = tensor.clone()
    packed = [offload.pack(tensor), *(offload.pack(torch.randn(900)) for _ in range(2))]
    tensor.add_(1)
    assert torch.equal(offload.unpack(packed[0]), before)
    again = offload.pack(tensor)
    assert again is not packed[0]
    assert torch.equal(offload.unpack(again), before + 1)


def test_a_backward_that_writes_to_what_it_got_does_not_change_what_comes_next_time() -> None:
    offload = offloading(nn.Linear(1, 1))
    tensors = [torch.randn(900) for _ in range(4)]
    packed: list[Any] = [offload.pack(tensor) for tensor in tensors]
    offload.unpack(packed[0]).zero_()
    assert torch.equal(offload.unpack(packed[0]), tensors[0])


# Host memory


def test_every_step_brings_each_layers_input_back_once() -> None:
    model = Stack()
    offload = offloading(model)
    for steps in (1, 2, 3):
        torch.manual_seed(0)
        with offload:
            out = model(inputs()[0], torch.ones(1))
        out.sum().backward()
        log = offload.store.copies.log
        assert log.count("out") == steps * (LAYERS + 1)  # and what square() saves
        assert log.count("back") == steps * (LAYERS - 1)  # two were on their way and are given as they are


def test_a_tensor_that_every_layer_reads_does_not_upset_what_is_ahead() -> None:
    model = Stack(20)
    offload = offloading(model)
    step(model, offload)
    assert offload.store.copies.log.count("back") <= 20 + 20 + 1  # hidden and `other` once a layer


def test_release_gives_back_what_no_graph_holds() -> None:
    model = Stack()
    offload = offloading(model)
    step(model, offload)
    with offload:
        out = model(*inputs(tokens=8))
    offload.release()
    assert len(offload.store.pool.storages()) * 512 == offload.host_bytes
    assert (offload.store.copies.drained, offload.store.copies.trimmed) == (1, 1)
    out.sum().backward()
    assert offload.host_bytes == 0
    grads(model)
    assert same(step(model, offload), step(model, nullcontext()))
