"""The output head as the log-probability kernels read it: plain or 4-bit, with or without LoRA, band by band."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem_grpo.kernels.matmul import accumulator_dtype, addmm_fp32, matmul_fp32
from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize

HeadWeight = Tensor | NF4Weight


@dataclass(frozen=True)
class Head:
    """raw logits (N, V) = hidden weight^T + low lora_b^T, of which only parts are ever made; bias is added later.

    hidden (N, D), weight (V, D), bias (V,) or None; low = scale * hidden lora_a^T (N, r) and lora_b (V, r), or None.
    """

    hidden: Tensor
    weight: HeadWeight
    bias: Tensor | None = None
    low: Tensor | None = None
    lora_b: Tensor | None = None

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    def weight_rows(self, band: slice) -> Tensor:
        """Rows of the weight (T, D), dequantized where they are 4-bit."""
        if isinstance(self.weight, NF4Weight):
            return nf4_dequantize(self.weight.rows(band.start, band.stop))
        return self.weight[band]

    def weight_at(self, index: Tensor) -> Tensor:
        """The rows of the weight at `index` (R,): (R, D)."""
        if isinstance(self.weight, NF4Weight):
            return nf4_dequantize(self.weight.gather(index))
        return self.weight[index]

    def bias_rows(self, band: slice) -> Tensor | None:
        return None if self.bias is None else self.bias[band]

    def logits(self, rows: slice, band: slice, weight: Tensor, out: Tensor) -> Tensor:
        """Raw logits of some rows and a band of the vocabulary, whose `weight` rows are given, written to `out`."""
        matmul_fp32(self.hidden[rows], weight.T, out=out)
        if self.low is not None and self.lora_b is not None:
            addmm_fp32(out, self.low[rows], self.lora_b[band].T)
        return out

    def buffer(self, rows: int, columns: int) -> Tensor:
        """Uninitialised room for logits (rows, columns), float32 or float64."""
        dtype = accumulator_dtype(self.hidden.dtype)
        return torch.empty(rows, columns, dtype=dtype, device=self.hidden.device)
