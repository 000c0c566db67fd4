"""Samples of a run in a bounded amount of memory: whole steps, spread over the run, and those of its end."""

from collections import deque
from typing import Any

Record = dict[str, Any]

MOST_BYTES = 48 * 1024 * 1024  # of the lines of all samples
MOST_OF_A_STEP = 256


class Spread:
    """Steps that are evenly spread over a run, in at most `limit` samples, and the `newest` samples besides."""

    def __init__(self, limit: int, newest: int = 0) -> None:
        self.limit, self.newest, self.every = limit, newest, 1
        self.count = self.bytes = self.tail_bytes = 0
        self.kept: dict[int, list[tuple[Record, int]]] = {}
        self.tail: deque[tuple[Record, int]] = deque()

    def add(self, sample: Record, size: int) -> None:
        """Keep a sample, whose line has `size` bytes, if its step is one of those that are kept."""
        self.add_to_tail(sample, size)
        step = sample["step"]
        held = self.kept.get(step, [])
        alone = len(self.kept) == bool(held)
        if step % self.every or len(held) >= MOST_OF_A_STEP or (alone and self.bytes + size > MOST_BYTES):
            return
        self.kept.setdefault(step, held).append((sample, size))
        self.count, self.bytes = self.count + 1, self.bytes + size
        while (self.count > self.limit or self.bytes > MOST_BYTES) and len(self.kept) > 1:
            self.thin()

    def add_to_tail(self, sample: Record, size: int) -> None:
        """Keep it as one of the newest, in place of the oldest of these."""
        self.tail.append((sample, size))
        self.tail_bytes += size
        while self.tail and (len(self.tail) > self.newest or self.tail_bytes > MOST_BYTES):
            self.tail_bytes -= self.tail.popleft()[1]

    def thin(self) -> None:
        """Keep every second of the steps only; of steps without order, the first half."""
        self.every *= 2
        kept = {step: held for step, held in self.kept.items() if not step % self.every}
        self.kept = kept or dict(list(self.kept.items())[:1])
        self.count = sum(map(len, self.kept.values()))
        self.bytes = sum(size for held in self.kept.values() for _, size in held)

    def samples(self) -> list[Record]:
        """What is kept, in the order of the steps."""
        by_step = {step: [sample for sample, _ in held] for step, held in self.kept.items()}
        for sample, _ in self.tail:
            if sample["step"] not in self.kept:
                by_step.setdefault(sample["step"], []).append(sample)
        return [sample for step in sorted(by_step) for sample in by_step[step]]
