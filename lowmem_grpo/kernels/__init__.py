"""Kernels for any training loop: they need only torch, and Triton on a CUDA card."""

from lowmem_grpo.kernels.clamped_swiglu import ClampedSwiGLU
from lowmem_grpo.kernels.fp8 import FP8Weight, fp8_dequantize, fp8_dequantize_ref, fp8_quantize
from lowmem_grpo.kernels.frozen import FrozenStack, frozen_linear
from lowmem_grpo.kernels.glu import geglu, geglu_ref, swiglu, swiglu_ref
from lowmem_grpo.kernels.linear_divergence import (
    Divergence,
    linear_divergence,
    linear_divergence_ref,
    linear_topk,
)
from lowmem_grpo.kernels.linear_logprobs import linear_logprobs, linear_logprobs_ref
from lowmem_grpo.kernels.lora import LoRA, lora_linear, lora_linear_ref
from lowmem_grpo.kernels.lora_mlp import lora_mlp, lora_mlp_ref
from lowmem_grpo.kernels.mxfp4 import MXFP4Weight, mxfp4_dequantize, mxfp4_dequantize_ref, mxfp4_quantize
from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize, nf4_dequantize_ref
from lowmem_grpo.kernels.nf4_linear import nf4_linear, nf4_linear_ref
from lowmem_grpo.kernels.nvfp4 import NVFP4Weight
from lowmem_grpo.kernels.rms_norm import rms_norm, rms_norm_ref
from lowmem_grpo.kernels.rope import rope, rope_ref
from lowmem_grpo.kernels.routed_experts import routed_experts, routed_experts_ref

__all__ = [
    "ClampedSwiGLU", "Divergence", "FP8Weight", "FrozenStack", "LoRA", "MXFP4Weight", "NF4Weight", "NVFP4Weight",
    "fp8_dequantize", "fp8_dequantize_ref", "fp8_quantize", "frozen_linear", "geglu", "geglu_ref", "linear_divergence",
    "linear_divergence_ref", "linear_logprobs", "linear_logprobs_ref", "linear_topk", "lora_linear", "lora_linear_ref",
    "lora_mlp", "lora_mlp_ref", "mxfp4_dequantize", "mxfp4_dequantize_ref", "mxfp4_quantize", "nf4_dequantize",
    "nf4_dequantize_ref", "nf4_linear", "nf4_linear_ref", "rms_norm", "rms_norm_ref", "rope", "rope_ref",
    "routed_experts", "routed_experts_ref", "swiglu", "swiglu_ref",
]
