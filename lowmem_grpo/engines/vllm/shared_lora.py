"""The adapter that an engine samples with: the trainer's active adapter, copied to fixed addresses.

An engine reads the same tensors in every call, in its compute dtype, with those of one layer adjacent in memory. They
are filled before each call: with the active adapter, another one, or zeros for the base model.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.engines.vllm.shared_linear import ADVICE, BorrowError
from lowmem_grpo.kernels.lora import LoRA

Loras = Mapping[str, Sequence[LoRA | None]]  # by engine layer, one per trainer module behind it


def active_in(modules: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return the name of the active adapter of modules, given by path (None if no layer has one), and whether peft has
    disabled it. BorrowError if several are active, or it is disabled in only some layers."""
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
    check_kind(path, module, name)
    if name is None or name not in getattr(module, "lora_A", {}):
        return None
    a, b = module.lora_A[name].weight, module.lora_B[name].weight
    base, rank = module.base_layer, a.shape[0]
    if (tuple(a.shape), tuple(b.shape)) != ((rank, base.in_features), (base.out_features, rank)):
        raise BorrowError(f"{path}: adapter {name!r} has factors {tuple(a.shape)} and {tuple(b.shape)}; the layer "
                          f"needs (rank, {base.in_features}) and ({base.out_features}, rank)")
    return LoRA(a.detach(), b.detach(), float(module.scaling[name]))


def check_kind(path: str, module: Any, name: str | None) -> None:
    """Raise BorrowError for adapters that are not plain LoRA."""
    kind = type(module).__name__
    if hasattr(module, "base_layer") and not hasattr(module, "lora_A"):
        raise BorrowError(f"{path} has an adapter of another kind than LoRA ({kind}), which an engine cannot apply. "
                          'Sample with fast_inference="transformers"')
    special = name in getattr(module, "lora_variant", {}) or getattr(module, "lora_bias", {}).get(name)
    if special:
        raise BorrowError(f"{path}: adapter {name!r} is a variant of LoRA (DoRA or the like, or with its own bias), "
                          'which an engine cannot apply. Sample with fast_inference="transformers"')


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
    """Copy the values of `sources` into `targets` in place; smaller ranks are padded with zeros, other scales are
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
        """Allocate memory for `loras`."""
        size = sum(lora.a.numel() + lora.b.numel() for lora in loras)
        self.room, self.taken = torch.zeros(size, dtype=dtype, device=device), 0
        self.sampled: dict[str, list[LoRA | None]] = {}  # by engine layer, the LoRA tensors that the engine reads

    def slot(self, layer: str, live: Sequence[LoRA | None]) -> list[LoRA | None]:
        """Return the engine's LoRA tensors of a layer; new ones are filled with the values of `live`."""
        if layer not in self.sampled:
            self.sampled[layer] = self.carve(live)
            fill({layer: self.sampled[layer]}, {layer: live})
        return self.sampled[layer]

    def carve(self, live: Sequence[LoRA | None]) -> list[LoRA | None]:
        """Take tensors for the LoRAs of one layer from `room`: first all A factors, then all B factors."""
        present, places = [lora for lora in live if lora is not None], list[Tensor]()
        for like in [*(lora.a for lora in present), *(lora.b for lora in present)]:
            places.append(self.room[self.taken : self.taken + like.numel()].view(like.shape))
            self.taken += like.numel()
        pairs = iter(zip(places[: len(present)], places[len(present) :], strict=True))
        return [None if lora is None else LoRA(*next(pairs), lora.scale) for lora in live]

    def use_adapter(self, live: Loras) -> Hashable:
        """Sample with `live`; return a hash of its tensors' addresses and torch version counters. The counters miss the
        writes of bitsandbytes optimizers through raw addresses, so the values are always copied."""
        fill(self.sampled, live)
        tensors = [tensor for loras in live.values() for lora in loras if lora is not None
                   for tensor in (lora.a, lora.b)]
        return hash(tuple((tensor.data_ptr(), tensor._version) for tensor in tensors))
