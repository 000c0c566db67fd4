"""Triton, or a stand-in where it has no wheels: kernels then cannot run, and CPU tensors never need them."""

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:

    class StandIn:
        """Lets a module that defines kernels be imported: decorators return what they decorate."""

        def __getattr__(self, name: str) -> Any:
            return StandIn()

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return arguments[0] if arguments else self

    triton = tl = StandIn()

__all__ = ["tl", "triton"]
