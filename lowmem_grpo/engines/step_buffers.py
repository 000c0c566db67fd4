"""What token steps read and write, at addresses that stay, and the CUDA graphs of steps on it.

Rows of `generate` lie in buffers that live as long as the engine, so that the graphs of one call serve the next. Rows
of turns, and all where nothing is recorded, have buffers of their own.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.engines.generation_state import DecodeState
from lowmem_grpo.engines.kv_cache import LastingStorage
from lowmem_grpo.kernels.lora_factors import Kept
from lowmem_grpo.memory.cards import GRAPH_PLACES

LIVING: "weakref.WeakSet[StepBuffers]" = weakref.WeakSet()
MOST_GRAPHS = 64  # some MiB each; beyond, the first of them goes

Run = Callable[[], Tensor]
Record = Callable[[Run, Any], Run]  # work, and a graph beside which it may use memory


class CudaGraph:
    """Work that reads and writes tensors that stay where they are, and asks the device for nothing: one launch."""

    def __init__(self, work: Run, beside: "CudaGraph | None" = None) -> None:
        """Record the work without running it, in the memory of a graph `beside` it that never runs at the same time.
        RuntimeError where it cannot be recorded."""
        self.graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside.graph.pool()
        # another thread may train meanwhile, and what it asks of the device is none of this graph's concern
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.result = work()

    def __call__(self) -> Tensor:
        """Run it; the result is the same tensor each time."""
        self.graph.replay()
        return self.result


class StepBuffers:
    """Inputs, mask and results of steps of up to R rows whose caches have up to C places."""

    def __init__(self, rows: int, capacity: int, device: torch.device, storage: LastingStorage | None = None) -> None:
        self.rows, self.capacity, self.storage = rows, capacity, storage
        self.at = torch.zeros(1, dtype=torch.long, device=device)  # the place of the newest tokens
        self.tokens = torch.zeros(rows, dtype=torch.long, device=device)
        self.positions, self.alive = torch.zeros_like(self.tokens), torch.zeros_like(self.tokens, dtype=torch.bool)
        self.mask = torch.zeros(rows, capacity, dtype=torch.bool, device=device)
        self.added: Tensor | None = None  # what attention adds to its scores: it would make this of the mask each time
        self.out: Tensor | None = None  # (R, V), the logits of graphs
        self.graphs: dict[tuple[int, int], Run] = {}  # by rows and places
        self.held: list[int] = []  # addresses that graphs read
        self.adapters: object = None  # that they compute with
        self.factors: Kept = {}  # the adapters in the dtype of products
        self.steps = 0  # without a graph
        LIVING.add(self)

    def hold(self, state: DecodeState, rows: int) -> None:
        """Take over B rows, and give them a cache and positions that stay; up to `rows` nothing is asked of others."""
        count, width = state.real.shape
        state.cache.fix(self.at, rows, self.capacity)
        real, positions = state.real.clone(), state.positions.clone()  # which may lie here
        self.at.fill_(width)
        for part in (self.positions, self.alive, self.mask):
            part.zero_()
        self.tokens[:count], self.positions[:count], self.mask[:count, :width] = state.tokens, positions, real
        if self.added is None:
            self.added = torch.empty_like(self.mask, dtype=state.cache.growing[0].storage.dtype)
        self.added.zero_().masked_fill_(~self.mask, -torch.inf)
        state.positions = self.positions[:count]

    def add_graph(self, key: tuple[int, int], run: Run) -> None:
        if len(self.graphs) >= MOST_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        self.graphs[key] = run

    def forget_above(self, rows: int) -> None:
        """Let go of the graphs of more rows, which read what is given back."""
        self.graphs = {key: run for key, run in self.graphs.items() if key[0] <= rows}

    def forget_graphs(self) -> None:
        self.graphs.clear()
        self.factors.clear()
        self.steps = 0


def up_to_multiple(width: int, step: int = GRAPH_PLACES) -> int:
    return -(-width // step) * step


def addresses(weights: Iterable[Tensor]) -> list[int]:
    return [part.data_ptr() for part in weights]


def forget_all_graphs() -> None:
    """Let go of the graphs of every engine, which are recorded anew: memory that they read is about to go."""
    for buffers in list(LIVING):
        buffers.forget_graphs()
