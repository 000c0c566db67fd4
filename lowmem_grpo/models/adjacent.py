"""Matrices that lie one after the other in memory, seen as one: one product in place of several.

A loader may put the weights of q, k, v (gate, up) into one buffer of which the trainer's parameters are views. Nothing
is copied here: what comes out is a view of that buffer, or the matrices as they are.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lowmem_grpo.kernels.lora import FrozenWeight
from lowmem_grpo.kernels.nf4 import NF4Weight, check_adjacent
from lowmem_grpo.offload.activations import storage_id


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors (n_i, ...) as one (sum of n_i, ...) view of their storage; None where they do not lie in one row."""
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
    """The same storage, dtype and columns."""
    same = storage_id(tensor) == storage_id(other)
    return same and tensor.dtype == other.dtype and tensor.shape[1:] == other.shape[1:]


def joined_weights(weights: Sequence[FrozenWeight]) -> FrozenWeight | None:
    """The weights of several matrices as one; None where they do not lie in one row."""
    if all(isinstance(weight, Tensor) for weight in weights):
        return joined([weight for weight in weights if isinstance(weight, Tensor)])
    quantized = [weight for weight in weights if isinstance(weight, NF4Weight)]
    return joined_nf4(quantized) if len(quantized) == len(weights) else None


def joined_nf4(weights: Sequence[NF4Weight]) -> NF4Weight | None:
    """4-bit weights that `NF4Weight.adjacent` laid out, as the one weight that it gave then."""
    first, columns = weights[0], weights[0].shape[1]
    parts: dict[str, Any] = {"packed": joined([weight.packed for weight in weights]),
                             "absmax": joined([weight.absmax for weight in weights])}
    if first.nested_absmax is not None and all(weight.nested_absmax is not None for weight in weights):
        parts["nested_absmax"] = joined([w.nested_absmax for w in weights if w.nested_absmax is not None])
        parts["offset"] = joined_offsets(weights)
    if any(part is None for part in parts.values()):
        return None
    try:
        check_adjacent(weights)  # after what costs nothing: it compares tables, for which a card is waited for
    except ValueError:
        return None
    features = tuple(weight.shape[0] for weight in weights)
    return replace(first, **parts, shape=(sum(features), columns), out_features=features)


def joined_offsets(weights: Sequence[NF4Weight]) -> Tensor | None:
    """One offset for each nested block: each weight's own is the first of those that lie there for its blocks."""
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
