"""What a step will take on a named card, part by part: estimated from a memory plan, and never measured.

    prefill, decode              `sampling_time`
    forward, backward, optimizer, copies   `training_time`
    ranks                        their gradients are added up on the hosts, where there are several cards
    engine                       it falls asleep and wakes, and quick rewards: a constant

Speeds are those of the card's data sheet (`card_speeds`), costs of launches and instructions are `time_costs`.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lowmem_grpo.memory.cache_dtype import cache_itemsize
from lowmem_grpo.memory.cards import MOST_SEQUENCES, prefill_tokens
from lowmem_grpo.memory.cutting import cut
from lowmem_grpo.memory.linear import BITS_16, FP8, NF4
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.plan import MemoryPlan
from lowmem_grpo.memory.rows import ADAPTER_BYTES
from lowmem_grpo.planning.card_speeds import SPEEDS, CardSpeed, card_of
from lowmem_grpo.planning.costs import COSTS, ENGINE_SECONDS, SUM_BYTES_PER_SECOND, Costs, calibration
from lowmem_grpo.planning.sampling_time import Sampling
from lowmem_grpo.planning.training_time import Training
from lowmem_grpo.planning.workload import Workload

BITS = {NF4: 4, FP8: 8}
GENERATE, TRAIN = ("prefill", "decode"), ("forward", "backward", "optimizer", "copies")  # parts of a run's phases


@dataclass(frozen=True)
class TimePlan:
    """Estimated seconds of a step by part; without parts, `why` says what is missing."""

    workload: Workload
    card: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    why: str | None = None
    micro_batches: int = 0
    sampled_together: int = 0
    token_steps: int = 0
    sampling_bits: int = 0  # of the weights that token steps multiply with
    tail_steps: int = 0  # of the token steps, those at the end, of few sequences
    tail_seconds: float = 0.0  # of decode
    bound: dict[str, str] = field(default_factory=dict)  # what a training pass waits for: "card" or "launches"

    @property
    def generate_seconds(self) -> float | None:
        """Of a step's sampling."""
        return self.sum_of(GENERATE)

    @property
    def train_seconds(self) -> float | None:
        """Of a step's training, its optimizer step included."""
        return self.sum_of(TRAIN)

    @property
    def step_seconds(self) -> float | None:
        """Of all of it; None where it cannot be estimated."""
        return self.sum_of(tuple(self.seconds))

    def sum_of(self, parts: tuple[str, ...]) -> float | None:
        return sum(self.seconds[part] for part in parts) if self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: null where nothing can be estimated."""
        return asdict(self) | {
            "estimated": True, "step_seconds": self.step_seconds, "generate_seconds": self.generate_seconds,
            "train_seconds": self.train_seconds,
        }


def plan_time(plan: MemoryPlan, shape: ModelShape, work: Workload, costs: Costs = COSTS) -> TimePlan:
    """The seconds of a step under a memory plan."""
    card = card_of(plan.device.name)
    if card is None:
        return TimePlan(work, why=unknown(plan.device.name))
    if not plan.fits:
        return TimePlan(work, card, why=f"the plan does not fit {plan.device.name}")
    sampling = sampling_of(plan, shape, SPEEDS[card], costs, work)
    training = Training(shape, plan.settings, SPEEDS[card], costs, micro_batches(plan, work, costs))
    forward, backward = training.forward(work), training.backward(work)
    seconds = {
        "prefill": sampling.prefill(work, plan.settings.form != BITS_16), "decode": sampling.decode(work),
        "forward": (work.iterations + work.forward_only) * forward.seconds,
        "backward": work.iterations * backward.seconds,
        "optimizer": work.updates * training.optimizer(),
        "copies": work.iterations * training.copies(work, forward.seconds, backward.seconds)
        + work.updates * costs.optimizer_copy_seconds,
        **ranks_part(plan, shape, work), "engine": ENGINE_SECONDS,
    }
    return TimePlan(
        work, card, calibrated(seconds, card), None, training.micro_batches,
        min(sampling.together, work.sequences), sampling.steps(work), BITS[sampling.form] if sampling.quantized else 16,
        round(work.tail_steps), sampling.tail(work) * calibration(card, "generate"),
        {"forward": forward.bound, "backward": backward.bound},
    )


def ranks_part(plan: MemoryPlan, shape: ModelShape, work: Workload) -> dict[str, float]:
    """What adding up the gradients of several ranks takes; nothing for one."""
    if plan.settings.ranks == 1:
        return {}
    size = ADAPTER_BYTES * shape.lora_weights(plan.settings.lora_rank)
    return {"ranks": work.updates * size / SUM_BYTES_PER_SECOND}


def unknown(name: str) -> str:
    """Why nothing is estimated for a device without a data sheet, and what to do."""
    return (f"no data sheet is known of {name!r}, so no speed; name a card, such as t4, rtx4090 or h200 "
            f"({len(SPEEDS)} are known, in lowmem_grpo/planning/card_speeds.py)")


def calibrated(seconds: dict[str, float], card: str) -> dict[str, float]:
    """The parts, corrected by what rows of this card have measured of their phase."""
    phases = dict.fromkeys(GENERATE, "generate") | dict.fromkeys(TRAIN, "train")
    return {part: value * (calibration(card, phases[part]) if part in phases else 1.0)
            for part, value in seconds.items()}


# What follows reads the memory plan: how a step is sampled and cut under it.


def sampling_of(plan: MemoryPlan, shape: ModelShape, speed: CardSpeed, costs: Costs, work: Workload) -> Sampling:
    """How a step is sampled under a plan."""
    settings = plan.settings
    quantized = settings.form != BITS_16 and not samples_in_16_bit(plan)
    rows = together(plan, shape, work)
    reads = prefill_tokens(plan.device.total, rows)
    return Sampling(shape, settings.lora_rank, speed, costs, settings.engine, quantized, rows, reads,
                    FP8 if settings.form == FP8 else NF4, cache_itemsize(settings.kv_cache_dtype))


def samples_in_16_bit(plan: MemoryPlan) -> bool:
    """Whether quantized weights are dequantized once for a whole sampling phase."""
    return plan.settings.sampling_weights == "16bit"


def together(plan: MemoryPlan, shape: ModelShape, work: Workload) -> int:
    """Sequences that decode at a time: those whose cache fits what the plan leaves, as a run's engine takes it."""
    longest = shape.kv_bytes(round(work.prompt_length) + work.longest, cache_itemsize(plan.settings.kv_cache_dtype))
    room = plan.settings.kv_bytes or plan.device.budget - (plan.rollout - plan.kv_bytes)
    return max(1, plan.concurrent_sequences, min(MOST_SEQUENCES, room // longest))


def micro_batches(plan: MemoryPlan, work: Workload, costs: Costs) -> int:
    """How many micro-batches hold a step: as the plan cuts completions of these lengths."""
    limits = replace(plan.limits, sequences=costs.sequences_per_micro_batch)
    completions = [max(1, round(length)) for length in work.lengths()]
    return len(cut([(round(work.prompt_length), completions)] * work.prompts, limits))
