"""The operations that run inside a context."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountedOps(TorchDispatchMode):
    """`names` of the operations, such as "aten::mm", in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))
