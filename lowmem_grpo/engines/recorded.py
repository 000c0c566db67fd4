"""Work of a card that is recorded once as a CUDA graph, and then started as a whole: one launch in place of thousands.

This has never run on a card. What uses it compares the first run of a graph with the same work done without one.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class Recorded:
    """A graph of `work`, which reads and writes tensors that stay where they are, and asks the device for nothing."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        """Record, without running anything. RuntimeError where the work cannot be recorded."""
        self.graph = torch.cuda.CUDAGraph()
        # another thread may train meanwhile, and what it asks of the device is none of this graph's concern
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = work()

    def __call__(self) -> Tensor:
        """Run it; the result is the same tensor each time."""
        self.graph.replay()
        return self.result
