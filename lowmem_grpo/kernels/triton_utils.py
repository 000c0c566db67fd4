"""Triton, and the launch settings of kernels, which depend on the shape and the chip, never on timing at run time.

Where Triton has no wheels, a stand-in takes its place: kernels then cannot run, and CPU tensors never need them.

Each kernel file has launch rules, functions (shape, capability) -> Launch, and `variants(capability, dtype)`, which
lists every configuration that its rules can choose, so that all of them can be compiled ahead of time without a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:

    class StandIn:
        """Replaces Triton, so that modules with kernels can be imported: as a decorator it returns the function."""

        def __getattr__(self, name: str) -> Any:
            return StandIn()

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return arguments[0] if arguments else self

    triton = tl = StandIn()

__all__ = ["tl", "triton"]  # imported here for other modules
# Largest shared memory of one block, in bytes, by compute capability (CUDA C++ programming guide, table of
# technical specifications per compute capability).
SHARED_MEMORY = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
TRITON_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Launch:
    """Block sizes and other compile-time values of a kernel, and its numbers of warps and pipeline stages."""

    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    fused: bool = True  # True: a product and a sum may be fused, with one rounding

    @property
    def compiler(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": self.fused}

    @property
    def options(self) -> dict[str, Any]:
        return self.constexprs | self.compiler


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel: Triton types of its run-time arguments ("*bf16", "i32", "1" for a stride of 1, or a
    tuple of types) and its settings."""

    name: str  # the kernel and this variant's settings, unique within a chip and a dtype
    kernel: Any
    types: dict[str, Any]
    launch: Launch
    constexprs: dict[str, Any] = field(default_factory=dict)  # values that the launch rule does not choose


def types_of(kernel: Any, dtype: torch.dtype, **others: str) -> dict[str, str]:
    """Return the Triton types of run-time arguments: pointers to `dtype` and integers, unless `others` has a type."""
    names = [name for name in kernel.arg_names if len(name) == 1 or not name.isupper()]
    value = "*" + TRITON_TYPES[dtype]
    return {name: value if name.endswith("_ptr") else "i32" for name in names} | others


def flagged(name: str, kernel: Any, types: dict[str, str], launch: Launch, flags: Sequence[str]) -> list[Variant]:
    """Return a variant for each combination of the boolean compile-time values `flags`."""
    return [Variant(f"{name} {chosen}", kernel, types, launch, dict(zip(flags, chosen, strict=True)))
            for chosen in product((False, True), repeat=len(flags))]


def capability(device: torch.device) -> int:
    """Return the compute capability as a number (90 for sm_90); 80 for CPU tensors, which only the interpreter runs."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@triton.jit
def read(row_ptr, columns, inside):
    """Load a tile in float32, with 0 outside."""
    return tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def e4m3(code, NATIVE: tl.constexpr):
    """Return the value of each code (uint8) in float32. With NATIVE, the card converts them itself (from sm_89 on)."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    magnitude = (code & 127).to(tl.uint16)
    bits = (magnitude << 7) | ((code & 128).to(tl.uint16) << 8)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(magnitude == 127, float("nan"), value)


@triton.jit
def e2m1(code):
    """Return the value of each E2M1 code (uint8, below 16) in float32: its bits in a float16 are the value / 2**14."""
    bits = ((code & 7).to(tl.uint16) << 9) | ((code & 8).to(tl.uint16) << 12)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e8m0(scale):
    """Return 2**(scale - 127) for each scale (uint8, below 255) in float32; 2**-127 is below its normal numbers."""
    exponent = scale.to(tl.uint32)
    return tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
