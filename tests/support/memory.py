"""Memory in tests: bytes that operations hold, operations that run, also again as a CUDA graph runs them, and a lack of
memory when a test says so."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.memory.cards import GRAPH_PLACES


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


@contextmanager
def failing(engine: TransformersEngine, *calls: int) -> Iterator[Failing]:
    """Inside, memory runs out at the end of these passes through the engine's model."""
    hook = Failing(*calls)
    handle = engine.policy.backbone.norm.register_forward_hook(hook)
    try:
        yield hook
    finally:
        handle.remove()


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Operations(TorchDispatchMode):
    """Records torch's operations with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        given = {part.untyped_storage().data_ptr() for part in tensors((args, kwargs))}
        made = [part for part in tensors(result) if part.untyped_storage().data_ptr() not in given]
        if made or func._schema.is_mutable:  # a view stays what it is
            self.kept.append((func, args, kwargs, [] if func._schema.is_mutable else tensors(result)))
        return result

    def again(self) -> None:
        """All of them, into the results that they had."""
        for func, args, kwargs, results in self.kept:
            for held, new in zip(results, tensors(func(*args, **kwargs)), strict=False):
                held.copy_(new)


class Recorder:
    """Records steps of an engine, and counts how often it did and how often they ran."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.step, self.recorded, self.ran = engine.step, 0, 0
        engine.step.record, engine.step.block = self, GRAPH_PLACES

    def __call__(self, work: Callable[[], Tensor], beside: Any = None) -> Callable[[], Tensor]:
        """This runs the work, which recording on a card does not, so that what it did is undone."""
        with Operations() as operations:
            result = work()
        buffers = self.step.buffers
        buffers.at.sub_(1)
        buffers.mask.index_fill_(1, buffers.at, -torch.inf)
        buffers.positions[: self.step.rows].sub_(1)
        self.recorded += 1

        def run() -> Tensor:
            self.ran += 1
            with torch.no_grad():
                operations.again()
            return result

        return run
