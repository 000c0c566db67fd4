"""What a launch, an op and an instruction cost: the named constants that a plan of time is made of, in one place.

Launches and the host time of an op are counted without a card, by bench/launches/bench.py on a small 4-bit model with
LoRA; a test holds these numbers against it. The rest is assumed, and says so.
`CALIBRATION` is what rows of a card say against it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Counts of one decoder layer and what each costs. Microseconds of the host unless it says otherwise."""

    launches_forward: float = 36  # of a micro-batch's forward pass
    launches_backward: float = 88  # of its backward pass, the recomputed forward pass included
    launches_decode: float = 15  # of one token step, in a captured CUDA graph
    opaque_forward: float = 10  # of `launches_forward`, our own kernels: 6 dequantizations, 2 norms, rope, glu
    opaque_backward: float = 18  # 11 dequantizations, 4 of norms, 2 of rope, glu
    host_us_per_launch: float = 5.7  # torch, autograd and our Python around any: 55 ms of 9,612; an assumption
    host_us_per_op: float = 3.1  # on top of it, in front of an opaque op; counted: 2.0 to 3.1 on a shared CPU
    graph_us_per_launch: float = 1.9  # of the card: a small kernel in a graph, 470 of which take 0.8 to 1 ms
    optimizer_copy_seconds: float = 0.0  # of a copy of the optimizer's states to the host at every step
    sequences_per_micro_batch: int | None = None  # at most, beside the bound on tokens; None for no such bound


COSTS = Costs()
SAMPLER_LAUNCHES = 30  # of a token step outside of the graph: sampler, positions, block tables; an assumption
SAMPLER_PASSES = 10  # over the float32 logits of a token step: softmax, log-probabilities, drawing; an assumption
EAGER_LAYER_US = 1200.0  # of the host for a layer and token step of the transformers engine; an assumption
HEAD_FACTOR = 1.17  # of `linear_logprobs` to its products, between the estimates 1.15 and 1.19
BACKWARD_ATTENTION = 2.5  # of its forward pass: five products in place of two (Dao, arXiv 2307.08691)
BACKWARD_ELEMENTWISE = 1.5  # of the forward pass's bytes: a gradient reads what the forward pass read, and its own
OPTIMIZER_US_PER_TENSOR = 30.0  # of the host: norms, clipping, the step; an assumption
SUM_BYTES_PER_SECOND = 1.2e9  # of gradients, added up over Gloo on a machine: 320 MiB in 0.27 s on 2 cores
ENGINE_SECONDS = 0.3  # a step: the engine falls asleep and wakes, and quick rewards; an assumption
DECODE_SHARE = 0.82  # of its bound that the 4-bit decode kernel reaches: 60% of the bytes' rate, where 73% is the bound


def blocks_of_8(counted: dict[int, float], most: int) -> dict[int, float]:
    """Instructions by rows, of a kernel that takes up to `most` of them in blocks of 8."""
    return counted | {rows: rows // 8 * counted[8] for rows in range(16, most + 1, 8)}


# Instructions a weight of the decode kernels by rows (at most), counted in their compiled loops: by form, and by the
# compute capability from which on they hold. Before sm_80 there are no tensor cores, and before sm_89 no type e4m3.
# There, blocks of 8 rows take more of them (kernels/few_rows.py: TAKEN_ROWS), each with instructions of its own.
DECODE_INSTRUCTIONS = {
    "nf4": {80: {8: 5.0, 32: 6.7, 64: 9.1},
            75: blocks_of_8({1: 8.0, 8: 17.6}, 40), 0: blocks_of_8({1: 8.0, 8: 17.6}, 32)},
    "fp8": {89: {8: 5.3, 32: 6.0, 64: 8.6}, 80: {8: 12.7, 32: 13.3, 64: 15.8},
            75: blocks_of_8({1: 15.4, 8: 24.7}, 32), 0: blocks_of_8({1: 15.4, 8: 24.7}, 24)},
}

# Measured seconds to planned ones, by card and phase ("generate", "train"), of committed rows of bench/results that a
# card made. There are none yet. `bench/loop/calibrate_time.py` prints what the rows say, and a test holds this against
# it.
CALIBRATION: dict[str, dict[str, float]] = {}


def calibration(card: str, phase: str) -> float:
    """What a planned time of this phase is multiplied with: 1 where no row of this card says otherwise."""
    return CALIBRATION.get(card, {}).get(phase, 1.0)
