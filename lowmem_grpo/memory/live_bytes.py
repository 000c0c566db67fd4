"""Measure the bytes that tensors take during optimizer steps, to compare with a plan: on a GPU from torch's allocator;
on the CPU by adding up every live storage that an operation creates.

`TorchDispatchMode` is torch's documented way to intercept operations, but its module has a private name. Only this file
uses it. Checked with torch 2.13; tests/memory/test_live_bytes.py fails if it moves.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """A mode that tracks the bytes of live storages in `now` and their maximum in `peak`, those of `held` included."""

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.now = self.peak = 0
        for tensor in held:
            self.count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if tensor.untyped_storage().data_ptr() not in inputs:
                self.count(tensor)
        return result

    def count(self, tensor: Tensor) -> None:
        """Count the storage of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or key in self.seen:  # empty storages share one address
            return
        self.seen.add(key)
        weakref.finalize(storage, self.release, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def release(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def update_peak(trainer: Any, groups: list[Any]) -> int:
    """Train on scored groups (`trainer.update(groups)`) and return the peak bytes of tensors, on a GPU or the CPU."""
    if trainer.policy.device.type == "cuda":
        trainer.update(groups)  # the update resets the allocator's peak when it begins
        return torch.cuda.max_memory_allocated(trainer.policy.device)
    states = [value for state in trainer.learner.optimizer.state.values() for value in state.values()]
    held = [value for value in (*trainer.model.state_dict().values(), *states) if isinstance(value, Tensor)]
    with LiveBytes(held) as live:
        trainer.update(groups)
    return live.peak
