"""Weights of q, k, v (gate, up) laid one after the other in one buffer, of which the model's parameters are views.

An engine then computes all of them by one product. Nothing else changes: each parameter has its name, shape and values,
and a saved model is the same checkpoint. One group is copied at a time, so the extra memory is that of one group.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowmem_grpo.kernels.nf4 import NF4Weight

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fuse_weights(model: nn.Module) -> list[str]:
    """Lay out every group of the model that allows it; the paths of those left as they were, with the reason."""
    left = []
    for path, modules in groups_of(model):
        try:
            fuse([module.weight for module in modules])
        except ValueError as error:
            left.append(f"{path}: {error}")
        if modules[0].weight.is_cuda:
            torch.cuda.empty_cache()  # else the old places would be kept until all groups are done
    return left


def groups_of(model: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    """The path and the modules of each group: children of one parent, frozen, not wrapped by an adapter."""
    for parent_path, parent in model.named_modules():
        children = dict(parent.named_children())
        for names in GROUPS:
            modules = [children.get(name) for name in names]
            if all(isinstance(module, nn.Linear) for module in modules):
                yield f"{parent_path}.{'|'.join(names)}", modules


def fuse(params: list[Any]) -> None:
    """Make the parameters views of one new buffer; ValueError where they do not fit, and nothing has changed."""
    if all(hasattr(param, "quant_state") for param in params):
        NF4Weight.adjacent(params)
    else:
        fuse_plain(params)


def fuse_plain(params: list[nn.Parameter]) -> None:
    """The same for weights that are not quantized."""
    kinds = {(type(param), param.dtype, param.device, param.shape[1:], param.requires_grad) for param in params}
    if len(kinds) > 1 or params[0].requires_grad or type(params[0]) is not nn.Parameter:
        raise ValueError(f"expected frozen weights of one dtype, device and width; got {kinds}")
    joined = torch.cat([param.data for param in params])
    for param, view in zip(params, joined.split([len(param) for param in params]), strict=True):
        param.data = view
