"""Kernels for anyone's training loop: torch alone is needed, and Triton where there is a CUDA card."""

from lowmem_grpo.kernels.linear_logprobs import linear_logprobs, linear_logprobs_ref
from lowmem_grpo.kernels.lora import LoRA, lora_linear, lora_linear_ref
from lowmem_grpo.kernels.lora_mlp import lora_mlp, lora_mlp_ref

__all__ = [
    "LoRA", "linear_logprobs", "linear_logprobs_ref", "lora_linear", "lora_linear_ref", "lora_mlp", "lora_mlp_ref",
]
