"""Kernels for anyone's training loop: torch alone is needed."""

from lowmem_grpo.kernels.linear_logprobs import linear_logprobs, linear_logprobs_ref

__all__ = ["linear_logprobs", "linear_logprobs_ref"]
