"""The frozen weights that are merged with an adapter, read one tensor at a time, by rows; those of a loaded model."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.frozen import FrozenStack
from lowmem_grpo.kernels.frozen_weight import FrozenWeight, frozen_weight
from lowmem_grpo.kernels.mxfp4 import MXFP4Weight
from lowmem_grpo.memory.families import experts_in_mxfp4
from lowmem_grpo.models.experts import STACKS, ExpertStack
from lowmem_grpo.models.quantized_linear import QuantizedLinear
from lowmem_grpo.models.trained_set import OF_ADAPTER
from lowmem_grpo.runs.adapter_file import PREFIX

WRAPPED = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.)")  # PEFT's names around a base's module
Rows = Callable[[int, int], Tensor]  # (start, stop) -> (stop - start, ...)
Parts = Callable[[int, int], FrozenWeight]  # the same of experts: (start, stop) -> (stop - start) * out, in


@dataclass(frozen=True)
class Weight:
    """A tensor of a model. `open` returns a reader of its rows, which keeps no other tensor in memory."""

    name: str  # as in a checkpoint
    shape: tuple[int, ...]
    dtype: torch.dtype
    open: Callable[[], Rows]
    step: int = 1  # a reader can only start at multiples of this many rows
    trained: bool = False  # has an adapter's own values, whole or in some rows
    packed: Parts | None = None  # of a stack of experts in MXFP4

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


def quantized_rows(weight: FrozenWeight) -> Rows:
    """Return a reader that dequantizes rows of a quantized weight to float32."""
    def rows(start: int, stop: int) -> Tensor:
        band = torch.empty(stop - start, weight.shape[1], device=weight.device)
        weight.fill(band, row=start)
        return band

    return rows


def rows_of(weight: FrozenWeight) -> Rows:
    """Return a reader of a frozen weight: quantized values in float32, others as they are."""
    return quantized_rows(weight) if weight.quantized else plain_rows(weight.tensors[0].detach(), None, weight.device)


def plain_rows(tensor: Any, dtype: torch.dtype | None, device: torch.device | str) -> Rows:
    """Return a reader of a tensor or of a slice of a file, which casts floating-point values to `dtype` if given."""
    def rows(start: int, stop: int) -> Tensor:
        band: Tensor = (tensor[start:stop] if getattr(tensor, "ndim", 1) else tensor).to(device)
        return band.to(dtype) if dtype is not None and band.is_floating_point() else band

    return rows


def live_weights(model: Any) -> list[Weight]:
    """Return all parameters and saved buffers of the base of a plain or PEFT model; tied parameters appear once."""
    weights: list[Weight] = []
    buffers = ((f"{path}.{name}", buffer) for path, module in model.named_modules()
               for name, buffer in module.named_buffers(recurse=False)
               if name not in module._non_persistent_buffers_set)
    for name, tensor in (*model.named_parameters(), *buffers):
        path, _, part = name.rpartition(".")
        owner, plain = model.get_submodule(path), WRAPPED.sub("", name.removeprefix(PREFIX))
        if isinstance(owner, ExpertStack):
            if part != "scales":  # of MXFP4, beside its blocks
                weights += expert_weights(plain.rpartition(".")[0], owner.frozen, experts_in_mxfp4(model.config))
        elif isinstance(owner, QuantizedLinear) and part == "weight":
            weights.append(live_weight(plain, owner.frozen))
        elif not OF_ADAPTER.search(name) and not (isinstance(owner, QuantizedLinear) and part != "bias"):
            weights.append(live_weight(plain, tensor))
    return weights


def expert_weights(name: str, stack: FrozenStack, whole: bool) -> Iterator[Weight]:
    """Yield the matrices of each expert of a stack, under their names in checkpoints, or the `whole` stack."""
    if whole:
        packed = stack.weight.kind == MXFP4Weight.kind
        yield stack_weight(name, stack.shape, stack.weight.dtype, lambda: parts_of(stack), packed)
        return
    path, _, kind = name.rpartition(".")
    for number in range(stack.experts):
        matrix = stack.expert(number)
        size = matrix.shape[0] // len(STACKS[kind])
        for place, part in enumerate(STACKS[kind]):
            own = f"{path}.{number}.{part}.weight"
            yield live_weight(own, matrix.rows(place * size, (place + 1) * size))


def parts_of(stack: FrozenStack) -> Parts:
    out = stack.shape[1]
    return lambda start, stop: stack.weight.rows(start * out, stop * out)


def stack_weight(name: str, shape: tuple[int, int, int], dtype: torch.dtype, open_parts: Callable[[], Parts],
                 packed: bool) -> Weight:
    """Return E matrices (out, in) of experts, `shape` (E, out, in), as transformers has gpt-oss's: (E, in, out)."""
    experts, out, columns = shape

    def opened() -> Rows:
        parts = open_parts()
        return lambda start, stop: rows_of(parts(start, stop))(0, (stop - start) * out).view(-1, out, columns).mT

    return Weight(name, (experts, columns, out), dtype, opened, packed=open_parts() if packed else None)


def live_weight(name: str, tensor: Any) -> Weight:
    """Return a tensor, a Params4bit or a FrozenWeight of a loaded model; quantized values are read in float32."""
    weight = frozen_weight(tensor)
    return Weight(name, tuple(weight.shape), weight.dtype, lambda: rows_of(weight), weight.row_unit)
