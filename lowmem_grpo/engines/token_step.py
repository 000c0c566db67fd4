"""Decode steps of a batch. A step is one forward pass whose inputs and outputs stay at fixed addresses.

On a card the step is recorded as a CUDA graph, once per number of rows and cache length (rounded up), because the host
takes longer to launch a small step's kernels than the card to run them. A graph's first result is compared with the
eager step's. Without graphs the same code runs eagerly, and a warning says why; with `enforce_eager=False` this is an
error instead.

Rows of `generate` use buffers that live as long as the engine, so that the graphs of one call serve the next. Rows of
`converse`, and all rows if no graphs are recorded, get new buffers.
"""

import logging
import weakref
from collections.abc import Iterable
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from lowmem_grpo.engines.batch import DecodeState, Passes
from lowmem_grpo.engines.cuda_graphs import (
    CudaGraph,
    Record,
    Run,
    differs,
    not_recorded,
    refuse_graphs,
    say_plain,
)
from lowmem_grpo.engines.kv_cache import LastingStorage
from lowmem_grpo.kernels.lora_factors import Kept
from lowmem_grpo.memory.cards import GRAPH_PLACES, graph_rows, graph_width
from lowmem_grpo.memory.oom import is_out_of_memory
from lowmem_grpo.models.hub import first_line
from lowmem_grpo.models.lora_layers import adapter_state

logger = logging.getLogger(__name__)
LIVING: "weakref.WeakSet[StepBuffers]" = weakref.WeakSet()
MOST_GRAPHS = 64  # graphs kept, at some MiB each; beyond that the least recently used is dropped
WARM = 2  # eager steps before the first graph, which compile kernels and initialize libraries; 1 before later graphs
GROW = 2  # lasting buffers may keep an earlier call's rows or width up to this multiple of the size now needed


class StepBuffers:
    """Inputs, masks, results and graphs of decode steps with up to R rows whose caches have up to C positions."""

    def __init__(self, rows: int, capacity: int, device: torch.device, storage: LastingStorage | None = None) -> None:
        self.rows, self.capacity, self.storage = rows, capacity, storage
        self.at = torch.zeros(1, dtype=torch.long, device=device)  # cache index at which the newest tokens are written
        self.tokens = torch.zeros(rows, dtype=torch.long, device=device)
        self.positions, self.alive = torch.zeros_like(self.tokens), torch.zeros_like(self.tokens, dtype=torch.bool)
        self.shifts = torch.zeros_like(self.tokens)
        self.mask: Tensor | None = None  # (R, C), 0 for real tokens and -inf elsewhere; the first rows set its dtype
        self.out: Tensor | None = None  # (R, V), the logits of graphs
        self.graphs: dict[tuple[int, int], Run] = {}  # by rows and cache places, the most recently used last
        self.held: list[int] = []  # addresses of the weights that the graphs read
        self.adapters: object = None  # identifies the adapters that the graphs compute with
        self.factors: Kept = {}  # the adapters in the compute dtype
        self.steps = 0  # eager steps so far
        LIVING.add(self)

    def forget_graphs(self) -> None:
        self.graphs.clear()
        self.factors.clear()
        self.steps = 0


class TokenStep:
    """The decode steps of a batch. A step feeds the last sampled token of each row, and returns the next logits."""

    def __init__(self, passes: Passes, eager: bool | None = None) -> None:
        """Decode with CUDA graphs where they are possible. `eager=True` never records one; with `eager=False`, raise
        EngineUnavailableError if they are not possible."""
        self.passes = passes
        why = not_recorded(passes.policy)
        if eager is False:
            refuse_graphs(why)
        self.must = eager is False  # a failed recording is an error; False once a graph has been recorded
        self.record: Record | None = None if why or eager else CudaGraph
        # a graph has a fixed length, so the places that attention reads are rounded up to a multiple of this
        self.block = GRAPH_PLACES if self.record else 1
        self.recorded = 0  # graphs made so far
        self.state: DecodeState | None = None
        self.alive: Tensor | None = None  # (B,), as it was last copied
        self.empty = self.buffers = StepBuffers(0, 0, passes.policy.device)
        self.lasting: StepBuffers | None = None  # buffers of `generate`, kept between calls
        if passes.policy.device.type == "cuda" and why and not eager:
            say_plain(why)

    def prepare(self, rows: int, width: int) -> None:
        """If steps are recorded, make lasting buffers for `rows` rows of `width` cache positions. Buffers of an earlier
        call stay, with their graphs, if they are large enough."""
        width, old = up_to_multiple(width, self.block), self.lasting
        if self.record is None:
            self.lasting = None
        elif old is None or rows > old.rows or width > old.capacity:
            most = (rows, width) if old is None else (max(rows, old.rows), max(width, old.capacity))
            rows, width = most if prod(most) <= GROW * rows * width else (rows, width)
            self.lasting = old = None  # free the old buffers before allocating new ones
            self.lasting = StepBuffers(rows, width, self.passes.policy.device, LastingStorage(rows, width))

    def storage_for(self, width: int, running: int) -> LastingStorage | None:
        """Return the lasting KV storage, whose first `running` rows are taken; None if there is no such storage, or if
        it has fewer than `width` positions."""
        storage = None if self.lasting is None else self.lasting.storage
        if storage is None or width > storage.capacity:
            return None
        return replace(storage, first=running) if running else storage

    def factors(self) -> Kept | None:
        """Return the cache of cast adapters that the graphs read; None without lasting buffers. Cache and graphs are
        dropped if another adapter is active or parameters have moved in memory."""
        if self.lasting is None:
            return None
        model = self.passes.policy.model
        if self.lasting.adapters != (now := (adapter_state(model), *addresses(model.parameters()))):
            self.lasting.forget_graphs()
            self.lasting.adapters = now
        return self.lasting.factors

    def extend(self, state: DecodeState) -> Tensor:
        """Feed the last sampled tokens. Return the logits (B, V) of the next ones, which the next call overwrites."""
        count, width = len(state.rows), state.width + 1
        if state is not self.state or state.positions is not self.positions or width > self.buffers.capacity:
            width = self.hold(state)
        buffers = self.buffers
        buffers.tokens[:count].copy_(state.tokens)
        if state.alive is not self.alive:  # new after each look at the rows, in which callbacks run
            buffers.alive[:count], self.alive = state.alive, state.alive
            if buffers.graphs and addresses(self.weights) != buffers.held:
                buffers.forget_graphs()  # the weights have moved in memory
        self.width = min(graph_width(width, self.block), buffers.capacity) if self.block > 1 else width
        logits = self.logits()[:count]
        state.cache.cut(width)
        return logits

    def hold(self, state: DecodeState) -> int:
        """Move the cache, mask and inputs of B rows to fixed addresses, and return the cache width after the next
        token. In lasting buffers, B is rounded up to the rows of a graph; the results of the extra rows are ignored."""
        self.release()
        count, buffers = len(state.rows), self.lasting
        if buffers is not None and state.cache.lasting is buffers.storage:
            if state.width >= buffers.capacity:
                state.trim()
            self.rows = min(graph_rows(count), buffers.rows)
        else:
            buffers, self.rows = StepBuffers(count, up_to_multiple(state.width + 1), state.rows.device), count
        real, width, positions = state.real, state.width, state.positions.clone()  # may be a view of what is cleared
        state.cache.fix(buffers.at, self.rows, buffers.capacity)
        buffers.at.fill_(width)
        buffers.positions.zero_()
        buffers.alive.zero_()
        self.alive = None
        buffers.tokens[:count], buffers.positions[:count] = state.tokens, positions
        if state.shifts is not None:
            buffers.shifts[:count] = state.shifts
        if buffers.mask is None:
            buffers.mask = state.cache.growing[0].storage.new_empty(buffers.rows, buffers.capacity)
        buffers.mask.fill_(-torch.inf)[:count, :width].masked_fill_(real, 0.0)
        state.positions = self.positions = buffers.positions[:count]
        self.state, self.buffers = state, buffers
        # packed weights, whose addresses take most of the time to ask for, are compared once a call, by `factors`
        self.weights: list[Tensor] = [weight for weight in self.passes.policy.model.parameters()
                                      if weight.is_floating_point()] if self.record else []
        return width + 1

    def release(self) -> None:
        """Release the current rows; keep the lasting buffers."""
        self.state, self.buffers = None, self.empty

    def drop(self) -> None:
        """Release the current rows, and free the lasting buffers with their graphs."""
        self.release()
        self.lasting = None

    def step(self) -> Tensor:
        """Run one step eagerly; returns logits (R, V). Never synchronizes, so that it can be recorded."""
        assert self.state is not None
        self.state.cache.cut(self.width)
        rows, buffers = slice(0, self.rows), self.buffers
        positions, mask = buffers.positions[rows].add_(1), buffers.mask
        assert mask is not None
        mask.index_fill_(1, buffers.at, 0.0)
        seen, named = mask[rows, None, None, : self.width], {"newest": buffers.at} if self.block > 1 else {}
        # finished rows are still fed, but `alive` keeps their recurrent states from changing
        if self.state.shifts is not None:
            positions = positions + buffers.shifts[rows]
        hidden = self.passes.hidden(buffers.tokens[rows, None], positions[:, None], seen, buffers.alive[rows, None],
                                    self.state, (), **named)
        logits = self.passes.policy.head.logits(hidden[:, 0])
        buffers.at.add_(1)
        return logits

    def logits(self) -> Tensor:
        """Run one step, by a graph if there is a valid one for this shape; returns its logits (R, V)."""
        buffers, key = self.buffers, (self.rows, self.width)
        if (run := buffers.graphs.pop(key, None)) is not None:
            buffers.graphs[key] = run
            return run()
        logits = self.step()
        buffers.steps += 1
        if self.record is not None and buffers.steps >= (1 if self.recorded else WARM):
            self.make(self.record, key, logits)
        return logits

    def make(self, record: Record, key: tuple[int, int], logits: Tensor) -> None:
        """Record the step that has just given `logits` (R, V), and compare its first replay with them."""
        buffers, at, positions = self.buffers, self.buffers.at - 1, self.buffers.positions.clone()
        positions[: self.rows] -= 1
        if buffers.out is None:
            buffers.out = logits.new_empty(buffers.rows, logits.shape[1])
        out = buffers.out[: self.rows]
        try:
            buffers.at.copy_(at)
            buffers.positions.copy_(positions)
            run = record(lambda: out.copy_(self.step()), next(iter(buffers.graphs.values()), None))
            why = differs(run(), logits)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise  # fewer rows may have room for a graph
            why = f"it could not be recorded ({first_line(error)})"
        if not why:
            if len(buffers.graphs) >= MOST_GRAPHS:
                del buffers.graphs[next(iter(buffers.graphs))]
            buffers.graphs[key] = run
            buffers.held, self.must = addresses(self.weights), False
            self.recorded += 1
            return
        self.give_up(why)
        buffers.at.copy_(at)
        buffers.positions.copy_(positions)
        self.step()  # a wrong graph has written wrong keys and values at that place

    def give_up(self, why: str) -> None:
        """Stop recording graphs; EngineUnavailableError if the user required them and none has worked yet."""
        if (device := self.passes.policy.device).type == "cuda":
            name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
            why += f", on {name} (compute capability {major}.{minor}, CUDA {torch.version.cuda})"
        if self.must:
            refuse_graphs(f"a token step of this model cannot be one: {why}")
        logger.warning("token steps go on without a CUDA graph, several times slower where rows are few: %s", why)
        self.record = None


def up_to_multiple(width: int, step: int = GRAPH_PLACES) -> int:
    return -(-width // step) * step


def addresses(weights: Iterable[Tensor]) -> list[int]:
    return [part.data_ptr() for part in weights]


def forget_all_graphs() -> None:
    """Drop the graphs of every engine, because memory that they read will be freed. Later steps record new ones."""
    for buffers in list(LIVING):
        buffers.forget_graphs()
