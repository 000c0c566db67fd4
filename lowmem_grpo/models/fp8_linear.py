"""A frozen linear layer on FP8 weights, which PEFT's LoRA wraps like a plain one.

transformers' FP8 layers have a wrong backward pass or none, and quantize activations too. Here the weight is decoded
tile by tile in forward and backward, and multiplied in 16 bits.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lowmem_grpo.kernels.fp8 import FP8Weight, scales_shape
from lowmem_grpo.kernels.frozen import frozen_linear

SCALE = "weight_scale"  # beside `weight`, under the name that compressed-tensors gives it


class FP8Linear(nn.Linear):
    """A linear layer whose `weight` (out, in) uint8 holds e4m3 codes; `weight_scale` has one float32 per (h, w) block.

    `compute_dtype` is the dtype of products; setting it changes no stored number. `module.to(dtype)` would round the
    scales, so the next product raises an error.
    """

    weight_scale: Tensor
    bias: nn.Parameter | None  # type: ignore[assignment]  # torch declares it as never None

    def __init__(self, in_features: int, out_features: int, bias: bool, block: tuple[int, int], dtype: torch.dtype,
                 stored: torch.dtype = torch.uint8) -> None:
        nn.Module.__init__(self)  # nn.Linear.__init__ would allocate a 16-bit weight
        self.in_features, self.out_features, self.block, self.compute_dtype = in_features, out_features, block, dtype
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=stored), requires_grad=False)
        self.register_buffer(SCALE, torch.empty(scales_shape((out_features, in_features), block), dtype=torch.float32))
        frozen = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        self.register_parameter("bias", frozen)

    @classmethod
    def holding(cls, weight: FP8Weight, bias: Tensor | None = None) -> "FP8Linear":
        """Return a layer that holds this weight without a copy."""
        with torch.device("meta"):
            layer = cls(weight.shape[1], weight.shape[0], bias is not None, weight.block, weight.dtype)
        layer.hold(weight)
        layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        return layer

    def hold(self, weight: FP8Weight) -> None:
        """Replace the layer's weight, scales and block size by those of `weight`."""
        self.weight, self.weight_scale = nn.Parameter(weight.codes, requires_grad=False), weight.scales
        self.block = weight.block

    @property
    def frozen(self) -> FP8Weight:
        """The weight in the form that the kernels take, decoding to `compute_dtype`; ValueError if codes or scales
        were cast to another dtype."""
        return FP8Weight.from_codes(self.weight.detach(), self.weight_scale, self.block, self.compute_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out), in the dtype of x, or in autocast's dtype if autocast is on."""
        device = x.device.type
        mixed = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if mixed else self.compute_dtype
        bias = self.bias if self.bias is None else self.bias.to(dtype)
        y = frozen_linear(x.to(dtype), self.frozen, bias)
        return y if mixed else y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block={self.block}, compute_dtype={self.compute_dtype}"


def fp8_linears(model: nn.Module) -> Iterator[FP8Linear]:
    return (module for module in model.modules() if isinstance(module, FP8Linear))


def stored_weight(codes: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> FP8Weight:
    """Return the weight from a checkpoint's codes and scales, with scales in float32. A single scale is repeated for
    each row, so that adjacent weights can be used as one. ValueError if they do not fit, or a scale is not finite."""
    scales = scales.float()
    if not scales.isfinite().all():
        raise ValueError("its scales are not finite")
    rows, columns = codes.shape
    if scales.numel() == 1 or tuple(scales.shape) in ((rows,), (rows, 1)):
        scales, block = scales.reshape(-1, 1).expand(rows, 1), (1, columns)
    return FP8Weight.from_codes(codes.contiguous(), scales.contiguous(), block, dtype)


def form_in_fp8(model: nn.Module) -> bool | str:
    """Return the value of `load_in_fp8` that loads weights in this model's form: False without FP8 layers, "block" if
    they have scales by block, otherwise True."""
    layer = next(fp8_linears(model), None)
    return layer is not None and ("block" if layer.block[0] > 1 else True)
