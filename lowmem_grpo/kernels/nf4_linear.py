"""Linear layers over a frozen 4-bit weight. (First version: the interface stands, the fast paths follow.)"""

from torch import Tensor

from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize


def project(x: Tensor, weight: NF4Weight | Tensor) -> Tensor:
    """x W^T without autograd: x (..., in), weight (out, in) -> (..., out)."""
    return x @ dense(weight, x).T


def project_back(grad: Tensor, weight: NF4Weight | Tensor) -> Tensor:
    """grad W without autograd: grad (..., out), weight (out, in) -> (..., in)."""
    return grad @ dense(weight, grad)


def dense(weight: NF4Weight | Tensor, like: Tensor) -> Tensor:
    """The weight as a tensor in `like`'s dtype."""
    return nf4_dequantize(weight).to(like.dtype) if isinstance(weight, NF4Weight) else weight.to(like.dtype)
