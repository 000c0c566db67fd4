"""Work on micro-batches that starts again with smaller ones where memory runs out.

The gradient is that of a run that had these from the start: bit for bit on the CPU, up to rounding on a card, where
fused attention sums in no fixed order.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from lowmem_grpo.memory.cutting import Limits
from lowmem_grpo.memory.oom import BatchLimit, OutOfMemory, catch_oom, smaller
from lowmem_grpo.models.packing import pack
from lowmem_grpo.types import MicroBatch, RolloutGroup

T = TypeVar("T")


class Packer:
    """Packs groups for a device, within limits and under a bound on tokens that shrinks when memory runs out."""

    def __init__(self, device: torch.device, bound: BatchLimit) -> None:
        self.device, self.bound = device, bound
        self.size = 0  # tokens of the micro-batch in progress

    def run(self, what: str, groups: list[RolloutGroup], limits: Limits, work: Callable[[Iterator[MicroBatch]], T],
            undo: Callable[[], None] | None = None, again: Callable[[], None] | None = None) -> T:
        """Return the results of `work` for all micro-batches of the groups; `what` names it in messages.

        If memory runs out, `undo` takes back what the attempt did, the bound is lowered, `again` prepares the next
        attempt, and everything is packed anew. Raises MemoryExhaustedError where each micro-batch is already a single
        sequence.
        """
        while True:
            tokens = self.bound.under(limits.tokens)
            batches = pack(groups, tokens, limits.sequences, limits.spread)
            done = catch_oom(lambda held=batches: work(self.moved(held)), self.device, undo)  # type: ignore[misc]
            if not isinstance(done, OutOfMemory):
                return done
            divisible = [len(batch.input_ids) for batch in batches if len(batch.rollouts) > 1]
            self.bound.lower(self.describe(what), done, smaller(tokens or self.size, divisible))
            if again is not None:
                again()

    def moved(self, batches: list[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in batches:
            self.size = len(batch.input_ids)
            yield batch.to(self.device)

    def describe(self, what: str) -> str:
        return f"{what} of {self.size:,} tokens"
