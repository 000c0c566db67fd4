"""LoRA pairs in the form for matrix products: in the dtype of x, with the A of all layers on one input stacked.

    low = x A^T (N, sum of r_i)       y_i += scale_i low_i B_i^T
    d_low_i = scale_i dy_i B_i;  dx += d_low A;  dA = d_low^T x;  dB_i = dy_i^T (scale_i low_i)

For all layers on an input, the y_i are one launch (lora_up.py), and low and all d_low, and dA and all dB
(thin_products.py). Adapters are usually in float32 while x is in 16 bits: one launch converts all of them for each pass
over the layer, so that they are never stale. Where adapters do not change, converted pairs are kept: in sampling
(`kept_factors`), and between two optimizer steps (`SharedFactors`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import accumulator_dtype
from lowmem_grpo.kernels.lora_up import lora_up
from lowmem_grpo.kernels.thin_products import Product


@dataclass(frozen=True)
class LoRA:
    """The low-rank pair of one linear layer: a (r, in), b (out, r), of any floating dtype, and their scale."""

    a: Tensor
    b: Tensor
    scale: float = 1.0


Loras = Sequence[LoRA | None]


@dataclass(frozen=True)
class Factors:
    """The LoRA factors of several layers on one input, in one dtype; at least one layer has LoRA."""

    a: Tensor  # (sum of r_i, in)
    b: list[Tensor | None]  # (out_i, r_i), None for a layer without LoRA
    columns: list[slice]  # each layer's part of low
    scales: list[float]

    def add_to(self, outputs: Sequence[Tensor], x: Tensor) -> None:
        """Add LoRA of x (N, in) to the outputs y_i (N, out_i)."""
        low = torch.mm(x, self.a.T, out=x.new_empty(len(x), len(self.a)))  # autocast leaves `out` alone
        lora_up(outputs, outputs, low, self.b, self.scales)

    def grad_low(self, grads: Sequence[Tensor | None], waiting: list[Product]) -> Tensor | None:
        """Return d_low (N, sum of r_i), with zeros for a dy_i that is None, and add its products to `waiting`; None if
        no layer with LoRA has a dy_i."""
        like = next((grad for grad, b in zip(grads, self.b, strict=True) if grad is not None and b is not None), None)
        if like is None:
            return None
        d_low = like.new_empty(like.shape[0], self.a.shape[0])
        for grad, b, columns, scale in zip(grads, self.b, self.columns, self.scales, strict=True):
            if b is not None and grad is not None:
                waiting.append((d_low[:, columns], grad, b, scale))
            elif b is not None:
                d_low[:, columns].zero_()
        return d_low

    def gradients(
        self, grads: Sequence[Tensor | None], d_low: Tensor, x: Tensor, waiting: list[Product], after: list[Product]
    ) -> list[Tensor | None]:
        """Return [dA_i, dB_i of each layer] in float32 (float64 if x is); both None without LoRA or without dy_i. Add
        the product that makes low to `waiting`, and those that make the gradients to `after`."""
        scales = {scale for scale, b in zip(self.scales, self.b, strict=True) if b is not None}
        shared = scales.pop() if len(scales) == 1 else None  # of low, which is then rounded once
        low, kind = x.new_empty(len(x), len(self.a)), accumulator_dtype(x.dtype)
        waiting.append((low, x, self.a.T, 1.0 if shared is None else shared))
        grad_a = self.a.new_empty(self.a.shape, dtype=kind)
        gradients: list[Tensor | None] = []
        after.append((grad_a, d_low.T, x, 1.0))
        for grad, b, columns, scale in zip(grads, self.b, self.columns, self.scales, strict=True):
            if grad is None or b is None:
                gradients += [None, None]
                continue
            grad_b = b.new_empty(b.shape, dtype=kind)
            gradients += [grad_a[columns], grad_b]
            after.append((grad_b, grad.T, low[:, columns], scale if shared is None else 1.0))
        return gradients


Copies = list[tuple[Tensor, Tensor]]  # (to, from)


# by object ids: (the objects, held so that their ids are not reused, and the result for them)
Kept = dict[tuple[object, ...], tuple[object, Any]]
KEPT: ContextVar[Kept | None] = ContextVar("kept factors", default=None)  # a thread started inside has none


@contextmanager
def kept_factors(lasting: Kept | None = None) -> Iterator[Kept]:
    """Convert each LoRA pair only once for all passes without gradient inside this context, where adapters must not
    change. Pairs in `lasting`, from an earlier context, are converted anew on entry, in place, and kept on exit."""
    kept: Kept = {} if lasting is None else lasting
    convert_again(kept)
    token = KEPT.set(kept)
    try:
        yield kept
    finally:
        KEPT.reset(token)
        if lasting is None:
            kept.clear()


def convert_again(kept: Kept) -> None:
    """Convert the current adapters into the tensors of an earlier conversion, which a CUDA graph may read."""
    for key, (groups, factors) in kept.items():
        if not isinstance(key[0], torch.dtype):
            continue  # holds no converted tensors
        for old, new in zip(factors, factors_of(groups, key[0]), strict=True):  # type: ignore[arg-type]
            pairs = zip([old.a, *old.b], [new.a, *new.b], strict=True) if old is not None and new is not None else ()
            for to, source in pairs:
                if to is not None and source is not None and to.data_ptr() != source.data_ptr():
                    to.copy_(source)


def held_factors(groups: Sequence[Loras], dtype: torch.dtype) -> list[Factors | None]:
    """Return `factors_of(groups, dtype)`, computed only once inside `kept_factors`."""
    if KEPT.get() is None:
        return shared_factors(groups, dtype)
    key = (dtype, *(tuple(None if lora is None else (id(lora.a), id(lora.b), lora.scale) for lora in group)
                    for group in groups))
    return held(key, groups, lambda: factors_of(groups, dtype))


def held(key: tuple[object, ...], what: object, find: Callable[[], Any]) -> Any:
    """Return `find()`, which is called only once per key inside `kept_factors`. `what` holds the objects whose ids are
    in the key, so that no id is reused."""
    kept = KEPT.get()
    if kept is None:
        return find()
    if key not in kept:
        kept[key] = what, find()
    return kept[key][1]


Shared = tuple[list[Loras], torch.dtype, list[Factors | None]]  # the groups of a node, and their factors in a dtype


@dataclass(eq=False)
class SharedFactors:
    """The converted pairs of all layers in training, which the micro-batches of an optimizer step share."""

    held: dict[tuple[object, ...], Shared] = field(default_factory=dict)  # used in this context, or in the last one
    ready: dict[tuple[object, ...], Shared] = field(default_factory=dict)  # converted on entry, and not used yet

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Convert each pair once in this context, in which no optimizer may step: those that the last context used in
        one launch on entry, others when they are used, also those whose tensors have another address or version."""
        copies: Copies = []
        last, self.held = self.held, {}
        for groups, dtype, _ in last.values():
            factors = [factors_of_group(group, dtype, copies) for group in groups]
            self.ready[shared_key(groups, dtype)] = groups, dtype, factors
        run(copies)
        ACTIVE.append(self)
        try:
            yield
        finally:
            ACTIVE.remove(self)
            self.ready = {}
            self.held = {key: (groups, dtype, []) for key, (groups, dtype, _) in self.held.items()}

    def factors(self, groups: Sequence[Loras], dtype: torch.dtype) -> list[Factors | None]:
        key = shared_key(groups, dtype)
        if key not in self.held:
            self.held[key] = self.ready.get(key) or (
                [[detached(lora) for lora in group] for group in groups], dtype, factors_of(groups, dtype))
        return self.held[key][2]


# the innermost is read. No context variable: on a card, backward passes run in threads of autograd's own
ACTIVE: list[SharedFactors] = []


def shared_factors(groups: Sequence[Loras], dtype: torch.dtype) -> list[Factors | None]:
    """Return `factors_of(groups, dtype)`, computed only once inside `SharedFactors.unchanged`."""
    if torch.compiler.is_compiling() or not ACTIVE or not all(
            part.data_ptr() for group in groups for lora in group if lora is not None for part in (lora.a, lora.b)):
        return factors_of(groups, dtype)  # fake tensors all have the address 0
    return ACTIVE[-1].factors(groups, dtype)


def shared_key(groups: Sequence[Loras], dtype: torch.dtype) -> tuple[object, ...]:
    pairs = [None if lora is None else (lora.scale, *((part.data_ptr(), part._version) for part in (lora.a, lora.b)))
             for group in groups for lora in group]
    return dtype, *map(len, groups), *pairs


def detached(lora: LoRA | None) -> LoRA | None:
    """Return the pair's numbers, which hold their memory, so that no other pair comes to lie at their addresses."""
    return None if lora is None else LoRA(lora.a.detach(), lora.b.detach(), lora.scale)


def factors_of(groups: Sequence[Loras], dtype: torch.dtype) -> list[Factors | None]:
    """Return the factors of each group of layers on one input; None without LoRA. One launch converts all groups."""
    copies: Copies = []
    factors = [factors_of_group(group, dtype, copies) for group in groups]
    run(copies)
    return factors


@torch.no_grad()
def run(copies: Copies) -> None:
    if copies:
        torch._foreach_copy_([to for to, _ in copies], [source for _, source in copies])


def factors_of_group(group: Loras, dtype: torch.dtype, copies: Copies) -> Factors | None:
    """Return the factors of one group, None without LoRA. Casts are not made here, but added to `copies`."""
    present = [lora for lora in group if lora is not None]
    if not present:
        return None
    factors = iter([in_dtype(lora.b, dtype, copies) for lora in present])
    columns, end = [], 0
    for lora in group:
        rank = 0 if lora is None else lora.a.shape[0]
        columns.append(slice(end, end + rank))
        end += rank
    return Factors(stacked([lora.a for lora in present], dtype, copies),
                   [None if lora is None else next(factors) for lora in group], columns,
                   [0.0 if lora is None else lora.scale for lora in group])


def in_dtype(tensor: Tensor, dtype: torch.dtype, copies: Copies) -> Tensor:
    """Return `tensor` if it has this dtype; else an empty copy, added to `copies` to be filled."""
    if tensor.dtype == dtype:
        return tensor
    copies.append((tensor.new_empty(tensor.shape, dtype=dtype), tensor))
    return copies[-1][0]


def stacked(parts: Sequence[Tensor], dtype: torch.dtype, copies: Copies) -> Tensor:
    """Return matrices on top of each other in this dtype; casts are added to `copies`."""
    if len(parts) == 1:
        return in_dtype(parts[0], dtype, copies)
    if all(part.dtype == dtype for part in parts):
        return torch.cat(list(parts))
    ranks = [len(part) for part in parts]
    whole = parts[0].new_empty(sum(ranks), parts[0].shape[1], dtype=dtype)
    copies += zip(whole.split(ranks), parts, strict=True)
    return whole
