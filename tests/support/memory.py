"""Memory in tests: bytes that operations hold, operations that run, and a lack of memory when a test says so."""

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorage(TorchDispatchMode):
    """Inside the context, `peak` is the largest number of bytes alive at once, `live` those alive after the last one.

    Storage that existed before the context does not count, and tensors on the meta device take none. What a single
    operation allocates and frees within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.largest = 0  # bytes of the largest storage made
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def live(self) -> int:
        """Bytes made inside the context and still alive."""
        self.made = {key: entry for key, entry in self.made.items() if not entry[0].expired()}
        return sum(size for _, size in self.made.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {key for key, _ in storages((args, kwargs))}
        for key, storage in storages(result):
            if key not in given and key not in self.made:
                self.made[key] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result


def storages(values: Any) -> list[tuple[int, torch.UntypedStorage]]:
    """The storages of all tensors in `values`, with what identifies them."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"]
    found = [tensor.untyped_storage() for tensor in tensors]
    return [(storage._cdata, storage) for storage in found]


class CountedOps(TorchDispatchMode):
    """`names` of the operations, such as "aten::mm", in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


WORDS = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.00 GiB"


class Failing:
    """A hook that raises at some of its calls, counted from 0."""

    def __init__(self, *calls: int, error: Callable[[], BaseException] = lambda: torch.OutOfMemoryError(WORDS)) -> None:
        self.at, self.calls, self.error, self.raised = set(calls), 0, error, 0

    def __call__(self, *args: Any) -> None:
        number, self.calls = self.calls, self.calls + 1
        if number in self.at:
            self.raised += 1
            raise self.error()
