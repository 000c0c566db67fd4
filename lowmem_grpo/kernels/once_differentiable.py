"""Backward passes that refuse to be differentiated once more, as a gradient penalty would do.

Where autograd is asked for a graph of the gradients (`create_graph=True`), a penalty on them would be a constant to it,
without a word. torch's own `once_differentiable` notices that only if the incoming gradients need gradients too.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The `backward` of an autograd function, whose results raise RuntimeError when they are differentiated."""
    name = backward.__qualname__.partition(".")[0]

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # a compiled graph has a refusal of its own
            return results
        return tree_map_only(Tensor, lambda grad: FirstOrderOnly.apply(grad.detach().requires_grad_(), name), results)

    return run


class FirstOrderOnly(torch.autograd.Function):
    """A gradient as it is; its own derivative is refused."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, name: str) -> Tensor:
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> None:
        raise RuntimeError(f"{ctx.name} has no second derivative, so a gradient penalty (create_graph=True) cannot "
                           "pass through it. Leave the penalty out, or compute it on a model whose layers are torch's "
                           "own")
