"""Estimate the seconds of a step on a named card before it runs, from the card's data sheet and constants that were
measured on few cards (docs/plan.md). A decode step of M rows takes the time of its launches, the time to move the bytes
of adapter, KV cache, head and logits, and for a layer's W weights

    16 bits                    the larger of the times for 2 W bytes of memory and for 2 M W FLOP
    4 bits and FP8, few rows   the largest of the times for the weight's bytes, for 2 M W / BLOCK_N bytes of x read from
                               L2, and for W times the kernel's instructions per weight
    4 bits and FP8, more rows  the time to dequantize (read, and write in 16 bits), then to multiply
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import ceil

from lowmem_grpo.memory import cards, families
from lowmem_grpo.memory.cards import cache_itemsize
from lowmem_grpo.memory.layer_forms import BITS_16, FORMS, NF4, Linear, block_outputs
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.plan import HEAD, OPTIMIZER_BYTES, PROMPTS, MemoryPlan, RunSettings, Workload
from lowmem_grpo.memory.rows import PAGED, all_numbers, recorded, trained_numbers
from lowmem_grpo.memory.training_step import StepShape

# Achieved rate per unit of the data sheet; assumptions, as no committed row measures them.
MEMORY = 0.90e12  # per TB/s, for a copy
ATTENTION = 0.35e12  # per TFLOP/s: FlashAttention 2 on Hopper, 350 of 989
PCIE = 0.85e9  # per GB/s, from pinned memory
L2 = 24e9  # bytes/s per multiprocessor and GHz; an assumption (5.6 TB/s for an H200), as no data sheet has it
LANES = 128e9  # instructions/s per multiprocessor and GHz: four warps of 32 lanes
# Launches per layer, counted without a card by bench/launches.py on a small 4-bit model with LoRA whose q, k and v lie
# side by side, as published ones do; a test compares them with it. Microseconds are the host's, except for graphs.
LAUNCHES_FORWARD, LAUNCHES_BACKWARD = 27, 47  # per micro-batch; the backward pass recomputes the forward pass
LAUNCHES_AGAIN, LAUNCHES_DEQUANTIZE = 21, 4  # of these: for recomputing, and for dequantizing in each pass
# Per decode step in a CUDA graph. Ours were 18 in an H100's profile, and one is gone since.
LAUNCHES_DECODE = {"vllm": 15, "transformers": 17}
HOST_US_PER_LAUNCH = 133.0  # torch, autograd, our Python, as a micro-batch of few tokens took 0.45 s on an H100's host
# with 94 launches in each of 36 layers; no other host was measured
WAITS = 0.18  # share of the shorter of host and card in a pass that the longer one waits for: with our engine, training
# took 0.53 s on an H100 where the host took 0.44 s and the card 0.37 s
GRAPH_US_PER_LAUNCH = 4.6  # on the card, beside the weights' bytes: from an H100's row in 4 bits, with LoRA's and
# attention's bytes at 64 rows, so it is too much for few rows
GRAPH_US_WIDE = 3.1  # with 16-bit weights: 22 launches (15 now) in each of 36 layers took 2.5 ms of vLLM's token
RECORD_SECONDS = 0.15  # per CUDA graph of the transformers engine; an assumption, 0.35 on slow hosts
EAGER_LAYER_US = 2500.0  # per layer and pass of the transformers engine without a graph; prefill on an H100's host
# Per decode step, and per row of it, while the card waits for the host. On an H100 vLLM's token of 64 rows waited 1.3
# ms; that nearly all of it is work per row is an assumption. Since then, 2 us a row went with the objects of
# log-probabilities, on a CPU, and half of our engine's operations.
SAMPLER_US = {"vllm": (150.0, 16.0), "transformers": (100.0, 0.0)}
# Over a decode step's float32 logits: softmax, log-probabilities, drawing, on an H100; ours (kernels/draw_tokens.py),
# counted: the head writes them, a graph copies them, one kernel reads them.
SAMPLER_PASSES = {"vllm": 30, "transformers": 4}
VLLM_PREFILL_US = 230.0  # per layer and pass of vLLM's prefill on the host; an assumption
HEAD_FACTOR = 1.17  # time of `linear_logprobs` relative to its products, between the estimates 1.15 and 1.19
BACKWARD_ATTENTION = 2.5  # relative to its forward pass: five products in place of two (Dao, arXiv 2307.08691)
BACKWARD_ELEMENTWISE = 1.5  # bytes relative to the forward pass: backward reads the forward's inputs and the gradient
OPTIMIZER_US_PER_TENSOR = 30.0  # norms, clipping, the step; an assumption
SUM_BYTES_PER_SECOND = 1.2e9  # gradients all-reduced over Gloo: 320 MiB in 0.27 s on 2 cores; NCCL was not measured
ENGINE_SECONDS = {"vllm": 0.03, "transformers": 0.01}  # per step, for sleep, wake-up and quick rewards; on an H100
# Seconds per byte that training asks of the driver anew after vLLM's sleep emptied torch's cache: in training, as the
# 42 GB of a step took 0.064 s more than with our engine, and in sleep, which took 0.044 s more than with small buffers.
ASKED_ANEW, GIVEN_BACK = 0.064 / 42e9, 0.044 / 42e9
WORTH = 0.05  # least share of decoding time that 16-bit weights must save to be worth their bytes
# Share of its instruction rate that the NF4 kernel reaches from sm_80 on, as {most rows: share}: on an H100, 14336 x
# 4096 took 34 us for 8 rows in a loop of 7.8 instructions, and 66 us for 64 in one of 9.2. Between them the lower one,
# so that more rows read codes only once a card has measured it.
NF4_SHARE = {8: 0.44, 64: 0.28}
NF4_LAUNCH_US = 3.5  # each matrix takes this much more in the NF4 kernel: a layer of a 3B model takes 69 us at 8 rows
WEIGHT_READ = 0.72  # share of MEMORY's rate at which products of few rows read 16-bit weights, on an H100
DECODE_SHARE = 0.82  # the same for other decode kernels, as a share of their bound; an assumption
TAIL = 0.25  # decode steps belong to the tail while fewer than this share of the most sequences in a call still run
GENERATE, TRAIN = ("prefill", "decode"), ("forward", "backward", "optimizer", "copies", "memory")  # parts of phases
ATTENTION_IN, MLP = (*families.SPLIT, *families.FUSED), (*families.GATE_UP, *families.FUSED_GATE_UP, "down_proj")
Stretch = tuple[float, int, int, float]  # decode steps, running rows, computed rows, mean tokens of a row


@dataclass(frozen=True)
class StepTime:
    """The estimated seconds of a step on one card. The planner has made all its choices in `settings`."""

    shape: ModelShape
    settings: RunSettings
    speed: cards.CardSpeed
    work: Workload
    together: int = 1  # sequences decoded at a time
    micro_batches: int = 1  # in a pass of training, assumed to have the same size
    reads: int = cards.LARGE_PREFILL  # prompt tokens in one prefill pass

    @cached_property
    def linears(self) -> list[Linear]:
        """The linear weights of one layer; for a model whose layers differ, use this property of each of `kinds`."""
        return list(self.shape.linears())

    @cached_property
    def kinds(self) -> list[tuple[int, "StepTime"]]:
        """For each set of identical layers: (their number, the same step of a model with such layers only)."""
        return [(count, replace(self, shape=shape)) for count, shape in self.shape.each()]

    @property
    def quantized(self) -> bool:
        """True if all decode steps, with any number of rows, use quantized weights."""
        return self.settings.form != BITS_16 and self.settings.sampling_weights != "16bit"

    @cached_property
    def few(self) -> int:
        """The most rows for which decode steps read quantized codes. It is the kernel's limit, or, if there are also
        weights in 16 bits, the number up to which the kernel is no slower."""
        form = self.settings.form
        most = 0 if form == BITS_16 or FORMS[form].only_experts else max(self.instructions, default=0)
        if self.quantized:
            return most
        linears = [(count, linear) for count, linear in self.shape.all_linears() if linear.experts == 1]
        for rows in range(1, most + 1):
            if sum(count * (self.by_codes(linear, rows) - self.multiply(linear.weights, rows))
                   for count, linear in linears) > 0:
                return rows - 1
        return most

    @property
    def instructions(self) -> Mapping[int, float]:
        """The decode kernel's instructions per weight, as {most rows: instructions}."""
        tables = FORMS[self.settings.form].instructions
        return next((table for least, table in tables.items() if self.speed.capability >= least), {})

    @property
    def recomputed(self) -> float:
        """The share of the layers that the backward pass computes again."""
        return 1 - (self.settings.kept_layers or 0) / self.shape.layers if self.settings.checkpointing else 0.0

    @property
    def lent(self) -> bool:
        """True if training passes read weights in 16 bits, as stored or as sampling holds them."""
        settings = self.settings
        return settings.form == BITS_16 or (settings.sampling_weights == "16bit" and not settings.sleeps)

    @property
    def grouped(self) -> bool:
        return (self.settings.head_groups or 1) > 1

    @property
    def eager(self) -> bool:
        """True if decode steps do not run as CUDA graphs, as in our own engine for models that `recorded` excludes."""
        return self.settings.engine != "vllm" and not recorded(self.shape)

    def multiply(self, weights: float, rows: float) -> float:
        """Return the seconds to multiply 16-bit weights with M rows, limited by FLOP or by the weights' bytes."""
        return max(2 * rows * weights / self.speed.products, self.move(2 * weights) / WEIGHT_READ)

    def move(self, size: float) -> float:
        """Return the seconds to move `size` bytes in device memory."""
        return size / (self.speed.memory_tb_s * MEMORY)

    def dequantize(self, linears: Iterable[Linear]) -> float:
        """Return the seconds to dequantize weights from 4 bits or FP8 to 16, read and write; 0 if not quantized."""
        form = self.settings.form
        return self.move(sum(w.bytes_in(form) + 2 * w.weights for w in linears if w.form_in(form) != BITS_16))

    def stretches(self) -> list[Stretch]:
        """Return the decode steps, grouped by the rows they compute. Once no sequence waits, finished rows are not
        replaced: vLLM drops them at once, our own engine when a smaller CUDA graph fits (`graph_rows`)."""
        work = self.work
        rows = min(self.together, work.sequences)
        waiting = (work.sequences - rows) * work.completion_length / rows
        stretches: list[Stretch] = [(waiting, rows, rows, work.prompt_length + work.completion_length / 2)]
        ends = [0.0, *reversed(work.lengths(rows)[1:]), float(work.longest)]
        for running, (begin, end) in zip(range(rows, 0, -1), pairwise(ends), strict=True):
            held = running if self.settings.engine == "vllm" else min(cards.graph_rows(running), rows)
            stretches.append((end - begin, running, held, work.prompt_length + (begin + end) / 2))
        return [stretch for stretch in stretches if stretch[0]]

    def decode(self) -> float:
        """Return the seconds of all decode steps, with those to record CUDA graphs that are freed while training."""
        stretches = self.stretches()
        return self.token_steps(stretches) + len(self.graphs(stretches)) * RECORD_SECONDS

    def graphs(self, stretches: Iterable[Stretch]) -> set[tuple[int, int]]:
        """Return the (rows, cache length) of the CUDA graphs that our own engine records anew in each step, if any."""
        anew = self.settings.engine != "vllm" and self.settings.sleeps and not self.eager
        place, sizes = round(self.work.prompt_length), set[tuple[int, int]]()
        for steps, _, rows, _ in stretches if anew else ():
            sizes |= {(rows, cards.graph_width(width)) for width in range(place + 1, place + ceil(steps) + 1)}
            place += round(steps)
        return sizes

    def token_steps(self, stretches: Iterable[Stretch]) -> float:
        return sum(steps * self.token_step(rows, cached) for steps, _, rows, cached in stretches)

    def token_step(self, rows: int, cached: float) -> float:
        """Return the seconds of a decode step of M rows with `cached` tokens each in the KV cache."""
        shape, settings = self.shape, self.settings
        if settings.engine != "vllm" and not self.eager:
            cached = cards.graph_width(ceil(cached))
        moved = 2 * trained_numbers(shape, settings) + 4 * rows * shape.vocabulary * SAMPLER_PASSES[settings.engine]
        moved += rows * shape.kv_bytes(round(cached), cache_itemsize(settings.kv_cache_dtype, shape.word))
        card = sum(count * self.product(linear, rows) for count, kind in self.kinds for linear in kind.linears)
        card += self.move(moved) + self.multiply(shape.vocabulary * shape.hidden, rows)
        if self.eager:
            return max(card, shape.layers * EAGER_LAYER_US * 1e-6)
        wide = settings.sampling_weights == "16bit" and rows > self.few
        graph = shape.layers * LAUNCHES_DECODE[settings.engine] * (GRAPH_US_WIDE if wide else GRAPH_US_PER_LAUNCH)
        step, row = SAMPLER_US[settings.engine]
        return card + (graph + step + row * rows) * 1e-6

    def product(self, linear: Linear, rows: int) -> float:
        """Return the seconds to multiply a matrix, or the experts that the rows use at random, with M rows."""
        again = self.dequantize([linear]) if self.quantized else 0.0
        if linear.experts > 1:
            share = 1 - (1 - linear.taken / linear.experts) ** rows
            moved = share * (self.move(2 * linear.weights) + again)
            return max(2 * rows * linear.passed / self.speed.products, moved)
        if rows <= self.few:
            return self.by_codes(linear, rows)
        return self.multiply(linear.weights, rows) + again

    def by_codes(self, linear: Linear, rows: int) -> float:
        """Return the seconds that the decode kernel takes to multiply one quantized matrix with `rows` tokens."""
        instructions = next(count for most, count in self.instructions.items() if rows <= most)
        clocks, reads = self.speed.sms * self.speed.ghz, 1 if self.speed.capability >= 80 else ceil(rows / 8)
        moved = max(self.move(reads * linear.bytes_in(self.settings.form)),
                    2 * rows * linear.weights / block_outputs(linear.rows, rows, self.settings.form) / (clocks * L2))
        computed = instructions * linear.weights / (clocks * LANES)
        if FORMS[self.settings.form].narrow and self.speed.capability >= 80:
            share = next(share for most, share in NF4_SHARE.items() if rows <= most)
            return max(moved, computed / share) + NF4_LAUNCH_US * 1e-6
        return max(moved, computed) / DECODE_SHARE

    def prefill(self) -> float:
        """Return the seconds to prefill each prompt once. Quantized weights are dequantized for each pass, or once if
        sampling keeps them in 16 bits."""
        tokens = self.work.prompts * self.work.prompt_length
        passes = ceil(tokens / self.reads)
        host = VLLM_PREFILL_US if self.settings.engine == "vllm" else EAGER_LAYER_US
        return sum(count * max(kind.prefill_layer(tokens, passes), passes * host * 1e-6) for count, kind in self.kinds)

    def prefill_layer(self, tokens: float, passes: int) -> float:
        """Return the seconds that the card takes for one layer to prefill all prompts' tokens in `passes` passes."""
        products = passes * self.multiply(sum(linear.passed for linear in self.linears), tokens / passes)
        attention = self.attention(tokens * self.work.prompt_length)
        return products + attention + (passes if self.quantized else 1) * self.dequantize(self.linears)

    def attention(self, squared: float) -> float:
        """Return a layer's seconds of attention, forward; 0 for a delta net. `squared`: the sum of squared lengths."""
        return 0.0 if self.shape.delta else 2 * self.shape.queries * squared / (self.speed.tflops * ATTENTION)

    def passes(self) -> dict[str, tuple[float, float]]:
        """Return {pass: (card, host) seconds} of the forward and the backward pass over all completions; card and host
        overlap. Recomputation (with tiles, all but `down`) is part of the backward pass."""
        shape = self.shape
        layers = [(count, kind.layer_passes()) for count, kind in self.kinds]
        trained = self.work.sequences * self.work.completion_length
        product = 2 * trained * shape.vocabulary * shape.hidden / self.speed.products * HEAD_FACTOR
        head = (1, 3) if StepShape(shape, self.settings, 1).trains(HEAD) else (2, 0)  # products, README.md of kernels
        host = self.micro_batches * shape.layers * HOST_US_PER_LAUNCH * 1e-6
        launches = LAUNCHES_FORWARD, LAUNCHES_BACKWARD - (1 - self.recomputed) * LAUNCHES_AGAIN
        hosts = [host * (number - self.lent * LAUNCHES_DEQUANTIZE) for number in launches]
        return {"forward": (sum(count * forward for count, (forward, _) in layers) + head[0] * product, hosts[0]),
                "backward": (sum(count * backward for count, (_, backward) in layers) + head[1] * product, hosts[1])}

    def layer_passes(self) -> tuple[float, float]:
        """Return the card's seconds of an average layer in a forward and in a backward pass, with recomputation."""
        linears, elementwise, again = self.linears, self.elementwise(), self.recomputed
        attention = self.attention(self.work.sequences * self.work.squared_length)
        backward = self.layer(linears, 2) + (BACKWARD_ELEMENTWISE + again) * elementwise
        backward += (BACKWARD_ATTENTION + again + self.grouped) * attention
        backward += again * self.layer([w for w in linears if not self.settings.mlp_tile or w.name != "down_proj"], 1)
        if self.grouped:  # recomputes q, k and v, and then each group of heads
            backward += self.products([w for w in linears if w.name in ATTENTION_IN], 0)
        return self.layer(linears, 1) + elementwise + attention, backward

    def layer(self, linears: list[Linear], lora: int) -> float:
        """Return a layer's seconds to multiply all tokens with these weights, which are dequantized for each tile; the
        products of their LoRA count `lora` times."""
        tile, mlp = self.settings.mlp_tile, [linear for linear in linears if linear.name in MLP]
        tiles = ceil(self.work.places / self.micro_batches / tile) if tile else 1
        seconds = 0.0 if self.lent else self.dequantize(linears) + (tiles - 1) * self.dequantize(mlp)
        return self.micro_batches * seconds + self.products(linears, lora)

    def products(self, linears: list[Linear], lora: int) -> float:
        """Return the seconds of `layer` without dequantization."""
        every = self.settings.expert_lora
        adapted = sum(w.taken * (w.rows + w.columns) for w in self.linears if w.experts == 1 or every)
        numbers = sum(linear.passed for linear in linears) + lora * self.settings.lora_rank * adapted
        return self.micro_batches * self.multiply(numbers, self.work.places / self.micro_batches)

    def elementwise(self) -> float:
        """Return the seconds of a layer's norms, residuals, RoPE, layout of q, k and v, and activation, forward."""
        shape, linears = self.shape, sum(w.taken * (2 * w.columns + 4 * w.rows) for w in self.linears)
        size = 20 * shape.hidden + 28 * (shape.queries + shape.keys) + 6 * shape.inner + linears
        return self.move(self.work.places * size)

    def optimizer(self) -> float:
        """Return the seconds of one optimizer step: moving what is trained, and Python overhead per tensor."""
        numbers, whole = trained_numbers(self.shape, self.settings), all_numbers(self.shape, self.settings)
        states = 2 * OPTIMIZER_BYTES[self.settings.optim or PAGED]
        moved = self.move((24 + states) * whole)  # read gradients 3 times, write once; weights and states both ways
        paged = states * numbers / (self.speed.pcie_gb_s * PCIE) if self.settings.optim == PAGED else 0.0
        tensors = sum(2 * count for count, _ in self.shape.all_linears())
        return moved + paged + tensors * OPTIMIZER_US_PER_TENSOR * 1e-6

    def copies(self, forward: float, backward: float) -> float:
        """Return the seconds of copying layer inputs to the host and back, except those that overlap with a pass."""
        if self.settings.checkpointing != "offload":
            return 0.0
        inputs = 2 * self.work.places * self.shape.hidden * self.shape.layers * self.recomputed
        link = inputs / (self.speed.pcie_gb_s * PCIE)
        return max(0.0, link - forward) + max(0.0, link - backward * (not self.grouped))  # head groups do not prefetch


def faster_in_16_bit(shape: ModelShape, card: str, rows: int, tokens: int, form: str = NF4, engine: str = "vllm",
                     sleeps: tuple[bool, bool] = (True, True)) -> bool:
    """Return whether a card decodes M sequences of at most `tokens` tokens faster, by at least the share `WORTH`, if it
    also has the quantized weights in 16 bits. Without a data sheet this is True for vLLM, and False for our own engine.
    `sleeps` says whether our engine frees its CUDA graphs while training: without, then with 16-bit weights."""
    name = cards.card_of(card)
    settings = RunSettings(tokens, form=form, engine=engine, sleeps=sleeps[0])
    if name is None:
        return engine == "vllm"
    codes = StepTime(shape, settings, cards.SPEEDS[name], Workload.within(tokens, 1, rows), rows)
    wide = replace(codes, settings=replace(settings, sampling_weights="16bit", sleeps=sleeps[1]))
    return wide.decode() < (1 - WORTH) * codes.decode()


def rows_of_codes(shape: ModelShape, card: str, form: str = NF4) -> int:
    """Return the most rows for which quantized weights decode no slower than 16 bits; 0 without a data sheet."""
    name = cards.card_of(card)
    settings = RunSettings(1, form=form, sampling_weights="16bit")
    return 0 if name is None else StepTime(shape, settings, cards.SPEEDS[name], Workload(1, 1, 1, 1, 1)).few


def training_seconds(plan: MemoryPlan, shape: ModelShape) -> float:
    """Return the seconds of a forward and a backward pass over a step's completions, with lengths as in GSM8K."""
    settings = plan.settings
    completions = settings.completions_per_step or PROMPTS * settings.num_generations
    work = Workload.within(settings.context, -(-completions // settings.num_generations), settings.num_generations)
    return sum(map(max, step_of(plan, shape, work).passes().values()))


@dataclass(frozen=True)
class TimePlan:
    """The estimated seconds of a step by part; if there are none, `why` says what is missing."""

    workload: Workload
    card: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    why: str | None = None
    micro_batches: int = 0
    sampled_together: int = 0
    token_steps: int = 0
    sampling_bits: int = 0  # bits of the weights in decode steps
    tail_steps: int = 0  # decode steps at the end, with few sequences
    tail_seconds: float = 0.0  # part of decode
    bound: dict[str, str] = field(default_factory=dict)  # what limits a training pass: "card" or "launches"
    estimated: bool = True  # always: nothing is measured
    step_seconds: float | None = None
    generate_seconds: float | None = None
    train_seconds: float | None = None


def plan_time(plan: MemoryPlan, shape: ModelShape, work: Workload) -> TimePlan:
    """Return the estimated seconds of a step under a memory plan."""
    card, settings = cards.card_of(plan.device.name), plan.settings
    if card is None:
        return TimePlan(work, why=f"no data sheet is known of {plan.device.name!r}, so no speed; name a card, such as "
                        f"t4, rtx4090 or h200 ({len(cards.SPEEDS)} are known, in lowmem_grpo/memory/cards.py)")
    if not plan.fits:
        return TimePlan(work, card, why=f"the plan does not fit {plan.device.name}")
    step = step_of(plan, shape, work)
    passes = step.passes()
    forward, backward = (max(times) + WAITS * min(times) for times in passes.values())
    gradients, anew = 4 * all_numbers(shape, settings), asked_anew(plan, step)
    seconds = {
        "prefill": step.prefill(), "decode": step.decode(),
        "forward": (work.iterations + work.forward_only) * forward, "backward": work.iterations * backward,
        "optimizer": work.updates * step.optimizer(),
        "copies": work.iterations * step.copies(forward, backward),
        "memory": ASKED_ANEW * anew,
        **({"ranks": work.updates * gradients / SUM_BYTES_PER_SECOND} if settings.ranks > 1 else {}),
        "engine": ENGINE_SECONDS[settings.engine] + GIVEN_BACK * anew,
    }
    stretches = step.stretches()
    tail = [stretch for stretch in stretches if stretch[1] < TAIL * stretches[0][1]]
    steps, last = (sum(stretch[0] for stretch in part) for part in (stretches, tail))
    generate, train = (sum(seconds[part] for part in parts) for parts in (GENERATE, TRAIN))
    return TimePlan(
        work, card, seconds, micro_batches=step.micro_batches, sampled_together=stretches[0][1],
        token_steps=ceil(steps - 1e-6), sampling_bits=FORMS[settings.form].bits if step.quantized else 16,
        tail_steps=round(last), tail_seconds=step.token_steps(tail),
        bound={name: "card" if device >= host else "launches" for name, (device, host) in passes.items()},
        step_seconds=sum(seconds.values()), generate_seconds=generate, train_seconds=train,
    )


def asked_anew(plan: MemoryPlan, step: StepTime) -> float:
    """Return the bytes that training asks of the driver in each step: with vLLM that sleeps, all that a micro-batch
    takes. The plan's rows are for `max_tokens`."""
    if plan.settings.engine != "vllm" or not plan.settings.sleeps:
        return 0.0
    most = sum(row.train for row in plan.rows if not row.rollout and not row.card_only)
    return most * min(1.0, step.work.places / step.micro_batches / (plan.settings.max_tokens or plan.settings.context))


def step_of(plan: MemoryPlan, shape: ModelShape, work: Workload) -> StepTime:
    """Return a step under a memory plan for a known card."""
    card, rows = cards.card_of(plan.device.name), sampled_together(plan, shape, work)
    assert card is not None
    reads = cards.prefill_tokens(plan.device.total, rows)
    return StepTime(shape, plan.settings, cards.SPEEDS[card], work, rows, micro_batches(plan, work), reads)


def sampled_together(plan: MemoryPlan, shape: ModelShape, work: Workload) -> int:
    """Return the number of sequences for which the KV cache has room."""
    itemsize = cache_itemsize(plan.settings.kv_cache_dtype, shape.word)
    longest = shape.kv_bytes(round(work.prompt_length) + work.longest, itemsize)
    room = plan.settings.kv_bytes or plan.device.budget - (plan.rollout - plan.kv_bytes)
    return max(1, plan.concurrent_sequences, min(cards.MOST_SEQUENCES, room // longest))


def micro_batches(plan: MemoryPlan, work: Workload) -> int:
    """Return the number of micro-batches of a step whose completions have the workload's lengths."""
    completions = [max(1, round(length)) for length in work.lengths(work.generations)]
    return plan.micro_batches([(round(work.prompt_length), completions)] * work.prompts)
