"""Seconds of sampling: prompts read once, then token steps, each as slow as what bounds it.

A token step of M rows in L layers with W weights each (K of a row's numbers, R of LoRA):

    products   16-bit weights: the larger of 2 W bytes over memory bandwidth and 2 M W FLOP
               4 bits and FP8, few rows: the largest of the weight's bytes, of 2 M W / BLOCK_N bytes that blocks read of
               x from L2, and of W times the instructions a weight takes over what the multiprocessors can begin
               4 bits and FP8, more rows: the weight is dequantized (read, and written in 16 bits), then multiplied
    others     the adapter's and the cache's bytes, the head, passes over float32 logits
    launches   those of the captured graph on the card, those outside of it on the host

A step's rows are all that fit at a time: that sequences end and leave is not counted, so the time is an upper bound.
"""

from dataclasses import dataclass
from math import ceil

from lowmem_grpo.memory.cards import LARGE_PREFILL
from lowmem_grpo.memory.linear import NF4, Linear
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.planning.card_speeds import SPEEDS, CardSpeed, card_of
from lowmem_grpo.planning.costs import (
    COSTS,
    DECODE_INSTRUCTIONS,
    DECODE_SHARE,
    EAGER_LAYER_US,
    SAMPLER_LAUNCHES,
    SAMPLER_PASSES,
    Costs,
)
from lowmem_grpo.planning.workload import TAIL, Workload

WORD = 2  # bytes of a number in 16 bits
WIDE = 8192  # outputs from which on the decode kernel's blocks are larger, below 64 rows


@dataclass(frozen=True)
class Sampling:
    """How a step is sampled on one card."""

    shape: ModelShape
    rank: int
    speed: CardSpeed
    costs: Costs
    engine: str
    quantized: bool  # the weights that token steps multiply with
    together: int  # sequences decoded at a time
    reads: int = LARGE_PREFILL  # tokens of prompts read in one pass
    form: str = NF4  # of quantized weights, or FP8
    kv_itemsize: int = WORD  # bytes of a number of the cache

    def steps(self, work: Workload) -> int:
        """Token steps: those of the longest completion, and more where not all are decoded at a time, as a free row
        goes to the next sequence."""
        rows = min(self.together, work.sequences)
        return ceil(work.longest + (work.sequences - rows) * work.completion_length / rows)

    def decode(self, work: Workload) -> float:
        """Seconds of all token steps."""
        rows = min(self.together, work.sequences)
        return self.steps(work) * self.token_step(rows, work.prompt_length + work.longest / 2)

    def tail(self, work: Workload) -> float:
        """Seconds of the last token steps, in which fewer than `TAIL` of the sequences run. They are a part of
        `decode`, which counts them as wider and so as slower."""
        most = TAIL * min(self.together, work.sequences)
        if most <= 1:  # a single sequence is not fewer
            return 0.0
        return work.tail_steps * self.token_step(max(1, round(most / 2)), work.prompt_length + work.longest
                                                 - work.tail_steps / 2)

    def token_step(self, rows: int, cached: float) -> float:
        """Seconds of a step of M rows with so many tokens each in the cache."""
        device = self.shape.layers * sum(self.product(one, rows) for one in self.shape.linears()) + self.others(
            rows, cached
        )
        if self.engine != "vllm":
            return max(device, self.shape.layers * EAGER_LAYER_US * 1e-6)
        graph = self.shape.layers * self.costs.launches_decode * self.costs.graph_us_per_launch
        return device + (graph + SAMPLER_LAUNCHES * self.costs.host_us_per_launch) * 1e-6

    def product(self, one: Linear, rows: int) -> float:
        """Seconds of one matrix times M rows, or of the experts that M rows take."""
        if one.experts > 1:
            return self.routed(one, rows)
        plain = product_seconds(one.weights, rows, self.speed)
        if not self.quantized:
            return plain
        instructions = decode_instructions(rows, self.speed, self.form)
        if instructions is None:
            return plain + dequantize_seconds(one, self.speed, self.form)
        bound = max(
            self.reads_of(rows) * one.bytes_in(self.form) / self.speed.memory,
            2 * rows * one.weights / block_outputs(one.rows, rows) / self.speed.l2,
            instructions * one.weights / self.speed.lanes,
        )
        return bound / DECODE_SHARE

    def reads_of(self, rows: int) -> int:
        """How often the kernel reads a weight: once for each block of rows."""
        return 1 if self.speed.capability >= 80 else -(-rows // 8)

    def routed(self, one: Linear, rows: int) -> float:
        """Seconds of a stack of experts: those that some row takes are read, and dequantized where they are not in 16
        bits, each token's choice taken as independent of the others'."""
        share = 1 - (1 - one.taken / one.experts) ** rows
        again = dequantize_seconds(one, self.speed, self.form) if self.quantized else 0.0
        moved = share * (WORD * one.weights / self.speed.memory + again)
        return max(2 * rows * one.passed / self.speed.gemm, moved)

    def others(self, rows: int, cached: float) -> float:
        """Seconds of adapter, cache, head and sampler."""
        shape, speed = self.shape, self.speed
        moved = WORD * shape.lora_weights(self.rank) + rows * shape.kv_bytes(round(cached), self.kv_itemsize)
        moved += 4 * rows * shape.vocabulary * SAMPLER_PASSES
        return moved / speed.memory + product_seconds(shape.vocabulary * shape.hidden, rows, speed)

    def prefill(self, work: Workload, quantized: bool) -> float:
        """Seconds of reading each prompt once. `quantized` weights are dequantized: for each pass, or once where token
        steps multiply with 16 bits."""
        shape, speed, tokens = self.shape, self.speed, work.prompts * work.prompt_length
        passes = ceil(tokens / self.reads)
        weights = sum(one.passed for one in shape.linears())
        layer = product_seconds(weights, tokens / passes, speed)
        device = passes * layer + 2 * shape.queries * work.prompts * work.prompt_length**2 / speed.attention
        again = (passes if self.quantized else 1) if quantized else 0
        device += again * sum(dequantize_seconds(one, speed, self.form) for one in shape.linears())
        eager = EAGER_LAYER_US if self.engine != "vllm" else self.costs.launches_forward * self.costs.host_us_per_launch
        return shape.layers * max(device, passes * eager * 1e-6)


def faster_in_16_bit(shape: ModelShape, card: str, rows: int, cached: float, form: str = NF4) -> bool:
    """Whether a token step of M rows takes no longer with dequantized weights than with the kernel of NF4 or FP8, by
    the card's data sheet (an estimate); True for a card without one. Few rows read codes in a quarter or half the time.
    """
    name = card_of(card)
    if name is None:
        return True
    wide, codes = (Sampling(shape, 0, SPEEDS[name], COSTS, "vllm", quantized, rows, form=form).token_step(rows, cached)
                   for quantized in (False, True))  # the adapter costs both the same
    return wide <= codes


def product_seconds(weights: float, rows: float, speed: CardSpeed) -> float:
    """Of 16-bit weights times M rows: as slow as the FLOP or as the weights' bytes."""
    return max(2 * rows * weights / speed.gemm, WORD * weights / speed.memory)


def dequantize_seconds(one: Linear, speed: CardSpeed, form: str = NF4) -> float:
    """Of a weight from 4 bits or FP8 to 16: bytes read and written."""
    return (one.bytes_in(form) + WORD * one.weights) / speed.memory


def block_outputs(outputs: int, rows: int) -> int:
    """Outputs of one block of the decode kernel, all of which read the same of x (`few_rows.decode_launch`)."""
    return 64 if outputs >= WIDE and rows <= 32 else 32


def decode_instructions(rows: int, speed: CardSpeed, form: str = NF4) -> float | None:
    """A weight's instructions in the decode kernel of this form; None where it does not take so many rows."""
    table = next(table for least, table in DECODE_INSTRUCTIONS[form].items() if speed.capability >= least)
    return next((count for most, count in table.items() if rows <= most), None)
