"""Measure peak memory: of the process or card so far, of each phase of a step, and of the tensors of an optimizer step.

Only this file uses `TorchDispatchMode`, whose module has a private name. tests/memory/test_peaks.py fails if it moves.
"""

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_grpo.memory.cards import DEFAULT_SHARE, Device
from lowmem_grpo.memory.plan import MemoryPlan


def peak_memory(device: torch.device) -> dict[str, Any]:
    """Return the peak bytes of allocated and reserved memory on a card, or of the process's resident set on the CPU;
    empty on the CPU of Windows, which lacks the call."""
    if device.type == "cuda":
        return {"memory/peak_bytes": torch.cuda.max_memory_allocated(device),
                "memory/reserved_bytes": torch.cuda.max_memory_reserved(device)}
    try:
        import resource
    except ImportError:
        return {}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory/peak_bytes": peak if sys.platform == "darwin" else peak * 1024}


def this_card(device: torch.device) -> Device:
    """Return the card of this device, with the bytes that this process may fill as its budget."""
    total = torch.cuda.get_device_properties(device).total_memory
    share = min(DEFAULT_SHARE, torch.cuda.get_per_process_memory_fraction(device))
    return Device(torch.cuda.get_device_name(device), total, int(total * share))


def keep_to(share: float) -> None:
    """Limit this process to a share of its card; torch raises an out-of-memory error beyond it."""
    if share < 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)


class PhasePeaks:
    """The peaks of torch's allocations in each phase of a step on a card. On the CPU nothing is measured."""

    def __init__(self, device: torch.device, plan: MemoryPlan | None = None) -> None:
        self.device, self.plan = device, plan
        self.counted = device.type == "cuda"
        self.peaks: dict[str, int] = {}
        self.highest = self.reserved = 0  # bytes; each phase resets torch's own peaks

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the peak allocation within this context for the phase `name`."""
        if not self.counted:
            yield
            return
        self.keep_highest()
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield
        finally:
            self.peaks[name] = max(self.peaks.get(name, 0), self.keep_highest())

    def keep_highest(self) -> int:
        """Update the highest peaks so far; return torch's peak allocation since its last reset."""
        peak = torch.cuda.max_memory_allocated(self.device)
        self.highest = max(self.highest, peak)
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.device))
        return peak

    def metrics(self) -> dict[str, int]:
        """Return, in bytes, the highest peaks so far, each phase's peak since the last call, and the planned bytes."""
        if not self.counted:
            return {}
        measured = {"memory/peak_bytes": self.highest, "memory/reserved_bytes": self.reserved,
                    **{f"memory/{name}_bytes": at for name, at in self.peaks.items()}}
        self.peaks = {}
        return measured if self.plan is None else measured | {
            "memory/planned_generate_bytes": self.plan.rollout, "memory/planned_train_bytes": self.plan.train}


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that counts the bytes of live storages, with those of `held`: `now`, and at the `peak` so far."""

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
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def update_peak(trainer: Any, groups: list[Any]) -> int:
    """Train on scored groups (`trainer.update(groups)`) and return the peak bytes of tensors, on a GPU or the CPU."""
    if trainer.policy.device.type == "cuda":
        trainer.update(groups)  # which resets the allocator's peak when it begins
        return torch.cuda.max_memory_allocated(trainer.policy.device)
    states = [value for state in trainer.learner.optimizer.state.values() for value in state.values()]
    held = [value for value in (*trainer.model.state_dict().values(), *states) if isinstance(value, Tensor)]
    with LiveBytes(held) as live:
        trainer.update(groups)
    return live.peak
