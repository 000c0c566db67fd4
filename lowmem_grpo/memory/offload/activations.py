"""Gradient checkpointing: keep only each layer's input, on the device or on the host, and recompute the rest; or let
the last layers keep everything, as far as there is room.

A layer checkpointed by `torch.utils.checkpoint` (non-reentrant) saves its inputs as ordinary saved tensors. Hooks copy
them to pinned host memory while the next layer computes. Backward prefetches the next layer's inputs while it
recomputes a layer.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from lowmem_grpo.memory.offload.pages import PAGE_BYTES, Copies, StreamCopies
from lowmem_grpo.memory.offload.store import HostStore, Offloaded, check_untouched, span

AUTO = "auto"  # as "offload", and on a card the memory plan lets the last layers keep everything where there is room
MODES = (True, False, "offload", AUTO)
ALIASES = {"unsloth": AUTO}
MIN_BYTES = 2**20  # below this, a copy costs more than the memory is worth


def checkpointing_mode(value: bool | str) -> bool | str:
    """Return True, False, "offload" or "auto" for the user's value; ValueError for any other value."""
    mode = ALIASES.get(value, value) if isinstance(value, str) else value
    if mode not in MODES:
        raise ValueError(f"use_gradient_checkpointing is {value!r}; allowed are True, False, "
                         '"offload", "auto" and its alias "unsloth"')
    return mode


def enable_checkpointing(model: Any, mode: bool | str) -> bool | str:
    """Switch a transformers model's layer checkpointing on or off, and return the mode. Layers save random states if
    training now draws random numbers (see `drops`). ValueError if no layer supports checkpointing."""
    mode = checkpointing_mode(mode)
    if not mode:
        if hasattr(model, "gradient_checkpointing_disable"):
            model.gradient_checkpointing_disable()
        return mode
    if getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": drops(model)})
        # transformers makes the embeddings' output require a gradient, for reentrant checkpointing; here that would
        # only keep it, and its gradient, on the device
        model.disable_input_require_grads()
    if not checkpointed_layers(model):
        raise ValueError(f"no layer of {type(model).__name__} takes gradient checkpointing; set "
                         "use_gradient_checkpointing=False, or derive its layers from transformers.modeling_layers."
                         "GradientCheckpointingLayer and set supports_gradient_checkpointing = True in the model's "
                         "class")
    return mode


def drops(model: Any) -> bool:
    """Return whether training draws random numbers: a dropout rate, of a module or in the config, is above 0."""
    rates = vars(model.config.get_text_config()) if hasattr(model, "config") else {}
    rated = any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in rates.items())
    return rated or any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def drop_nothing(model: Any) -> None:
    """Turn off every dropout of a PEFT model permanently."""
    config = model.get_base_model().config.get_text_config()
    for name, rate in vars(config).items():
        if "drop" in name and isinstance(rate, float):
            setattr(config, name, 0.0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.ModuleDict):  # LoRA's; its fast path needs Identity
            module.update({name: nn.Identity() for name, child in module.items() if isinstance(child, nn.Dropout)})
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers with checkpointing on; not those of a frozen tower of images, which have no gradient."""
    return [module for path, module in model.named_modules() if ".visual." not in path and is_checkpointed(module)]


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether a module is a layer with checkpointing on. A whole model with the same flag does not count."""
    flag = bool(getattr(module, "gradient_checkpointing", False))
    return flag and not hasattr(module, "gradient_checkpointing_enable")


def keep_last(model: nn.Module, count: int) -> list[nn.Module]:
    """Let the last `count` checkpointed layers keep all that they compute; return these layers. Backward begins with
    them, so their memory is free when the first layer is recomputed."""
    layers = checkpointed_layers(model)
    kept = layers[max(0, len(layers) - count) :]
    for layer in kept:
        layer.gradient_checkpointing = False  # type: ignore[assignment]
    return kept


def kept_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that `keep_last` has exempted from checkpointing in a checkpointed model."""
    if not checkpointed_layers(model):
        return []
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", None) is False
            and not hasattr(module, "gradient_checkpointing_enable")]


def offload_activations(model: nn.Module | torch.device | str, enabled: bool = True) -> AbstractContextManager:
    """Return a context for forward passes, in which the tensors saved by checkpointed layers move to pinned host
    memory. On the CPU it changes nothing. If `model` is a device, only nn.Parameters are recognised as weights."""
    return ActivationOffload(model) if enabled else nullcontext()


@dataclass(eq=False)
class Kept:
    """The graph's reference to a tensor that stays on its device."""

    tensor: Tensor
    version: int


class ActivationOffload:
    """A reusable context around forward passes, which offloads saved tensors and reuses its host pages. Backward may
    run inside or outside of it, in any order, twice, or never: pages become free when the graph drops their tensor.
    `copies` replaces the CUDA side stream (for tests and fake tensors)."""

    def __init__(
        self, model: nn.Module | torch.device | str, copies: Copies | None = None, min_bytes: int = MIN_BYTES,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        self.model = model if isinstance(model, nn.Module) else None
        self.device = device_of(model) if isinstance(model, nn.Module) else torch.device(model)
        if copies is None and self.device.type == "cuda":
            copies = StreamCopies(self.device)
        self.offloads = copies is not None  # False on the CPU
        self.store = HostStore(self.device, copies or Copies(), page_bytes)
        self.min_bytes = min_bytes
        self.weights: set[int] = set()  # see `storage_ids`
        self.entered: list[saved_tensors_hooks] = []
        self.kept = [] if self.model is None else kept_layers(self.model)  # what they save stays on the device
        self.hooks: list[RemovableHandle] = []
        self.inside = False  # True in the forward pass of a kept layer

    def __enter__(self) -> "ActivationOffload":
        if self.offloads:
            self.weights = storage_ids(self.model)
            self.store.start_backward()
            self.entered.append(saved_tensors_hooks(self.pack, self.unpack))
            self.entered[-1].__enter__()
            self.inside = False
            for layer in self.kept:
                self.hooks += [layer.register_forward_pre_hook(lambda *_: setattr(self, "inside", True)),
                               layer.register_forward_hook(lambda *_: setattr(self, "inside", False))]
        return self

    def __exit__(self, *error: object) -> None:
        if self.offloads:
            self.entered.pop().__exit__(*error)
            while self.hooks:
                self.hooks.pop().remove()

    def read_ahead(self, ahead: bool) -> None:
        """Set whether to prefetch the next tensor while another is in use. That hides the copy, but takes memory."""
        self.store.ahead = ahead

    @property
    def host_bytes(self) -> int:
        return self.store.pool.bytes_in_use

    @property
    def host_bytes_peak(self) -> int:
        """The highest `host_bytes` so far. So much host memory stays allocated until `release`."""
        return self.store.pool.peak_bytes

    def release(self) -> None:
        """Free the host pages that no graph needs; the next forward pass allocates new ones."""
        self.store.pool.release()

    def pack(self, tensor: Tensor) -> Kept | Offloaded:
        """Return the object that the graph stores for `tensor`. It is not `tensor`, which may refer to the graph."""
        stays = self.inside or not self.goes(tensor)
        return Kept(tensor.detach(), tensor._version) if stays else self.store.put(tensor)

    def unpack(self, packed: Kept | Offloaded) -> Tensor:
        """Return the saved tensor. RuntimeError if it was modified in place, which autograd does not check here."""
        if isinstance(packed, Offloaded):
            return self.store.get(packed)
        check_untouched(packed.tensor._version == packed.version, packed.tensor.size())
        return packed.tensor

    def goes(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor is offloaded: large, dense, floating point, and not a weight."""
        # a leaf that requires grad stays alive until it has its gradient, so a copy would free nothing
        weight = isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
        plain = tensor.layout == torch.strided and tensor.is_floating_point() and not tensor.is_neg()
        if weight or not plain or tensor.device.type != self.device.type:
            return False
        elements = span(tensor)
        sparse = elements > 2 * tensor.numel()  # a thin slice of a larger tensor: not worth copying the gaps
        large = elements * tensor.element_size() >= self.min_bytes
        return large and not sparse and storage_id(tensor) not in self.weights


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which the model computes: that of its parameters, except for those on the host. ValueError
    if it has no parameters, or is on several devices."""
    devices = {parameter.device for parameter in model.parameters()}
    away = sorted(devices - {torch.device("cpu")}, key=str)
    if len(away) > 1 or not devices:
        description = f"parameters on {', '.join(map(str, away))}" if away else "no parameters"
        raise ValueError(f"{type(model).__name__} has {description}; offloading needs a model on exactly one device")
    return away[0] if away else torch.device("cpu")


def storage_id(tensor: Tensor) -> int:
    """Return an id that is equal for tensors sharing a storage. Fake tensors, used for plans, have no `data_ptr()`, so
    this function alone reads a private attribute of torch. Checked with torch 2.13; a test fails if it moves."""
    return tensor.untyped_storage()._cdata


def storage_ids(model: nn.Module | None) -> set[int]:
    """Return the ids of the storages of weights and buffers. Checkpointed layers in train mode are skipped: they save
    only their inputs, and a walk through them, which hold nearly all modules, would take long."""
    if model is None or (model.training and is_checkpointed(model)):
        return set()
    own = {storage_id(tensor) for tensor in (*model.parameters(recurse=False), *model.buffers(recurse=False))}
    return own.union(*map(storage_ids, model.children()))
