"""Seconds of training: forward, backward, optimizer and the copies that nothing hides.

For T tokens of a micro-batch, a layer with W weights (A of attention, M of the MLP, of which D of `down`), t tiles of
the MLP, inputs I and outputs O of all linears together:

    forward    2 T (W + R) FLOP, R numbers of LoRA; attention 2 H K n^2 FLOP a sequence of n tokens, half of it masked;
               dequantization, once for A and t times for M (2.5 bytes a weight); bytes of what is computed by element
    backward   the same again, without D in tiles, where the layer's input is all that was kept; 2 T W FLOP for dX (none
               for dW: the weights are frozen), 4 T R for LoRA; dequantization again; attention 2.5 times
    head       4 N V D FLOP for N trained tokens, all of it in the forward pass (kernels/linear_logprobs.py)

The host prepares every launch: a pass takes what the card or the host takes, whichever is longer. Layer inputs go to
the host and back beside the computation; what of it takes longer than the pass is a copy that nothing hides.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from lowmem_grpo.memory.linear import BITS_16, Linear
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.plan import OPTIMIZER_BYTES, RunSettings
from lowmem_grpo.memory.rows import PAGED
from lowmem_grpo.planning.card_speeds import CardSpeed
from lowmem_grpo.planning.costs import (
    BACKWARD_ATTENTION,
    BACKWARD_ELEMENTWISE,
    HEAD_FACTOR,
    OPTIMIZER_US_PER_TENSOR,
    Costs,
)
from lowmem_grpo.planning.sampling_time import WORD, dequantize_seconds, product_seconds
from lowmem_grpo.planning.workload import Workload


@dataclass(frozen=True)
class Pass:
    """Seconds of all micro-batches' forward or backward passes, by who is at work. They run at the same time."""

    device: float
    host: float

    @property
    def seconds(self) -> float:
        return max(self.device, self.host)

    @property
    def bound(self) -> str:
        """What it waits for: "card", or "launches"."""
        return "card" if self.device >= self.host else "launches"


@dataclass(frozen=True)
class Training:
    """How a step is trained on one card, with nothing left open in `settings`."""

    shape: ModelShape
    settings: RunSettings
    speed: CardSpeed
    costs: Costs
    micro_batches: int  # of a pass over all completions; taken to be of one size

    def forward(self, work: Workload) -> Pass:
        """All micro-batches of one pass."""
        count = self.micro_batches
        device = self.products(self.weights() + self.lora(), work)
        device += work.places * self.elementwise() / self.speed.memory
        device += self.attention(work) + count * self.dequantize(self.reads_forward(work.places / count))
        head = 4 * work.trained * self.shape.vocabulary * self.shape.hidden / self.speed.gemm * HEAD_FACTOR
        return Pass(self.shape.layers * device + head, count * self.host(self.costs.launches_forward,
                                                                         self.costs.opaque_forward))

    def backward(self, work: Workload) -> Pass:
        """All micro-batches of one pass, what is recomputed included."""
        count, again = self.micro_batches, bool(self.settings.checkpointing)
        device = self.products(self.weights() + 2 * self.lora(), work)
        device += self.products(self.weights(self.recomputed()) + self.lora(), work) if again else 0.0
        device += work.places * (BACKWARD_ELEMENTWISE + again) * self.elementwise() / self.speed.memory
        grouped = self.grouped  # each group of heads is computed once more, and q, k and v before it
        device += self.products(self.weights(self.before_attention()), work) if grouped else 0.0
        device += (BACKWARD_ATTENTION + again + grouped) * self.attention(work)
        device += count * self.dequantize(self.reads_backward(work.places / count))
        launches, opaque = self.costs.launches_backward, self.costs.opaque_backward
        if not again:
            launches, opaque = launches - self.costs.launches_forward, opaque - self.costs.opaque_forward
        return Pass(self.shape.layers * device, count * self.host(launches, opaque))

    def optimizer(self) -> float:
        """Seconds of one optimizer step: bytes of the adapters, and Python around each tensor."""
        numbers = self.shape.lora_weights(self.settings.lora_rank)
        states = OPTIMIZER_BYTES[self.settings.optim or PAGED]
        moved = numbers * (24 + 2 * states)  # gradients three times and written once, weights and states both ways
        paged = 2 * numbers * states / self.speed.pcie if self.settings.optim == PAGED else 0.0
        tensors = 2 * self.shape.layers * len(list(self.shape.linears()))
        return moved / self.speed.memory + paged + tensors * OPTIMIZER_US_PER_TENSOR * 1e-6

    def copies(self, work: Workload, forward: float, backward: float) -> float:
        """Seconds of copies that no pass hides: layer inputs, to the host and back."""
        if self.settings.checkpointing != "offload":
            return 0.0
        one_way = WORD * work.places * self.shape.hidden * self.shape.layers / self.speed.pcie
        back = one_way if self.grouped else max(0.0, one_way - backward)  # without reading ahead nothing hides it
        return max(0.0, one_way - forward) + back

    def host(self, launches: float, opaque: float) -> float:
        """Seconds that the host takes for one micro-batch's pass."""
        layer = launches * self.costs.host_us_per_launch + opaque * self.costs.host_us_per_op
        return self.shape.layers * layer * 1e-6

    def products(self, numbers: int, work: Workload) -> float:
        """Seconds of every micro-batch's tokens times so many weights."""
        count = self.micro_batches
        return count * product_seconds(numbers, work.places / count, self.speed)

    def attention(self, work: Workload) -> float:
        """Seconds of a layer's attention, forward: each completion lies beside its own prompt."""
        return 2 * self.shape.queries * work.sequences * work.squared_length / self.speed.attention

    def elementwise(self) -> int:
        """Bytes of a token and layer, forward: norms, residuals, rope (10 launches), q, k, v side by side and back, the
        gated activation; LoRA reads x and adds to y."""
        shape = self.shape
        queries, keys = shape.queries, shape.keys
        linears = sum(one.taken * (WORD * one.columns + 2 * WORD * one.rows) for one in shape.linears())
        return 8 * shape.hidden + 12 * shape.hidden + 20 * (queries + keys) + 8 * (queries + keys) + (
            6 * shape.inner + linears
        )

    def weights(self, some: Iterable[Linear] | None = None) -> int:
        """Numbers that a token is multiplied with in a layer, or in some of its linears."""
        return sum(one.passed for one in (self.shape.linears() if some is None else some))

    def lora(self) -> int:
        """Numbers of a layer's LoRA."""
        return self.settings.lora_rank * sum(one.rows + one.columns for one in self.shape.linears() if one.experts == 1)

    @property
    def grouped(self) -> bool:
        """Whether attention's gradient is taken by groups of heads."""
        return (self.settings.head_groups or 1) > 1

    def before_attention(self) -> list[Linear]:
        """What makes q, k and v."""
        return [one for one in self.shape.linears() if one.name in ("q_proj", "k_proj", "v_proj", "qkv_proj")]

    def recomputed(self) -> list[Linear]:
        """What the backward pass computes again: in tiles, all but `down`."""
        return [one for one in self.shape.linears() if not (self.settings.mlp_tile and one.name == "down_proj")]

    def reads_forward(self, tokens: float) -> list[tuple[Linear, int]]:
        """(a weight, how often a micro-batch dequantizes it): once, in an MLP for each tile."""
        return [(one, self.tiles(tokens) if in_mlp(one) else 1) for one in self.shape.linears()]

    def reads_backward(self, tokens: float) -> list[tuple[Linear, int]]:
        """The same for dX, and for what is recomputed."""
        again = self.recomputed() if self.settings.checkpointing else []
        both = [*self.shape.linears(), *again]
        return [(one, self.tiles(tokens) if in_mlp(one) else 1) for one in both]

    def tiles(self, tokens: float) -> int:
        """Of the MLP, for a micro-batch of T tokens."""
        return ceil(tokens / self.settings.mlp_tile) if self.settings.mlp_tile else 1

    def dequantize(self, reads: list[tuple[Linear, int]]) -> float:
        """Seconds; none for 16-bit weights."""
        if self.settings.form == BITS_16:
            return 0.0
        return sum(times * dequantize_seconds(one, self.speed, self.settings.form) for one, times in reads)


def in_mlp(one: Linear) -> bool:
    return one.name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
