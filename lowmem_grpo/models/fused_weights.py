"""Store the weights of layers that share an input (q, k, v; gate, up; a delta net's) side by side, for one product.

`fuse_weights` lays each group out in one buffer and makes the model's parameters views of it. Each parameter keeps its
name, shape and values, so a saved model is the same checkpoint. Groups are copied one at a time, so the extra memory is
that of one group. `joined_weights` recognises adjacent weights and returns them as one view, without a copy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_grpo.kernels.fp8 import FP8Weight, adjacent_fp8
from lowmem_grpo.kernels.frozen_weight import FrozenWeight, PlainWeight
from lowmem_grpo.kernels.nf4 import NF4Weight, check_adjacent
from lowmem_grpo.kernels.nvfp4 import NVFP4Weight
from lowmem_grpo.memory.families import DELTA_IN, GATE_UP, SPLIT
from lowmem_grpo.memory.offload.activations import storage_id
from lowmem_grpo.models.quantized_linear import QuantizedLinear

GROUPS = (SPLIT, GATE_UP, DELTA_IN)


def fuse_weights(model: nn.Module) -> list[str]:
    """Fuse the weights of layers that share an input; return the paths of groups that do not match, with reasons."""
    left = []
    for path, modules in groups_of(model):
        try:
            if all(isinstance(module, QuantizedLinear) for module in modules):
                modules[0].fuse(modules)
            else:
                fuse([module.weight for module in modules])
        except ValueError as error:
            left.append(f"{path}: {error}")
        if modules[0].weight.is_cuda:
            torch.cuda.empty_cache()  # otherwise torch's allocator keeps the old buffers until all groups are done
    return left


def groups_of(model: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    """Yield the path and modules of each group: linear children of one parent, not wrapped by an adapter."""
    for parent_path, parent in model.named_modules():
        if ".visual." in parent_path:
            continue
        children = dict(parent.named_children())
        for names in GROUPS:
            modules = [children.get(name) for name in names]
            if all(isinstance(module, nn.Linear) for module in modules):
                yield f"{parent_path}.{'|'.join(names)}", modules


def fuse(params: list[Any]) -> None:
    """Make the parameters views of one new buffer. Raise ValueError, with nothing changed, if they do not match."""
    if all(hasattr(param, "quant_state") for param in params):
        NF4Weight.adjacent(params)
        return
    kinds = {(type(param), param.dtype, param.device, param.shape[1:], param.requires_grad) for param in params}
    if len(kinds) > 1 or params[0].requires_grad or type(params[0]) is not nn.Parameter:
        raise ValueError(f"expected frozen weights of one dtype, device and width; got {kinds}")
    buffer = torch.cat([param.data for param in params])
    for param, view in zip(params, buffer.split([len(param) for param in params]), strict=True):
        param.data = view


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors (n_i, ...) as one (sum of n_i, ...) view of their storage; None if they are not adjacent in it."""
    first = tensors[0].detach()
    end = first.storage_offset()
    for tensor in tensors:
        follows = tensor.is_contiguous() and tensor.storage_offset() == end
        if not follows or not alike(tensor, first):
            return None
        end += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def alike(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share a storage, dtype and width."""
    same = storage_id(tensor) == storage_id(other)
    return same and tensor.dtype == other.dtype and tensor.shape[1:] == other.shape[1:]


def joined_plain(weights: Sequence[PlainWeight]) -> PlainWeight | None:
    whole = joined([weight.tensor for weight in weights])
    return None if whole is None else PlainWeight(whole)


def joined_fp8(weights: Sequence[FP8Weight]) -> FP8Weight | None:
    codes, scales = joined([weight.codes for weight in weights]), joined([weight.scales for weight in weights])
    try:
        return None if codes is None or scales is None else adjacent_fp8(weights, codes, scales)
    except ValueError:
        return None


def joined_nf4(weights: Sequence[NF4Weight]) -> NF4Weight | None:
    """Return one weight of all rows, a view of the parts; None if they are not adjacent in memory."""
    first, columns = weights[0], weights[0].shape[1]
    parts: dict[str, Any] = {"packed": joined([weight.packed for weight in weights]),
                             "absmax": joined([weight.absmax for weight in weights])}
    if first.nested_absmax is not None and all(weight.nested_absmax is not None for weight in weights):
        parts["nested_absmax"] = joined([w.nested_absmax for w in weights if w.nested_absmax is not None])
        parts["offset"] = joined_offsets(weights)
    if any(part is None for part in parts.values()):
        return None
    try:
        check_adjacent(weights)  # last, because it compares tables and so synchronizes with the GPU
    except ValueError:
        return None
    features = tuple(weight.shape[0] for weight in weights)
    return replace(first, **parts, shape=(sum(features), columns), out_features=features)


def joined_offsets(weights: Sequence[NF4Weight]) -> Tensor | None:
    """Return the offsets of all weights as one view, one per nested block; None if they are not adjacent in memory.
    Fused weights store a copy of their offset for each block, and `weight.offset` views the first."""
    counts = [0 if weight.nested_absmax is None else len(weight.nested_absmax) for weight in weights]
    offsets = [weight.offset.reshape(-1)[:1] for weight in weights if weight.offset is not None]
    first = offsets[0].detach()
    place, last = first.storage_offset(), first.storage_offset() + sum(counts)
    for offset, count in zip(offsets, counts, strict=True):
        if not alike(offset, first) or offset.storage_offset() != place:
            return None
        place += count
    room = first.untyped_storage().nbytes() // first.element_size()
    return first.as_strided((sum(counts),), (1,)) if last <= room else None


def joined_nvfp4(weights: Sequence[NVFP4Weight]) -> NVFP4Weight | None:
    codes, scales, divisors = map(joined, zip(*(weight.tensors for weight in weights), strict=True))
    if codes is None or scales is None or divisors is None or len({weight.dtype for weight in weights}) > 1:
        return None
    return NVFP4Weight(codes, scales, divisors, weights[0].dtype, tuple(weight.shape[0] for weight in weights))


JOINS: dict[str, Callable[..., FrozenWeight | None]] = {  # by kind; weights of other kinds are not joined
    "plain": joined_plain, "nf4": joined_nf4, "fp8": joined_fp8, "nvfp4": joined_nvfp4}


def joined_weights(weights: Sequence[FrozenWeight]) -> FrozenWeight | None:
    """Return several weights as one without a copy; None if they are not adjacent in memory."""
    kinds = {weight.kind for weight in weights}
    join = JOINS.get(kinds.pop()) if len(kinds) == 1 else None
    return None if join is None else join(weights)
