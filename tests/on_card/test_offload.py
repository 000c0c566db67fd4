"""Layer inputs on the host by a real side stream, with copies and computation forced to be late: no race, no growth.

On the CPU the copies are those of late_copies.py, which are as late as anything waits for them."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from card import CARD, CPU, DEVICES, HALVES, gpu
from late_copies import LateCopies
from small_models import random_model, with_adapter
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_grpo.offload.activations import ActivationOffload, enable_checkpointing
from lowmem_grpo.offload.pages import PagePool, StreamCopies

CYCLES = 4_000_000  # of the card's clock: a few milliseconds, far more than any copy or layer here takes
WIDTH, LAYERS = 256, 12
LATE = ["copies out", "copies back", "all copies", "computation", "nothing"]


class SlowCopies(StreamCopies):
    """The side stream of a card, on which copies begin late; `late` says which."""

    def __init__(self, late: str) -> None:
        super().__init__(CARD)
        self.late, self.pages = late, 0

    def page(self, num_bytes: int) -> Tensor:
        self.pages += 1
        return super().page(num_bytes)

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        direction = "copies back" if pairs[0][0].is_cuda else "copies out"
        if self.late in (direction, "all copies"):
            with torch.cuda.stream(self.side):
                torch.cuda._sleep(CYCLES)
        return super().start(pairs)


class Layer(nn.Module):
    """Reads two tensors, and computes next to nothing; the computation may be late."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.mix, self.late = nn.Linear(WIDTH, WIDTH), late

    def forward(self, hidden: Tensor, other: Tensor) -> Tensor:
        if self.late and hidden.is_cuda:
            torch.cuda._sleep(CYCLES)
        return hidden + torch.tanh(self.mix(hidden)) * other


class Stack(nn.Module):
    """Checkpointed layers."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(late) for _ in range(LAYERS))

    def forward(self, hidden: Tensor, other: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, other, use_reentrant=False)
        return hidden.square()


def offloading(model: nn.Module, device: torch.device, late: str = "nothing") -> ActivationOffload:
    """Sends everything of 1 KiB or more, in pages so small that a layer's input needs many."""
    copies: Any = SlowCopies(late) if device == CARD else LateCopies()
    return ActivationOffload(model, copies, min_bytes=1024, page_bytes=16384)


def step(model: nn.Module, context: Any, device: torch.device, seed: int = 1, tokens: int = 300) -> list[Tensor]:
    """Gradients of one forward and backward; what was freed meanwhile is written over at once."""
    generator = torch.Generator().manual_seed(seed)
    hidden, other = (torch.randn(tokens, WIDTH, generator=generator).to(device).requires_grad_() for _ in range(2))
    with context:
        loss = model(hidden * 1.5, other * 0.5).sum()
    for _ in range(4):
        torch.full((tokens, WIDTH), float("nan"), device=device)
    loss.backward()
    found = [parameter.grad.cpu() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Equal bit for bit, and not nothing."""
    assert len(ours) == len(theirs) > 0
    assert all(gradient.abs().sum() > 0 for gradient in theirs)
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("device", "late"), [
    pytest.param(CPU, "all copies", id="cpu"),  # where nothing else can be late
    *(pytest.param(CARD, late, marks=gpu, id=f"cuda {late}") for late in LATE),
])
def test_neither_a_late_copy_nor_a_late_layer_changes_a_gradient(device: torch.device, late: str) -> None:
    model = Stack(late == "computation").to(device)
    offload = offloading(model, device, late)
    expected = step(model, nullcontext(), device)
    for _ in range(3):  # the second and third use pages and memory again that copies may still be reading
        assert same(step(model, offload, device), expected)
    assert offload.host_bytes == 0 and offload.host_bytes_peak > (LAYERS - 1) * 300 * WIDTH * 4


@pytest.mark.parametrize("device", DEVICES)
def test_host_memory_does_not_grow_with_steps_or_micro_batches(device: torch.device) -> None:
    model = Stack().to(device)
    offload = offloading(model, device, "all copies")
    step(model, offload, device)
    pages = {storage.data_ptr() for storage in offload.host_storages()}
    assert len(pages) * 16384 == offload.host_bytes_peak
    for seed, tokens in ((2, 300), (3, 211), (4, 64), (5, 300)):
        assert same(step(model, offload, device, seed, tokens), step(model, nullcontext(), device, seed, tokens))
        assert {storage.data_ptr() for storage in offload.host_storages()} == pages


@pytest.mark.parametrize("device", DEVICES)
def test_two_graphs_at_once_do_not_disturb_each_other(device: torch.device) -> None:
    model = Stack().to(device)
    offload, losses = offloading(model, device, "all copies"), []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        hidden, other = (torch.randn(300, WIDTH, generator=generator).to(device).requires_grad_() for _ in range(2))
        with offload:
            losses.append(model(hidden * 1.5, other * 0.5).sum())
    for seed, loss in ((1, losses[0]), (2, losses[1])):
        loss.backward()
        found = [parameter.grad.cpu() for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        assert same(found, step(model, nullcontext(), device, seed))


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_transformers_model_with_dropout_has_the_same_gradients(
    device: torch.device, dtype: torch.dtype, family: str
) -> None:
    model = with_adapter(random_model(family), lora_dropout=0.2).to(device, dtype).train()
    model.get_base_model().set_attn_implementation("eager")  # the same bits every time
    ids = torch.randint(3, 380, (1, 96), generator=torch.Generator().manual_seed(2)).to(device)

    def gradients(mode: bool | str, context: Any) -> list[Tensor]:
        enable_checkpointing(model.get_base_model(), mode)
        torch.manual_seed(3)
        with context:
            logits = model(input_ids=ids, use_cache=False).logits
        logits.float().log_softmax(-1)[..., 5].mean().backward()
        found = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad(set_to_none=True)
        return found

    offload = offloading(model, device, "all copies")
    kept, recomputed = gradients(False, nullcontext()), gradients(True, nullcontext())
    assert same(recomputed, kept)
    for _ in range(2):
        assert same(gradients("offload", offload), recomputed)
    assert offload.host_bytes_peak >= 2 * 96 * 32 * dtype.itemsize


@gpu
def test_pages_are_pinned_and_given_back() -> None:
    pool = PagePool(StreamCopies(CARD))
    pages = pool.take(3 * pool.page_bytes)
    assert all(page.is_pinned() for page in pages)
    values = torch.randn(3 * pool.page_bytes // 4, device=CARD)
    pool.copies.start(list(pool.pairs(pages, values)))
    pool.copies.drain()
    assert torch.equal(torch.cat(pages).view(torch.float32), values.cpu())
    pool.give(pages)
    del pages
    pool.release()
    assert pool.storages() == []


@gpu
def test_the_device_holds_a_few_layer_inputs_however_many_micro_batches_there_are() -> None:
    model, peaks = Stack().to(CARD), []
    tokens = 8192
    one = tokens * WIDTH * 4
    for context, batches in ((nullcontext(), 1), (offloading(model, CARD), 1), (offloading(model, CARD), 5)):
        for _ in range(2):  # what is made once is made
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            for seed in range(batches):
                step(model, context, CARD, seed, tokens)
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    plain, offloaded, many = peaks
    assert plain - offloaded >= (LAYERS - 4) * one
    assert many <= 1.01 * offloaded


@gpu
def test_copies_run_beside_the_computation() -> None:
    """With pinned pages Python does not wait: it is done long before the card is."""
    model = Stack(late=True).to(CARD)
    offload = offloading(model, CARD)
    step(model, offload, CARD)
    hidden, other = (torch.randn(300, WIDTH, device=CARD, requires_grad=True) for _ in range(2))
    torch.cuda.synchronize()
    with offload:
        loss = model(hidden * 1.5, other * 0.5).sum()
    still_computing = not torch.cuda.current_stream().query()
    loss.backward()
    assert still_computing
