"""Registration of kernels as single PyTorch operations, for graphs, fake tensors and dispatch modes; and backward
passes that refuse to be differentiated a second time.

A call of `torch.library.custom_op` costs 20 to 90 microseconds of Python when it writes to its arguments, more than the
launch itself. Here an operation is registered with the dispatcher directly, which costs about 2 microseconds. A tensor
that a kernel writes to gets a new version, so that autograd and the checks of `offload` refuse a saved tensor that was
overwritten. The operations have no gradient: they are called inside autograd functions, or without autograd.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map_only

NAMESPACE = "lowmem_grpo"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # the operations exist as long as this object


def custom_op(
    name: str, kernel: Callable[..., Any], cuda: Callable[..., Any] | None = None, *,
    fake: Callable[..., Any] | None = None, mutates: Sequence[str] = (),
) -> Any:
    """Register and return the operation `lowmem_grpo::name`: `kernel` on the CPU and `cuda` on a card, or `kernel` on
    both. The schema is taken from the annotations of `kernel`. `mutates` names the arguments that are written to.
    `fake` returns uninitialised results of the right shapes; an operation without results needs none."""
    LIBRARY.define(name + torch.library.infer_schema(kernel, mutates_args=mutates), tags=torch.Tag.pt2_compliant_tag)
    written = [list(inspect.signature(kernel).parameters).index(argument) for argument in mutates]
    kernels = {"CompositeExplicitAutograd": kernel} if cuda is None else {"CPU": kernel, "CUDA": on_its_card(cuda)}
    for key, function in kernels.items():
        LIBRARY.impl(name, raising_versions(function, written), key)
    made = raising_versions(fake or (lambda *_: None), written)
    torch.library.register_fake(f"{NAMESPACE}::{name}", made, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def raising_versions(function: Callable[..., Any], written: list[int]) -> Callable[..., Any]:
    """Return `function` wrapped to increase, after each call, autograd's version of the tensors at `written`."""
    if not written:
        return function

    def run(*arguments: Any) -> Any:
        result = function(*arguments)
        increment_version([argument for place in written if isinstance(argument := arguments[place], Tensor)])
        return result

    return run


def on_its_card(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` wrapped to run on the card of its first tensor; Triton launches on the current card."""

    def run(*arguments: Any) -> Any:
        index = next(argument for argument in arguments if isinstance(argument, Tensor)).get_device()
        if index == torch.cuda.current_device():
            return function(*arguments)
        with torch.cuda.device(index):
            return function(*arguments)

    return run


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return an autograd function's `backward` wrapped so that differentiating its results raises RuntimeError.

    With a graph of the gradients (`create_graph=True`), a penalty on them would otherwise be treated as a constant,
    without a warning. torch's own decorator notices that only if the incoming gradients need gradients too.
    """
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
    """The identity on a gradient, whose own derivative is refused."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, name: str) -> Tensor:
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> None:
        raise RuntimeError(f"{ctx.name} has no second derivative, so a gradient penalty (create_graph=True) cannot "
                           "pass through it. Leave the penalty out, or compute it on a model whose layers are torch's "
                           "own")
