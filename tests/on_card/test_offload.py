"""Layer inputs on the host by a real side stream, with copies and computation forced to be late: no race, no growth.

On the CPU the copies are those of late_copies.py, which are as late as anything waits for them."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from card import CARD, CPU, DEVICES, HALVES, gpu
from checkpointed_stack import Stack, grads, inputs, offloading, same, step
from small_models import random_model, with_adapter
from torch import Tensor

from lowmem_grpo.memory.offload.activations import ActivationOffload, enable_checkpointing
from lowmem_grpo.memory.offload.pages import PagePool, StreamCopies

CYCLES = 4_000_000  # of the card's clock: a few milliseconds, far more than any copy or layer here takes
WIDTH, LAYERS, PAGE = 256, 12, 16384
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


def made(device: torch.device, late: str = "nothing") -> tuple[Stack, ActivationOffload]:
    """A stack whose computation or copies may be late, and what sends its layers' inputs to the host."""
    model = Stack(LAYERS, width=WIDTH).to(device)
    if late == "computation":
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda *_: torch.cuda._sleep(CYCLES))
    return model, offloading(model, SlowCopies(late) if device == CARD else None, PAGE)


@pytest.mark.parametrize(("device", "late"), [
    pytest.param(CPU, "all copies", id="cpu"),  # where nothing else can be late
    *(pytest.param(CARD, late, marks=gpu, id=f"cuda {late}") for late in LATE),
])
def test_neither_a_late_copy_nor_a_late_layer_changes_a_gradient(device: torch.device, late: str) -> None:
    model, offload = made(device, late)
    expected = step(model, nullcontext(), tokens=300)
    for _ in range(3):  # the second and third use pages and memory again that copies may still be reading
        assert same(step(model, offload, tokens=300), expected)
    assert offload.host_bytes == 0 and offload.host_bytes_peak > (LAYERS - 1) * 300 * WIDTH * 4


@pytest.mark.parametrize("device", DEVICES)
def test_host_memory_does_not_grow_with_steps_or_micro_batches(device: torch.device) -> None:
    model, offload = made(device, "all copies")
    step(model, offload, tokens=300)
    pages = {storage.data_ptr() for storage in offload.store.pool.storages()}
    assert len(pages) * PAGE == offload.host_bytes_peak
    for seed, tokens in ((2, 300), (3, 211), (4, 64), (5, 300)):
        assert same(step(model, offload, False, seed, tokens), step(model, nullcontext(), False, seed, tokens))
        assert {storage.data_ptr() for storage in offload.store.pool.storages()} == pages


@pytest.mark.parametrize("device", DEVICES)
def test_two_graphs_at_once_do_not_disturb_each_other(device: torch.device) -> None:
    (model, offload), losses = made(device, "all copies"), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with offload:
            losses.append(model(*inputs(seed, 300, WIDTH, device)).sum())
    for seed, loss in ((1, losses[0]), (2, losses[1])):
        loss.backward()
        assert same(grads(model), step(model, nullcontext(), seed=seed, tokens=300))
    assert offload.host_bytes == 0


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.every(3)
def test_a_transformers_model_with_dropout_has_the_same_gradients(
    device: torch.device, dtype: torch.dtype, family: str
) -> None:
    model = with_adapter(random_model(family), lora_dropout=0.2).to(device, dtype).train()
    if device == CARD:
        model.get_base_model().set_attn_implementation("eager")  # the same bits every time
    ids = torch.randint(3, 380, (1, 96), generator=torch.Generator().manual_seed(2)).to(device)

    def gradients(mode: bool | str, context: Any) -> list[Tensor]:
        enable_checkpointing(model.get_base_model(), mode)
        torch.manual_seed(3)
        with context:
            logits = model(input_ids=ids, use_cache=False).logits
        logits.float().log_softmax(-1)[..., 5].mean().backward()
        return grads(model)

    offload = offloading(model, SlowCopies("all copies") if device == CARD else None, 2048)
    kept, recomputed = gradients(False, nullcontext()), gradients(True, nullcontext())
    assert len(kept) == 2 * 2 * 7
    assert same(recomputed, kept)
    for _ in range(2):
        assert same(gradients("offload", offload), recomputed)
    assert offload.host_bytes_peak >= 2 * 96 * 32 * dtype.itemsize


@gpu
def test_pages_are_pinned_and_given_back() -> None:
    pool = PagePool(StreamCopies(CARD))
    pages = pool.take_pages(3 * pool.page_bytes)
    assert all(page.is_pinned() for page in pages)
    values = torch.randn(3 * pool.page_bytes // 4, device=CARD)
    pool.copies.start(list(pool.pairs(pages, values)))
    pool.copies.drain()
    assert torch.equal(torch.cat(pages).view(torch.float32), values.cpu())
    pool.return_pages(pages)
    del pages
    pool.release()
    assert pool.storages() == []


@gpu
def test_the_device_holds_a_few_layer_inputs_however_many_micro_batches_there_are() -> None:
    (model, offload), peaks = made(CARD), []
    tokens = 8192
    one = tokens * WIDTH * 4
    for context, batches in ((nullcontext(), 1), (offload, 1), (offload, 5)):
        for _ in range(2):  # what is made once is made
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            for seed in range(batches):
                step(model, context, False, seed, tokens)
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    plain, offloaded, many = peaks
    assert plain - offloaded >= (LAYERS - 4) * one
    assert many <= 1.01 * offloaded


@gpu
def test_copies_run_beside_the_computation() -> None:
    """With pinned pages Python does not wait: it is done long before the card is."""
    model, offload = made(CARD, "computation")
    step(model, offload, tokens=300)
    hidden, other = inputs(1, 300, WIDTH, CARD)
    torch.cuda.synchronize()
    with offload:
        loss = model(hidden, other).sum()
    still_computing = not torch.cuda.current_stream().query()
    loss.backward()
    assert still_computing
