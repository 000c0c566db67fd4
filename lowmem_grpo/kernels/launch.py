"""How kernels are launched: settings chosen from the shape and the chip, never by timing at run time.

Each kernel file has launch rules, functions (shape, capability) -> Launch, and `variants(capability, dtype)`, which
lists every configuration that its rules can choose, so that all of them can be compiled ahead of time without a GPU.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

# Largest shared memory of one block, in bytes, by compute capability (CUDA C++ programming guide, table of
# technical specifications per compute capability).
SHARED_MEMORY = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
TRITON_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Launch:
    """Block sizes and other compile-time values of a kernel, and how many warps and pipeline stages it gets."""

    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    @property
    def options(self) -> dict[str, Any]:
        """Everything as keyword arguments of a launch."""
        return self.constexprs | {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel: Triton types of its run-time arguments ("*bf16", "i32", ...) and its settings."""

    name: str  # of the kernel and what is special about this variant, unique within a chip and a dtype
    kernel: Any
    types: dict[str, str]
    launch: Launch
    constexprs: dict[str, Any] = field(default_factory=dict)  # those that the launch rule does not choose


def capability(device: torch.device) -> int:
    """Compute capability as a number (90 for sm_90); 80 for CPU tensors, which only the interpreter launches with."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n and at least 1."""
    return 1 << max(n - 1, 0).bit_length()
