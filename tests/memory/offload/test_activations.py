"""Layer inputs on the host: gradients bit for bit those of plain checkpointing, whatever backward does."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from checkpointed_stack import LAYER_INPUT, LAYERS, LateCopies, Stack, grads, inputs, offloading, same, step
from memory import LiveStorage
from small_models import random_model, with_adapter
from tables import every_row
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaConfig, LlamaForCausalLM

from lowmem_grpo.memory.offload.activations import (
    ActivationOffload,
    checkpointed_layers,
    enable_checkpointing,
    keep_last,
    offload_activations,
)
from lowmem_grpo.memory.offload.pages import Copies, host_bytes_needed


@every_row("nested", [False, True])
@every_row("inside", [False, True])
@every_row("copies", [Copies, LateCopies])
def test_gradients_are_those_of_plain_checkpointing_bit_for_bit(
    copies: Callable[[], Any], inside: bool, nested: bool
) -> None:
    model = Stack(nested=nested)
    offload = offloading(model, copies())
    assert same(step(model, offload, inside), step(model, nullcontext(), inside))
    assert offload.host_bytes_peak >= (LAYERS // 2 + 1 if nested else LAYERS) * LAYER_INPUT
    assert offload.host_bytes == 0


def test_on_the_cpu_and_switched_off_the_door_changes_nothing_and_holds_nothing() -> None:
    model = Stack()
    with offload_activations(model) as offload:
        saved = model(*inputs()).grad_fn._saved_self
    assert isinstance(offload, ActivationOffload)
    assert saved.grad_fn is not None
    for subject in (model, torch.device("cpu")):
        assert same(step(model, offload_activations(subject)), step(model, nullcontext()))
    assert (offload.host_bytes, offload.host_bytes_peak) == (0, 0)
    offload.release()
    assert isinstance(offload_activations(torch.device("cuda"), enabled=False), nullcontext)
    assert ActivationOffload("cpu").device == ActivationOffload(torch.device("cpu")).device == torch.device("cpu")


# What goes to the host


def test_of_checkpointed_layers_only_the_inputs_go_and_a_dropped_graph_gives_its_pages_back() -> None:
    model = Stack()
    offload = offloading(model)
    with offload, torch.no_grad():
        model(*inputs())
    assert (offload.store.copies.started, offload.host_bytes_peak) == (0, 0)
    with offload:
        out = model(*inputs())
    sent = offload.store.copies.log.count("out")
    assert sent == LAYERS + 2  # each layer's hidden, `other` once for all layers, and what square() saves
    assert offload.host_bytes == sent * LAYER_INPUT
    del out
    assert offload.host_bytes == 0 and offload.store.residents == {}
    assert same(step(model, offload), step(model, nullcontext()))


WEIGHT = nn.Linear(32, 32)
STAYING: dict[str, Tensor] = {
    "small": torch.randn(63), "empty": torch.randn(0, 900), "integers": torch.arange(900),
    "booleans": torch.ones(900, dtype=torch.bool), "sparse": torch.eye(90).to_sparse(),
    "complex": torch.randn(900, dtype=torch.complex64),
    "negated": torch.randn(900, dtype=torch.complex64).conj().imag, "a parameter": nn.Parameter(torch.randn(900)),
    "a leaf that requires grad": torch.randn(900, requires_grad=True), "a weight's view": WEIGHT.weight.detach().T,
    "a thin slice": torch.randn(900, 4)[:, 0], "on another device": torch.empty(900, device="meta"),
}


def test_what_is_no_large_activation_stays_where_it_is() -> None:
    for name, tensor in STAYING.items():
        offload = offloading(WEIGHT)
        with offload:
            back = offload.unpack(offload.pack(tensor))
        assert offload.store.copies.started == 0, name
        if tensor.layout == torch.strided:
            assert back.untyped_storage()._cdata == tensor.untyped_storage()._cdata, name
        assert (back.shape, back.dtype, back.layout) == (tensor.shape, tensor.dtype, tensor.layout), name


# What graphs do


def test_backward_twice_over_a_kept_graph_gives_the_same_gradients_twice() -> None:
    model = Stack()
    offload = offloading(model)
    torch.manual_seed(1)
    with offload:
        loss = model(*inputs()).sum()
    loss.backward(retain_graph=True)
    once = grads(model)
    assert offload.host_bytes > 0
    loss.backward()
    assert same(grads(model), once)
    assert offload.host_bytes == 0


def test_gradients_of_gradients_pass_through() -> None:
    model = Stack(2)

    def second(context: Any) -> list[Tensor]:
        torch.manual_seed(1)
        with context:
            hidden, other = inputs()
            (gradient,) = torch.autograd.grad(model(hidden, other).sum(), other, create_graph=True)
            gradient.square().sum().backward()
        return grads(model)

    assert same(second(offloading(model)), second(nullcontext()))


def test_a_forward_that_fails_gives_its_pages_back() -> None:
    model = Stack()
    offload = offloading(model)
    handle = model.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, offload)
    handle.remove()
    gc.collect()
    assert offload.host_bytes == 0
    assert same(step(model, offload), step(model, nullcontext()))


def test_contexts_may_be_entered_within_each_other() -> None:
    model = Stack()
    offload = offloading(model)
    torch.manual_seed(1)
    with offload, offload:
        loss = model(*inputs()).sum()
    with torch.enable_grad():
        outside = torch.randn(500, requires_grad=True).exp()
    loss.backward()
    assert same(grads(model), step(model, nullcontext()))
    assert outside.grad_fn._saved_result is not None
    assert offload.host_bytes == 0


def test_saved_results_do_not_keep_their_graph_alive() -> None:
    offload = offloading(nn.Linear(1, 1))
    with offload:
        for size in (10, 900):
            out = torch.randn(size, requires_grad=True).exp()  # saves its own result
            memory = StorageWeakRef(out.untyped_storage())
            del out
            offload.store.residents.clear()  # the copy that is under way may keep it
            assert memory.expired(), f"{size} entries"
    assert offload.host_bytes == 0


LLAMA: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 65536,
}


def fake_step(tokens: int, offloaded: bool, kept: int = 0) -> tuple[int, int, int, ActivationOffload | nullcontext]:
    """Peak bytes on the device, on the host and kept on the device after forward, of a Llama's step; fake tensors."""
    with FakeTensorMode():
        model = LlamaForCausalLM._from_config(LlamaConfig(**LLAMA), dtype=torch.bfloat16).requires_grad_(False)
        for layer in model.model.layers:
            layer.input_layernorm.weight.requires_grad_(True)
        enable_checkpointing(model.train(), True)
        keep_last(model, kept)
        offload = ActivationOffload(model, Copies()) if offloaded else nullcontext()
        counter = DeviceStorage(offload)
        with counter:
            with offload:
                hidden = model.model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)[0]
            after = counter.device
            hidden.sum().backward()
    return counter.device_peak, counter.host_peak, after, offload


class DeviceStorage(LiveStorage):
    """Counts an offload's pages apart."""

    def __init__(self, offload: Any) -> None:
        super().__init__()
        self.offload = offload
        self.device_peak = self.host_peak = 0

    @property
    def device(self) -> int:
        """Bytes on the device now."""
        return self.live - self.host

    @property
    def host(self) -> int:
        """Bytes on the host now."""
        if not isinstance(self.offload, ActivationOffload):
            return 0
        made = [storage for storage in self.offload.store.pool.storages() if storage._cdata in self.made]
        return sum(storage.nbytes() for storage in made)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.device_peak, self.host_peak = max(self.device_peak, self.device), max(self.host_peak, self.host)
        return result


def test_fake_tensors_tell_the_hosts_bytes_from_the_devices() -> None:
    tokens, one = 4096, 4096 * 1024 * 2
    plain_peak, nothing, plain_kept, _ = fake_step(tokens, offloaded=False)
    peak, host, kept, offload = fake_step(tokens, offloaded=True)
    assert isinstance(offload, ActivationOffload) and (nothing, host) == (0, offload.host_bytes_peak)
    assert 8 * one < host <= host_bytes_needed(8, tokens, 1024, torch.bfloat16) <= 1.25 * host
    assert plain_kept - kept >= 7 * one  # two inputs are on the device at the end of forward, as much as was saved
    assert plain_peak - peak >= 5 * one


@pytest.mark.slow
def test_what_kept_layers_save_stays_on_the_device_and_the_others_inputs_still_go() -> None:
    tokens, one = 4096, 4096 * 1024 * 2
    _, host, after, _ = fake_step(tokens, offloaded=True)
    peak, fewer, more, offload = fake_step(tokens, offloaded=True, kept=4)
    assert isinstance(offload, ActivationOffload) and not offload.hooks, "no hook stays behind"
    assert host - fewer == 4 * one
    assert more - after >= 4 * 10 * one, "norms, q, k, v, attention and MLP of four layers"
    assert peak >= more


# Switching checkpointing on


@pytest.mark.parametrize("mode", [True, "offload", "unsloth"])
def test_every_layer_is_checkpointed_and_the_embeddings_need_no_gradient(mode: bool | str) -> None:
    model = random_model("Llama").train()
    assert enable_checkpointing(model, mode) == (mode if mode != "unsloth" else "auto")
    assert len(checkpointed_layers(model)) == 2
    model.requires_grad_(False)
    assert not model.model.embed_tokens(torch.tensor([1])).requires_grad
    assert enable_checkpointing(model, False) is False
    assert checkpointed_layers(model) == []
    adapted = with_adapter(model)
    enable_checkpointing(adapted, mode)
    assert len(checkpointed_layers(adapted)) == 2


class Deaf(nn.Module):
    """A model of transformers' shape whose layers know nothing of checkpointing."""

    supports_gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.gradient_checkpointing = False

    def gradient_checkpointing_enable(self, options: dict[str, Any]) -> None:
        self.gradient_checkpointing = True

    def disable_input_require_grads(self) -> None:
        pass


@pytest.mark.parametrize("model", [Deaf(), nn.Linear(2, 2)])
def test_a_model_whose_layers_ignore_checkpointing_is_refused_by_name(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=rf"no layer of {type(model).__name__} .*=False, .*GradientCheckpointingLayer"):
        enable_checkpointing(model, "offload")
    assert enable_checkpointing(model, False) is False


def test_a_transformers_model_that_says_no_and_an_unknown_mode_are_refused_by_name() -> None:
    model = random_model("Llama")
    type(model).supports_gradient_checkpointing, before = False, True
    try:
        with pytest.raises(ValueError, match="no layer of LlamaForCausalLM takes gradient checkpointing"):
            enable_checkpointing(model, True)
    finally:
        type(model).supports_gradient_checkpointing = before
    with pytest.raises(ValueError, match="use_gradient_checkpointing is 'disk'; allowed are True, False"):
        enable_checkpointing(nn.Linear(2, 2), "disk")


def test_the_model_computes_where_it_has_a_card_even_with_embeddings_on_the_host() -> None:
    model = nn.ModuleDict({"embed": nn.Linear(2, 2), "rest": nn.Linear(2, 2, device="meta")})
    assert ActivationOffload(model).device.type == "meta"
    assert ActivationOffload(nn.Linear(2, 2)).device.type == "cpu"
    with pytest.raises(ValueError, match=r"Tanh has no parameters; .*exactly one device"):
        ActivationOffload(nn.Tanh())
