"""Registration of kernels as single PyTorch operations, and helpers of all kernels: backward passes that refuse a
second derivative, checks of arguments, and products of 16-bit matrices with a float32 result. Float32 products may
round their factors to bfloat16, on a CPU that multiplies these several times as fast.

An operation is registered with the dispatcher directly, which costs about 2 microseconds a call.
`torch.library.custom_op` costs 20 to 90 microseconds for an operation that writes to its arguments, more than the
launch itself. A tensor that a kernel writes to gets a new version, so that autograd and `offload` refuse a saved tensor
that was overwritten. The operations have no gradient: autograd functions call them.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from numbers import Real
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map_only

NAMESPACE = "lowmem_grpo"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # the operations exist as long as this object
ROUNDING: ContextVar[bool] = ContextVar("products in bfloat16", default=False)
# On x86 without AVX-512, torch multiplies 16-bit numbers one by one: in float32 that takes an eighth of the time
WITHOUT_16_BITS = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
PRODUCTS: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009  # torch's stubs do not name it


def custom_op(
    name: str, kernel: Callable[..., Any], cuda: Callable[..., Any] | None = None, *,
    fake: Callable[..., Any] | None = None, mutates: Sequence[str] = (),
) -> Any:
    """Register and return the operation `lowmem_grpo::name`. `kernel` runs on the CPU and `cuda` on a card; without
    `cuda`, `kernel` runs on both. The annotations of `kernel` give the schema. `mutates` names the arguments that are
    written to. `fake` returns uninitialised results of the right shapes; by default it returns None."""
    LIBRARY.define(name + torch.library.infer_schema(kernel, mutates_args=mutates), tags=torch.Tag.pt2_compliant_tag)
    written = [list(inspect.signature(kernel).parameters).index(argument) for argument in mutates]
    kernels = {"CompositeExplicitAutograd": kernel} if cuda is None else {"CPU": kernel, "CUDA": on_its_card(cuda)}
    for key, function in kernels.items():
        LIBRARY.impl(name, raising_versions(function, written), key)
    made = raising_versions(fake or (lambda *_: None), written)
    torch.library.register_fake(f"{NAMESPACE}::{name}", made, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def raising_versions(function: Callable[..., Any], written: list[int]) -> Callable[..., Any]:
    """Return `function` wrapped to increase autograd's version of the arguments at the positions `written`."""
    if not written:
        return function

    def run(*arguments: Any) -> Any:
        result = function(*arguments)
        for argument in (arguments[place] for place in written):
            increment_version(argument if isinstance(argument, list) else () if argument is None else (argument,))
        return result

    return run


def on_its_card(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` to run on the card of its first tensor; Triton launches on the current card."""

    def run(*arguments: Any) -> Any:
        first = next(argument for argument in arguments if isinstance(argument, (Tensor, list)))
        index = (first[0] if isinstance(first, list) else first).get_device()
        if index == torch.cuda.current_device():
            return function(*arguments)
        with torch.cuda.device(index):
            return function(*arguments)

    return run


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return an autograd function's `backward` wrapped so that differentiating its results raises RuntimeError. torch's
    own decorator raises only if the incoming gradients require gradients; otherwise a penalty on the gradients
    (`create_graph=True`) would silently be a constant."""
    name = backward.__qualname__.partition(".")[0]

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # a compiled graph refuses by itself
            return results
        return tree_map_only(Tensor, lambda grad: FirstOrderOnly.apply(grad.detach().requires_grad_(), name), results)

    return run


class FirstOrderOnly(torch.autograd.Function):
    """Returns a gradient unchanged; its own backward pass raises RuntimeError."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, name: str) -> Tensor:
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> None:
        raise RuntimeError(f"{ctx.name} has no second derivative, so a gradient penalty (create_graph=True) cannot "
                           "pass through it. Leave the penalty out, or compute it on a model whose layers are torch's "
                           "own")


MIN_BAND = 64  # columns upcast at a time on the CPU, at least
UPCAST_BYTES = 16 * 2**20


def check_tensors(optional: Mapping[str, Any] | None = None, **needed: Any) -> None:
    """Raise ValueError for an argument that is no tensor; an optional one may be None."""
    for name, value in {**{n: v for n, v in (optional or {}).items() if v is not None}, **needed}.items():
        if not isinstance(value, Tensor):
            fix = ": give its weight, and bias" if isinstance(value, torch.nn.Module) else ""
            raise ValueError(f"{name} is a {type(value).__name__}; it must be a tensor{fix}")


def check_numbers(**numbers: Any) -> None:
    """Raise ValueError for an argument that is not a number. A tensor must be a single number and need no gradient."""
    for name, value in numbers.items():
        if isinstance(value, Tensor) and (value.requires_grad or value.numel() != 1):
            raise ValueError(f"{name} is a tensor {tuple(value.shape)}, requires_grad={value.requires_grad}; it must "
                             "be one number, which gets no gradient: give a float, or scale the tensors by it")
        if not isinstance(value, (Real, Tensor, torch.SymFloat)) and getattr(value, "ndim", None) != 0:
            raise ValueError(f"{name} is {value!r}; it must be a number")


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul_fp32(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return left (M, K) @ right (K, N) in float32 (float64 for float64), written to `out` (M, N) if it is not None.
    The CPU has no 16-bit product with a float32 result, so there `right` is upcast a band of columns at a time; with
    AMX, oneDNN then multiplies the bfloat16 numbers, which it does not need to round."""
    dtype = accumulator_dtype(left.dtype)
    if out is None:
        out = torch.empty(left.shape[0], right.shape[1], dtype=dtype, device=left.device)
    if left.dtype == dtype:
        return torch.mm(left, right, out=out)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype, out=out)
    upcast_matmul(left, right, out)
    return out


def matmul_in_bands(left: Tensor, right: Tensor, out: Tensor) -> None:
    wide = left.to(out.dtype)
    band = max(MIN_BAND, out.numel() // max(left.shape[1], 1))
    for start in range(0, right.shape[1], band):
        columns = slice(start, start + band)
        with FACTORS_IN_BF16 if left.dtype == torch.bfloat16 else nullcontext():
            torch.mm(wide, right[:, columns].to(out.dtype), out=out[:, columns])


upcast_matmul = custom_op("upcast_matmul", matmul_in_bands, mutates=("out",))


def addmm_fp32(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add left (M, K) @ right (K, N) to `total` (M, N) in place. `total` is float32, or float64 for float64."""
    if left.dtype == total.dtype:
        return total.addmm_(left, right)
    if left.is_cuda:
        return torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    return total.add_(matmul_fp32(left, right, torch.empty_like(total)))


def upcasts(left: Tensor) -> bool:
    """Return whether products of `left` are computed in float32 and rounded once: where the CPU has none of 16 bits."""
    return (WITHOUT_16_BITS and left.dtype in (torch.bfloat16, torch.float16) and type(left) is Tensor and left.is_cpu
            and not torch.compiler.is_compiling())


def matmul(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left (M, K) @ right (K, N) + bias (N,) in left's dtype."""
    if upcasts(left):
        y = upcast_product(left, right)
        return (y if bias is None else y.add_(bias)).to(left.dtype)
    return left @ right if bias is None else torch.addmm(bias, left, right)


def addmm(total: Tensor, left: Tensor, right: Tensor, beta: int = 1) -> Tensor:
    """Return total (M, N), set in place to beta * total + left (M, K) @ right (K, N); beta is 0 or 1."""
    if upcasts(left):
        y = upcast_product(left, right)
        return total.add_(y) if beta else total.copy_(y)
    if beta or not total.is_contiguous():  # which torch.compile takes as no `out`
        return total.addmm_(left, right, beta=beta)
    return torch.mm(left, right, out=total)


def upcast_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in float32, with copies of UPCAST_BYTES at most: a part of K at a time."""
    out = torch.zeros(left.shape[0], right.shape[1])
    step = max(MIN_BAND, UPCAST_BYTES // (4 * max(1, sum(out.shape))))
    for start in range(0, left.shape[1], step):
        out.addmm_(left[:, start : start + step].float(), right[start : start + step].float())
    return out


class FactorsInBF16:
    """A context in which oneDNN rounds the factors of float32 products to bfloat16, and adds their products in float32.
    The setting is the process's: it ends with the last thread that is in the context."""

    def __init__(self) -> None:
        self.users, self.before, self.lock = 0, "none", Lock()

    def __enter__(self) -> None:
        with self.lock:
            if not self.users:
                self.before, PRODUCTS.fp32_precision = PRODUCTS.fp32_precision, "bf16"
            self.users += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                PRODUCTS.fp32_precision = self.before


FACTORS_IN_BF16 = FactorsInBF16()


@contextmanager
def rounding(asked: bool) -> Iterator[None]:
    """If `asked`, round the factors of products with a float32 weight or head to bfloat16 in this context. LoRA and
    attention stay in float32: their products are small."""
    token = ROUNDING.set(asked)
    try:
        yield
    finally:
        ROUNDING.reset(token)


def large_products() -> AbstractContextManager[None]:
    """Return the context of products that `rounding` concerns."""
    return FACTORS_IN_BF16 if not torch.compiler.is_compiling() and ROUNDING.get() else nullcontext()
