"""Time calls in turn, measure what a call allocates, and compare its results with float64."""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.common.rows import percentiles
from bench.kernels.problems import Run

CUDA_ROUNDS, CUDA_SECONDS = 5, 0.1  # rounds, and about the seconds that a provider runs in each
CPU_ROUNDS, CPU_SECONDS = 25, 2.0  # most rounds, and seconds after which only missing rounds of `fewest` start
COPIES = 9  # the copy bandwidth is their median
FLUSH_BYTES = 2**31  # written before each timed call: empties the L2 cache and gives the host time to queue the call


@dataclass
class Clock:
    """Times single calls in milliseconds, on the CPU or on the current card."""

    device: str
    fewest: int = 3  # rounds on the CPU
    flush: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            self.flush = torch.empty(min(FLUSH_BYTES, total // 16), dtype=torch.uint8, device="cuda")

    def times(self, run: Run, calls: int) -> list[float]:
        """Return the milliseconds of some calls, one by one."""
        return [self.once(run) for _ in range(calls)] if self.flush is None else self.on_card(run, calls)

    def once(self, run: Run) -> float:
        """Return the milliseconds of one call on the CPU."""
        run.reset()
        start = time.perf_counter()
        run.call()
        return 1e3 * (time.perf_counter() - start)

    def on_card(self, run: Run, calls: int) -> list[float]:
        """Return the milliseconds of each call with a cold L2 cache, by events on the stream."""
        assert self.flush is not None
        pairs = []
        for _ in range(calls):
            run.reset()
            self.flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run.call()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]

    def interleaved(self, runs: dict[str, Run]) -> dict[str, list[float]]:
        """Return the times of every provider, which run in turn; the order is reversed from round to round."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        calls = {name: self.calls(run) for name, run in runs.items()}
        rounds, start = 0, time.perf_counter()
        while self.another(rounds, time.perf_counter() - start):
            for name in list(runs) if rounds % 2 == 0 else list(reversed(runs)):
                times[name] += self.times(runs[name], calls[name])
            rounds += 1
        return times

    def calls(self, run: Run) -> int:
        """Return the number of calls that take about CUDA_SECONDS on the card; one on the CPU."""
        if self.flush is None:
            return 1
        return max(3, min(50, int(1e3 * CUDA_SECONDS / max(*self.on_card(run, 2), 1e-3))))

    def another(self, rounds: int, seconds: float) -> bool:
        """Return whether to run another round."""
        if self.flush is not None:
            return rounds < CUDA_ROUNDS
        return rounds < self.fewest or (rounds < CPU_ROUNDS and seconds < CPU_SECONDS)


def peak_bytes(run: Run, device: str) -> int:
    """Return the most bytes alive during a call beyond those alive before it, results included: on a card by the
    counters of the caching allocator."""
    run.reset()
    if device == "cpu":
        return cpu_peak(run)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run.call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def cpu_peak(run: Run) -> int:
    """Return the peak by all allocations and releases that the profiler saw, also those inside compiled code."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        results = run.call()
    del results
    events = profile.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    live = peak = 0
    for _, change in sorted(changes, key=lambda entry: entry[0]):
        live += change
        peak = max(peak, live)
    return peak


def errors(results: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Return each result's largest error divided by the largest true value. `truth` may hold only the first rows."""
    found = {}
    for name in results.keys() & truth.keys():
        result = results[name].detach()[: len(truth[name])]
        # in chunks, because results in float64 may be large
        pairs = zip(result.flatten().split(2**24), truth[name].flatten().split(2**24), strict=True)
        error = max((ours.double() - true).abs().max().item() for ours, true in pairs)
        found[name] = float(f"{error / max(truth[name].abs().max().item(), 1e-300):.3g}")
    return dict(sorted(found.items()))


def copy_bandwidth(clock: Clock) -> float:
    """Return the bytes per second of a plain copy, reads and writes counted: the limit for memory-bound ops."""
    size = 2**28 if clock.flush is None else clock.flush.numel()
    source = torch.ones(size, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    target.copy_(source)
    times = clock.times(Run(lambda: {"copy": target.copy_(source)}), COPIES)
    return 2e3 * size / percentiles(times)["p50"]
