"""The weights that an engine holds of its own, beside those that it shares with the trainer: a copy of the adapter, and
base weights dequantized from 4 bits or FP8.

A kernel that reads quantized codes repeats the dequantization for each token. If memory has room between training
steps, the weights are dequantized once per sampling phase, into one buffer, and used in plain matrix products. The base
weights never change, so the values are bit for bit those that training computes with. Their dtype is the engine's
compute dtype: 16 bits on a card, 32 for a float32 model.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.engines.vllm.shared_linear import ADVICE, OTHER_ENGINE, BorrowError, Product
from lowmem_grpo.kernels.frozen_weight import lend
from lowmem_grpo.kernels.lora import LoRA
from lowmem_grpo.memory.layer_forms import BITS_16
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.time_plan import rows_of_codes
from lowmem_grpo.models.quantized_linear import form_of

ALIGN = 128  # numbers; each dequantized weight starts at a multiple
# Allocates uninitialized memory for a number of values; for CUDA graphs, at the same addresses each time
Room = Callable[[int, torch.dtype, torch.device], Tensor]
Loras = Mapping[str, Sequence[LoRA | None]]  # by engine layer, one per trainer module behind it


def active_in(modules: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return the name of the active adapter in `modules` (None if no layer has one), and whether peft has disabled it.
    BorrowError if several are active, or it is disabled in only some layers."""
    names = {name for module in modules.values() for name in active_names(module)}
    if len(names) > 1:
        raise BorrowError(f"adapters {sorted(names)} are active at once; an engine samples with one. Choose it with "
                          "model.set_adapter(NAME)")
    off = {path: bool(module.disable_adapters) for path, module in modules.items() if active_names(module)}
    if len(set(off.values())) > 1:
        layer = next(path for path, value in off.items() if value)
        raise BorrowError(f"the adapter is turned off in some layers ({layer}) and not in others; an engine samples "
                          "with all of them or with none")
    return next(iter(names), None), True in off.values()


def active_names(module: Any) -> list[str]:
    held = getattr(module, "lora_A", {})
    return [name for name in getattr(module, "active_adapters", []) if name in held]


def lora_of(path: str, module: Any, name: str | None) -> LoRA | None:
    """Return a module's LoRA of that name (not copied), or None. BorrowError if it is not plain LoRA."""
    kind = type(module).__name__
    if hasattr(module, "base_layer") and not hasattr(module, "lora_A"):
        raise BorrowError(f"{path} has an adapter of another kind than LoRA ({kind}), which an engine cannot apply. "
                          f"{OTHER_ENGINE}")
    if name in getattr(module, "lora_variant", {}) or getattr(module, "lora_bias", {}).get(name):
        raise BorrowError(f"{path}: adapter {name!r} is a variant of LoRA (DoRA or the like, or with its own bias), "
                          f"which an engine cannot apply. {OTHER_ENGINE}")
    if name is None or name not in getattr(module, "lora_A", {}):
        return None
    a, b = module.lora_A[name].weight, module.lora_B[name].weight
    base, rank = module.base_layer, a.shape[0]
    if (tuple(a.shape), tuple(b.shape)) != ((rank, base.in_features), (base.out_features, rank)):
        raise BorrowError(f"{path}: adapter {name!r} has factors {tuple(a.shape)} and {tuple(b.shape)}; the layer "
                          f"needs (rank, {base.in_features}) and ({base.out_features}, rank)")
    return LoRA(a.detach(), b.detach(), float(module.scaling[name]))


def check_same(targets: Loras, sources: Loras, name: str) -> None:
    """Raise BorrowError if an adapter's layers, shapes or scales have changed since the engine started."""
    for layer, target, source in pairs_of(targets, sources):
        forms = [form(target), form(source)]
        if forms[0] != forms[1]:
            raise BorrowError(f"{layer}: the shape or scale of adapter {name!r} changed while an engine samples with "
                              f"it: {forms[0]} before, {forms[1]} now. {ADVICE}")


def check_fits(targets: Loras, sources: Loras, name: str) -> None:
    """Raise BorrowError if an adapter does not fit into the engine's tensors: a layer too many, or a larger rank."""
    for layer, target, source in pairs_of(targets, sources):
        if source is None:
            continue
        place = "no LoRA" if target is None else f"rank {target.a.shape[0]}"
        if target is None or source.a.shape[0] > target.a.shape[0]:
            raise BorrowError(
                f"{layer}: adapter {name!r} has rank {source.a.shape[0]}, the one that this engine started with has "
                f"{place} there. Start an engine on a model whose adapter has at least this rank and these layers"
            )


@torch.no_grad()
def fill(targets: Loras, sources: Loras) -> None:
    """Copy the values of `sources` into `targets` in place. Smaller ranks are padded with zeros, a different scale is
    multiplied in, and a target without a source becomes zero."""
    pairs = [(target, source) for _, target, source in pairs_of(targets, sources) if target is not None]
    same = [(target, source) for target, source in pairs if source is not None and form(source) == form(target)]
    if same:  # all in a few launches, which also cast
        torch._foreach_copy_([tensor for target, _ in same for tensor in (target.a, target.b)],
                             [tensor.detach() for _, source in same for tensor in (source.a, source.b)])
    for target, source in pairs:
        if source is None or form(source) != form(target):
            rank = 0 if source is None else source.a.shape[0]
            target.a[rank:].zero_()
            target.b[:, rank:].zero_()
            if source is not None:
                target.a[:rank].copy_(source.a)
                target.b[:, :rank].copy_(source.b * (source.scale / target.scale))


def form(lora: LoRA | None) -> tuple[Any, ...] | None:
    """Return the shapes and scale of a LoRA, which may not change while an engine samples with it."""
    return None if lora is None else (lora.a.shape, lora.b.shape, lora.scale)


def pairs_of(targets: Loras, sources: Loras) -> Iterable[tuple[str, LoRA | None, LoRA | None]]:
    for layer, loras in targets.items():
        for target, source in zip(loras, sources[layer], strict=True):
            yield layer, target, source


class AdapterCopy:
    """The engine's copy of an adapter, in its compute dtype, contiguous, at fixed addresses.

    Each call samples with the adapter's values when the call begins. Memory is allocated before the engine starts,
    because vLLM owns, and may move, any memory that is allocated while it loads a model.
    """

    def __init__(self, loras: Sequence[LoRA], dtype: torch.dtype, device: torch.device) -> None:
        size = sum(lora.a.numel() + lora.b.numel() for lora in loras)
        self.room, self.taken = torch.zeros(size, dtype=dtype, device=device), 0
        self.sampled: dict[str, list[LoRA | None]] = {}  # by engine layer, the LoRA tensors that the engine reads

    def slot(self, layer: str, live: Sequence[LoRA | None]) -> list[LoRA | None]:
        """Return the engine's LoRAs of a layer, with all A before all B in memory. The first call for a layer makes
        them, with the values of the trainer's LoRAs `live`."""
        if layer not in self.sampled:
            present = [lora for lora in live if lora is not None]
            a = [self.next_tensor(lora.a) for lora in present]
            pairs = zip(a, [self.next_tensor(lora.b) for lora in present], strict=True)
            self.sampled[layer] = [None if lora is None else LoRA(*next(pairs), lora.scale) for lora in live]
            fill({layer: self.sampled[layer]}, {layer: live})
        return self.sampled[layer]

    def next_tensor(self, like: Tensor) -> Tensor:
        """Return the next unused piece of the buffer `room`, in the shape of `like`."""
        self.taken += like.numel()
        return self.room[self.taken - like.numel() : self.taken].view(like.shape)

    def use_adapter(self, live: Loras) -> Hashable:
        """Sample with `live`, and return a hash of its tensors' addresses and torch version counters. Values are copied
        in any case, because bitsandbytes optimizers write through raw addresses, which the counters miss."""
        fill(self.sampled, live)
        tensors = [tensor for loras in live.values() for lora in loras if lora is not None
                   for tensor in (lora.a, lora.b)]
        return hash(tuple((tensor.data_ptr(), tensor._version) for tensor in tensors))


def new_buffer(numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new tensor at each call, which is freed once unreferenced. So nothing may store its address."""
    return torch.empty(numbers, dtype=dtype, device=device)


def aligned(shape: Iterable[int]) -> int:
    """Return how many elements of the buffer a dequantized weight of this shape takes, with padding."""
    return -(-math.prod(shape) // ALIGN) * ALIGN


class SamplingWeights:
    """Dequantized weights of an engine's products with quantized matrices, which use them from `fill` to `drop`."""

    def __init__(self, products: Sequence[Product], dtype: torch.dtype, device: torch.device, room: Room,
                 few: int = 0) -> None:
        """Inputs of more than `few` rows will use the dequantized weights, and smaller ones the quantized codes."""
        self.pairs = [(product, product.weight) for product in products if product.weight.quantized]
        self.sizes = [aligned((product.rows, weight.shape[1])) for product, weight in self.pairs]
        self.dtype, self.device, self.room, self.few = dtype, device, room, few
        self.filled = False

    @property
    def nbytes(self) -> int:
        return sum(self.sizes) * self.dtype.itemsize

    @torch.no_grad()
    def fill(self) -> None:
        """Dequantize all weights, if that is not done yet, and make the products use them."""
        if self.filled:
            return
        with torch.inference_mode(False):
            parts = self.room(sum(self.sizes), self.dtype, self.device).split(self.sizes)
            for (product, weight), part in zip(self.pairs, parts, strict=True):
                size, product.few = (product.rows, weight.shape[1]), self.few
                product.wide = part[: math.prod(size)].view(size)
                weight.fill(product.wide[: weight.shape[0]])
                lend(weight, product.wide)
        self.filled = True
        self.take_adapter()

    @torch.no_grad()
    def take_adapter(self) -> None:
        """Copy the A that the engine samples with below the weights, where these are filled."""
        held = [(product.wide, weight.shape[0], product.stack_a) for product, weight in self.pairs
                if product.wide is not None and product.stack_a is not None]
        if held:
            torch._foreach_copy_([wide[rows : rows + len(a)] for wide, rows, a in held], [a for *_, a in held])

    def drop(self) -> None:
        """Stop using the buffer, whose contents may be lost; the products use quantized codes until the next `fill`."""
        for product, _ in self.pairs:
            product.wide = None
        self.filled = False


def few_rows(base: Any, device: torch.device) -> int:
    """Return the most input rows for which quantized codes are faster than dequantized weights; 0 if it is unknown."""
    known = known_of(base, device)
    return 0 if known is None else rows_of_codes(*known)


def known_of(base: Any, device: torch.device) -> tuple[ModelShape, str, str] | None:
    """Return a model's ModelShape, its card's name and its weights' form; None for unsupported configs, and without
    quantized weights."""
    form = form_of(base)
    try:
        shape = ModelShape.from_config(base.config)
    except ValueError:
        return None
    if form == BITS_16:
        return None
    return shape, torch.cuda.get_device_name(device) if device.type == "cuda" else device.type, form
