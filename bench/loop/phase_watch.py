"""Measure seconds and peak memory of each phase of a training step, in the same way for every provider.

Nothing here imports the package, so that it also runs in a peer's environment. Phases nest: while an inner phase runs,
the outer one is not counted, so the phases of a step add up to the step.
"""

import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REST = "rest"  # what belongs to no phase
LOOK_EVERY = 0.05  # seconds between looks at what is in use
SECONDS, CPU = "seconds", "cpu_seconds"  # by the wall clock; processor time of all threads of this process
ALLOCATED, USED = "allocated_bytes", "used_bytes"  # by torch's allocator; all that is in use on the card
HOST = "host_bytes"  # the resident set
Step = dict[str, dict[str, Any]]  # measure -> phase -> value


class PhaseWatch:
    """Times the phases of steps, on the CPU or on the current card, which it synchronizes at each phase's border."""

    def __init__(self, device: str) -> None:
        self.card: Any = cuda() if device != "cpu" else None
        self.steps: list[Step] = []
        self.stack: list[str] = []  # the phases that are open; none between steps
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self.look_again, daemon=True)
        self.thread.start()

    def begin_step(self) -> None:
        """Begin to count the phases of a new step."""
        self.now: Step = {name: defaultdict(int) for name in (SECONDS, CPU, ALLOCATED, USED, HOST)}
        if self.card:
            self.card.synchronize()
            self.card.reset_peak_memory_stats()
        self.marked = time.perf_counter(), time.process_time()
        self.stack.append(REST)

    def end_step(self) -> None:
        """End the step, and keep its measures."""
        if self.stack != [REST]:
            raise RuntimeError(f"the step ends inside phase {self.stack[-1] if self.stack else 'none'}")
        self.count()
        self.stack.pop()
        self.steps.append({measure: dict(values) for measure, values in self.now.items() if values})

    @contextmanager
    def step(self) -> Iterator[None]:
        self.begin_step()
        yield
        self.end_step()

    def enter(self, name: str) -> None:
        """Begin a phase, which lasts until `leave`; outside a step nothing is counted."""
        if self.stack:
            self.count()
            self.stack.append(name)

    def leave(self) -> None:
        if len(self.stack) > 1:
            self.count()
            self.stack.pop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def count(self) -> None:
        """Add the time since the last border to the phase that ran."""
        if self.card:
            self.card.synchronize()
        now, name = (time.perf_counter(), time.process_time()), self.stack[-1]
        for measure, end, begin in zip((SECONDS, CPU), now, self.marked, strict=True):
            self.now[measure][name] += end - begin
        if self.card:
            self.keep(ALLOCATED, name, self.card.max_memory_allocated())
            self.card.reset_peak_memory_stats()
        self.look(name)
        self.marked = now

    def keep(self, measure: str, name: str, value: int) -> None:
        with self.lock:
            self.now[measure][name] = max(self.now[measure][name], value)

    def look(self, name: str) -> None:
        """Note what is in use now: on the host, and on the card by the driver's count."""
        self.keep(HOST, name, resident_bytes("VmRSS"))
        if self.card:
            self.keep(USED, name, used_bytes("cuda"))

    def look_again(self) -> None:
        while not self.ended.wait(LOOK_EVERY):
            stack = self.stack[-1:]  # a copy, since the other thread continues
            if stack:
                self.look(stack[0])

    def peak(self) -> int:
        """Return the peak of all steps in bytes: allocated on a card, resident on the CPU."""
        return max((max(step[ALLOCATED].values()) for step in self.steps), default=0) if self.card \
            else resident_bytes()

    def close(self) -> None:
        self.ended.set()
        self.thread.join()


def cuda() -> Any:
    """Return torch.cuda; a watch of the CPU does not import torch."""
    import torch

    return torch.cuda


def used_bytes(device: str) -> int:
    """Return all memory in use on the card, the driver's context included; on the CPU the resident set."""
    if device == "cpu":
        return resident_bytes("VmRSS")
    free, total = cuda().mem_get_info()
    return int(total - free)


def resident_bytes(name: str = "VmHWM") -> int:
    """Return the bytes of the resident set: the peak so far, or with VmRSS the current ones (the peak if unknown)."""
    status = Path("/proc/self/status")
    if status.exists():  # unlike ru_maxrss, this does not count the parent before exec
        line = next(line for line in status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
