"""Reads the trace that torch's profiler exports, whose format is public, as a plain list of events."""

import gzip
import json
from pathlib import Path
from typing import Any

from bench.profiles.timeline import COPY, HOST, KERNEL, LAUNCH, Event, innermost

KERNELS = ("kernel", "gpu_memset")
COPIES = ("Memcpy HtoD", "Memcpy DtoH")  # a copy within the device is work of the device, like a kernel
RUNTIME = ("cuda_runtime", "cuda_driver")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cuGraphLaunch", "cudaLaunchCooperativeKernel")


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The entries of a Chrome trace, packed or not; ValueError where it is not one."""
    data = path.read_bytes()
    content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    if not isinstance(content, dict) or "traceEvents" not in content:
        raise ValueError(f"{path} is not a trace of torch's profiler: it has no traceEvents")
    return list(content["traceEvents"])


def events_of(entries: list[dict[str, Any]]) -> list[Event]:
    """Kernels, copies, launches and the host's ops; entries without a duration are left out."""
    found = (event_of(entry) for entry in entries if entry.get("ph") == "X" and "dur" in entry)
    return sorted((event for event in found if event is not None), key=lambda event: event.start)


def event_of(entry: dict[str, Any]) -> Event | None:
    """One entry, or None for what neither device nor host did (annotations, Python's frames)."""
    kind = kind_of(str(entry.get("cat", "")), str(entry.get("name", "")))
    if kind is None:
        return None
    stream = f"{entry.get('pid')}/{entry.get('tid')}"
    return Event(float(entry["ts"]), float(entry["dur"]), stream, kind, str(entry["name"]))


def kind_of(category: str, name: str) -> str | None:
    """By the profiler's categories; cudaLaunchKernelExC and its like are launches too."""
    if category in KERNELS:
        return KERNEL
    if category == "gpu_memcpy":
        return COPY if name.startswith(COPIES) else KERNEL
    if category in RUNTIME:
        return LAUNCH if name.startswith(LAUNCHES) else HOST
    return HOST if category == "cpu_op" else None


def ops_as_kernels(events: list[Event]) -> list[Event]:
    """The events of a CPU: each op's own time, inner ops left out, in the place of kernels; the ops themselves stay."""
    ops = [event for event in events if event.kind == HOST]
    pieces = [Event(one.start, one.duration, one.stream, KERNEL, one.name) for one in innermost(ops)]
    begun = [Event(one.start, one.duration, one.stream, LAUNCH, one.name) for one in ops]
    return [*pieces, *begun]
