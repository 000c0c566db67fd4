"""The kinds of frozen weights. Each is a class, registered under its name in `KINDS`; whoever multiplies, stores or
plans asks the weight, not for its kind.

A new kind is a subclass of `FrozenWeight` with `fill`. All products then dequantize it band by band, in
one buffer of BAND_BYTES: bands of rows for y = x W^T and of columns for dx = dy W, so that no sum runs over bands.
Optional are kernels for few rows (`decode_op`) and experts (`grouped`). Plans need its bytes: memory/layer_forms.py.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from operator import is_not
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from lowmem_grpo.kernels.custom_op import addmm, check_tensors, large_products, matmul, upcasts
from lowmem_grpo.kernels.few_rows import given_adapters

BAND_BYTES = 64 * 2**20  # dequantized at a time
KINDS: dict[str, type["FrozenWeight"]] = {}


class FrozenWeight:
    """A frozen weight (out, in): one matrix, or several on top of each other in memory."""

    kind: ClassVar[str]  # names the class in operations, which take tensors, numbers and strings
    quantized: ClassVar[bool] = True
    decode_op: ClassVar[Any] = None  # the operation of few_rows.py for the x that `can_decode` takes
    grouped: ClassVar[Any] = None  # products with experts, as in grouped_products.py, for the x that `can_group` takes
    shape: tuple[int, int]  # out, in
    dtype: torch.dtype  # of the values
    out_features: tuple[int, ...]  # rows of each matrix; their sum is out

    def __init_subclass__(cls, kind: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        if kind in KINDS:
            raise ValueError(f"the kind {kind!r} of frozen weights is registered already, as {KINDS[kind].__name__}")
        KINDS[kind], cls.kind = cls, kind

    def __init__(self, *tensors: Tensor) -> None:
        """Hold tensors, of which the first has the weight's shape and the last the dtype of its values."""
        self.held, self.dtype, self.out_features = tensors, tensors[-1].dtype, tuple(tensors[0].shape[:1])
        self.shape = tensors[0].shape  # type: ignore[assignment]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the operations take."""
        return [*self.held]

    @property
    def sizes(self) -> list[int]:
        """The numbers that the operations take beside the tensors."""
        return []

    @classmethod
    def from_parts(
        cls, tensors: Sequence[Tensor], sizes: Sequence[int], features: Sequence[int], dtype: torch.dtype
    ) -> "FrozenWeight":
        """Return the weight from its `tensors` and `sizes`; `features` holds the rows of each matrix."""
        return cls(*tensors, *sizes)  # type: ignore[arg-type]  # a kind with sizes takes them

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def row_unit(self) -> int:
        """The smallest number of rows that can be dequantized alone."""
        return 1

    @property
    def column_unit(self) -> int:
        """Bands of columns are multiples of this number."""
        return 1

    def fill(self, out: Tensor, row: int = 0, column: int = 0) -> None:
        """Dequantize the part from `row` and `column` on (multiples of the units) into `out` (rows, width)."""
        raise NotImplementedError

    def filled(self, out: Tensor) -> Tensor:
        """Return the values in the dtype of `out`: the weight itself if it is stored so, else `out`, filled."""
        self.fill(out)
        return out

    def dequantized(self, out: Tensor | None = None) -> Tensor:
        """Return the values (out, in), in `out` if it is set; ValueError if `out` does not fit."""
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        fits = out.shape == self.shape and out.is_contiguous() and out.is_floating_point()
        if not fits or out.device != self.device:
            raise ValueError(f"expected out {self.shape}, contiguous, floating, on {self.device}; got "
                             f"{tuple(out.shape)}, strides {out.stride()}, {out.dtype} on {out.device}")
        return self.filled(out)

    def rows(self, start: int, stop: int) -> "FrozenWeight":
        """Return rows as a weight, without a copy."""
        raise NotImplementedError

    def can_decode(self, x: Tensor) -> bool:
        """Return whether `decode_op` takes x (M, K)."""
        return False

    def can_group(self, x: Tensor) -> bool:
        """Return whether `grouped` takes rows x."""
        return False

    def project(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + bias without autograd: x (..., in) -> (..., out) in x.dtype."""
        rows = x.reshape(-1, x.shape[-1])
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False), large_products():
            y = decode(rows, self, bias=bias) if can_decode(rows, self) else project_bands(
                rows, self, self.shape[:1], [bias])[0]
        return y.view(*x.shape[:-1], self.shape[0])

    def project_each(self, x: Tensor, biases: Sequence[Tensor | None]) -> list[Tensor]:
        """Return x W_i^T + bias_i (N, out_i) for x (N, in) and each matrix W_i, without autograd."""
        if len(biases) == 1:
            return [self.project(x, biases[0])]
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False), large_products():
            if not can_decode(x, self):
                return project_bands(x, self, self.out_features, biases)
            has_bias = any(bias is not None for bias in biases)
            pairs = zip(biases, self.out_features, strict=True) if has_bias else ()
            parts = [x.new_zeros(size) if bias is None else bias for bias, size in pairs]
            return list(decode(x, self, bias=torch.cat(parts) if has_bias else None).split(self.out_features, 1))

    def project_back(self, grads: Sequence[Tensor | None], total: Tensor | None = None) -> Tensor:
        """Return the sum of grad_i W_i (N, in), added to `total` in place if there is one, without autograd. grad_i
        (N, out_i), not all None, are those of each matrix, or one of all matrices."""
        ends = list(accumulate(self.out_features if len(grads) > 1 else self.shape[:1]))
        pairs = [(grad, slice(end - grad.shape[1], end)) for grad, end in zip(grads, ends, strict=True)
                 if grad is not None]
        like = pairs[0][0]
        x = like.new_empty(like.shape[0], self.shape[1])
        with torch.no_grad(), torch.autocast(like.device.type, enabled=False), large_products():
            for start, band in column_bands(self, like):
                columns = x[:, start : start + band.shape[1]]
                for number, (grad, rows) in enumerate(pairs):
                    addmm(columns, grad, band[rows], min(number, 1))
            return x if total is None else total.add_(x)


class PlainWeight(FrozenWeight, kind="plain"):
    """A weight that is not quantized: the tensor (out, in) itself, of which later changes are seen."""

    quantized = False

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.tensor = tensor

    def filled(self, out: Tensor) -> Tensor:
        return self.tensor if self.dtype == out.dtype else out.copy_(self.tensor)

    def rows(self, start: int, stop: int) -> "PlainWeight":
        return PlainWeight(self.tensor[start:stop])

    def project(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self.project(x, bias)
        with torch.no_grad(), large_products():
            weight = self.tensor.to(x.dtype)
            if upcasts(x):
                return matmul(x.reshape(-1, x.shape[-1]), weight.T, bias).view(*x.shape[:-1], len(weight))
            return torch.nn.functional.linear(x, weight, bias)

    def project_back(self, grads: Sequence[Tensor | None], total: Tensor | None = None) -> Tensor:
        (grad,) = grads
        assert grad is not None
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False), large_products():
            weight = self.tensor.to(grad.dtype)
            return matmul(grad, weight) if total is None else addmm(total, grad, weight)


def frozen_weight(weight: Any) -> FrozenWeight:
    """Return a tensor as a PlainWeight, bitsandbytes' Params4bit as an NF4Weight, and a FrozenWeight unchanged;
    ValueError for anything else."""
    if isinstance(weight, FrozenWeight):
        return weight
    if hasattr(weight, "quant_state"):
        nf4: Any = KINDS["nf4"]
        return nf4.from_bitsandbytes(weight)
    check_tensors(weight=weight)
    return PlainWeight(weight)


def check_frozen(weight: FrozenWeight) -> None:
    """Raise ValueError for a weight that requires a gradient, since it would get none."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in weight.tensors):
        raise ValueError("the weights are frozen: call weight.requires_grad_(False) and train LoRA")


# by owner: the objects that make up its weight, and the weight
KEPT: WeakKeyDictionary[Any, tuple[tuple[Any, ...], FrozenWeight]] = WeakKeyDictionary()


def kept_weight(owner: Any, parts: tuple[Any, ...], make: Callable[[], FrozenWeight]) -> FrozenWeight:
    """Return `make()`, the weight of a layer, and the same object again until one of the `parts` that it is made of is
    replaced. Caches know a weight by its identity, since another one may lie at its address later."""
    kept = KEPT.get(owner)
    if kept is None or len(kept[0]) != len(parts) or any(map(is_not, parts, kept[0])):
        KEPT[owner] = kept = parts, make()
    return kept[1]


@dataclass(eq=False)
class WideWeights:
    """A cache of dequantized weights. While the context variable `WIDE` holds one, products with more than `few` rows
    of x dequantize a weight once and reuse it until `held` is cleared; until then, all other passes reuse it too."""

    few: int
    held: dict[int, tuple[FrozenWeight, Tensor]] = field(default_factory=dict)  # by id; A may lie below the values
    below: dict[int, Tensor] = field(default_factory=dict)  # by id, the A that lies there

    def dequantized(self, weight: FrozenWeight, like: Tensor, rows: int = 0) -> Tensor:
        """Return the values (out, in); room for `rows` more is below them."""
        key, size = id(weight), weight.shape[0]
        if key not in self.held or len(self.held[key][1]) < size + rows:
            wide = like.new_empty(size + rows, weight.shape[1])
            weight.fill(wide[:size])
            self.held[key] = weight, wide  # holding the weight keeps its id and address from being reused
            self.below.pop(key, None)
            lend(weight, wide)
        return self.held[key][1][:size]

    def with_a(self, weight: FrozenWeight, a: Tensor) -> Tensor:
        """Return the values with A (R, in) below them, and unused rows, so that rows of a product are aligned. Later
        changes of A are seen from the next `take_adapters` on."""
        key, size, rows = id(weight), weight.shape[0], -(-len(a) // 8) * 8
        self.dequantized(weight, a, rows)
        wide = self.held[key][1][: size + rows]
        if self.below.get(key) is not a:
            wide[size : size + len(a)].copy_(a)
            self.below[key] = a
        return wide

    def take_adapters(self) -> None:
        """Copy each A anew, in one launch: a CUDA graph may read it before any layer runs eagerly."""
        held = [(*self.held[key], a) for key, a in self.below.items() if key in self.held]
        if held:
            torch._foreach_copy_([wide[weight.shape[0] :][: len(a)] for weight, wide, a in held], [a for *_, a in held])


WIDE: ContextVar[WideWeights | None] = ContextVar("wide weights", default=None)
# Dequantized weights that an engine holds to sample with, by address and shape of their codes. While they live, all
# other passes read them too, forward and backward. No context variable: on a card, autograd has threads of its own
LENT: WeakValueDictionary[tuple[int, ...], Tensor] = WeakValueDictionary()


def lend(weight: FrozenWeight, wide: Tensor) -> None:
    """Let all passes read the first rows of `wide`, the values of `weight`, which must live as long as `wide`."""
    LENT[weight.tensors[0].data_ptr(), *weight.shape] = wide


def lent(weight: FrozenWeight, like: Tensor) -> Tensor | None:
    """Return the values in like's dtype if an engine holds them so, else None."""
    if not LENT or torch.compiler.is_compiling():
        return None
    wide = LENT.get((weight.tensors[0].data_ptr(), *weight.shape))
    return wide[: weight.shape[0]] if wide is not None and wide.dtype == like.dtype else None


def wide_weights() -> WideWeights | None:
    """Return the context's `WideWeights`; None while torch compiles, which cannot read a context variable."""
    return None if torch.compiler.is_compiling() else WIDE.get()


def can_decode(x: Tensor, weight: FrozenWeight) -> bool:
    """Return whether x (M, K) has so few rows that a kernel multiplies x with the codes directly."""
    wide = wide_weights()
    return (wide is None or len(x) <= wide.few) and weight.can_decode(x)


def decode(
    x: Tensor, weight: FrozenWeight, xa: Tensor | None = None, lora_b: Tensor | None = None,
    scale: float | Tensor = 1.0, bias: Tensor | None = None,
) -> Tensor:
    """Return x W^T + scale * xa_s B^T + bias (M, N) by a kernel of few_rows_kernels.py, without autograd, where
    `can_decode` is True. x (M, K), xa (M, S * R), lora_b (N, R) and bias (N,) have one dtype."""
    return weight.decode_op(x.contiguous(), weight.tensors, weight.sizes, list(weight.out_features),
                            *given_adapters(xa, lora_b, scale, bias))


def project_bands(
    x: Tensor, weight: FrozenWeight, features: Sequence[int], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """Compute `project_each` by bands of dequantized rows; `features` holds the rows of each matrix."""
    outputs: dict[int, Tensor] = {}
    for start, band in row_bands(weight, x):
        for number, columns, rows in crossings(features, start, start + len(band)):
            bias, part = biases[number], band[rows].T
            if part.shape[1] == features[number]:  # the whole matrix
                outputs[number] = matmul(x, part, bias)
                continue
            if number not in outputs:
                outputs[number] = x.new_empty(x.shape[0], features[number])
            y = outputs[number][:, columns]
            if bias is not None:
                y.copy_(bias[columns])
            addmm(y, x, part, int(bias is not None))
    return [outputs[number] if number in outputs else x.new_empty(x.shape[0], 0) for number in range(len(features))]


def crossings(features: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield each matrix with rows in the band [start, stop): its number, and the rows' slices in matrix and band."""
    first = 0
    for number, size in enumerate(features):
        begin, end = max(start, first), min(stop, first + size)
        if begin < end:
            yield number, slice(begin - first, end - first), slice(begin - start, end - start)
        first += size


def row_bands(weight: FrozenWeight, like: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, dequantized rows) in like's dtype, band by band in one buffer, or all rows from `WIDE` or
    `LENT`."""
    wide = wide_weights()
    whole = wide.dequantized(weight, like) if wide is not None and len(like) > wide.few else lent(weight, like)
    if whole is not None:
        yield 0, whole
        return
    rows, columns = weight.shape
    step = even_step(rows, columns * like.element_size(), weight.row_unit)
    buffer = like.new_empty(min(step, rows) * columns)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        band = buffer[: count * columns].view(count, columns)
        weight.fill(band, row=start)
        yield start, band


def column_bands(weight: FrozenWeight, like: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (first column, dequantized columns), band by band, or all columns from `LENT`. If NF4 blocks span rows, one
    band has all columns."""
    whole = lent(weight, like)
    if whole is not None:
        yield 0, whole
        return
    rows, columns = weight.shape
    step = even_step(columns, rows * like.element_size(), weight.column_unit)
    buffer = like.new_empty(rows * min(step, columns))
    for start in range(0, columns, step):
        width = min(step, columns - start)
        band = buffer[: rows * width].view(rows, width)
        weight.fill(band, column=start)
        yield start, band


def even_step(count: int, size: int, unit: int) -> int:
    """Return the rows of a band, a multiple of `unit`, that cuts `count` rows of `size` bytes about evenly."""
    bands = max(1, math.ceil(count * size / BAND_BYTES))
    return max(1, math.ceil(count / bands / unit)) * unit
