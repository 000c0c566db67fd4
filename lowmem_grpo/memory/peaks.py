"""Measure peak memory: of the process or card so far, and of each phase of a step."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowmem_grpo.memory.cards import DEFAULT_SHARE, Device
from lowmem_grpo.memory.plan import MemoryPlan


def peak_memory(device: torch.device) -> dict[str, Any]:
    """Return peak bytes so far: allocated and reserved on a card, the process's resident set on the CPU."""
    if device.type == "cuda":
        return {
            "memory/peak_bytes": torch.cuda.max_memory_allocated(device),
            "memory/reserved_bytes": torch.cuda.max_memory_reserved(device),
        }
    import resource

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
    """The peaks of torch's allocations in each phase of a step, on a card; on the CPU nothing is counted."""

    def __init__(self, device: torch.device, plan: MemoryPlan | None = None) -> None:
        self.device, self.plan = device, plan
        self.counted = device.type == "cuda"
        self.peaks: dict[str, int] = {}
        self.highest = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the peak allocation within this context for the phase `name`."""
        if not self.counted:
            yield
            return
        self.highest = max(self.highest, torch.cuda.max_memory_allocated(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield
        finally:
            self.peaks[name] = max(self.peaks.get(name, 0), torch.cuda.max_memory_allocated(self.device))
            self.highest = max(self.highest, self.peaks[name])

    def metrics(self) -> dict[str, int]:
        """Return, in bytes, the highest peak so far, each phase's peak since the last call, and the planned bytes."""
        if not self.counted:
            return {}
        measured = {"memory/peak_bytes": self.highest} | {f"memory/{name}_bytes": at for name, at in self.peaks.items()}
        self.peaks = {}
        if self.plan is None:
            return measured
        return measured | {"memory/planned_generate_bytes": self.plan.rollout,
                           "memory/planned_train_bytes": self.plan.train}
