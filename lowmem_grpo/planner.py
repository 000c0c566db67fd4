"""Bytes before they are spent: what each phase of a run will hold, and settings with which it fits a card.

Nothing is loaded: a model's config, the run's settings and a card's memory are enough. Sizes of weights and adapters
are exact; those of a training step follow the code that runs, and weighing such a step is what they are tested with;
those of the rollout engine and of the driver are estimates and say so.
"""

from dataclasses import replace
from typing import Any

from lowmem_grpo.cards import GIB, Device
from lowmem_grpo.memory_plan import Choice, MemoryPlan, RunSettings
from lowmem_grpo.model_shape import ModelShape, named_config, named_shapes
from lowmem_grpo.plan_rows import PAGED, build

TILES = (4096, 2048, 1024, 512)  # tokens that an MLP may take at a time, fastest first
CHUNKS = (1024, 256, 64)  # tokens whose logits may exist at a time
MAX_PACKED = 16_384  # tokens in a micro-batch beyond which more sequences gain no speed
CONTEXT_STEP = 128  # tokens
FAR = 2**20  # tokens: the longest context looked for, where the config names none
WIDE = "4-bit weights are dequantized once for each phase of sampling: there is room beside the whole cache"
FIXED = ("weights", "embedding", "head", "adapters", "gradients", "optimizer")


def plan(model_config: Any, run_config: RunSettings, device: Device, model: str = "") -> MemoryPlan:
    """The plan of a run on a device, every open setting chosen so that it fits, where it can.

    `model_config` holds a config.json's fields, or is a transformers config. A plan that does not fit (`fits`) says in
    `advice` what would. ValueError where the context is longer than the model's.
    """
    shape = ModelShape.of(model_config)
    if shape.context is not None and run_config.context > shape.context:
        raise ValueError(f"context is {run_config.context}; this model's is {shape.context} at most")
    found = replace(choose(shape, run_config, device), model=model or shape.model_type)
    return found if found.fits else replace(found, advice=tuple(advise(shape, found, run_config)))


def max_context(model_config: Any, run_config: RunSettings, device: Device) -> int:
    """The longest context, in steps of 128 tokens, with which a run fits the device; 0 where none does.

    `run_config.context` is not looked at.
    """
    return longest(ModelShape.of(model_config), run_config, device)


def choose(shape: ModelShape, asked: RunSettings, device: Device) -> MemoryPlan:
    """The fastest settings first; then, one after the other, what lowers a peak that is too high."""
    now = build(shape, generous(asked), device)
    choices: list[Choice] = []
    for name, value, why in steps_down(asked):
        then = build(shape, replace(now.settings, **{name: value}), device)
        saved = max((needed(now, phase) - needed(then, phase) for phase in now.short_of()), default=0)
        if saved > 0:
            now, choices = then, [*choices, Choice(name, value, saved, why)]
    choices = [*merged(choices), *chosen_for_rollout(now, asked)]
    wide = widened(now, shape)
    if wide is None or asked.sampling_weights is not None:
        return replace(now, choices=tuple(choices))
    return replace(wide, choices=(*choices, Choice("sampling_weights", "16bit", 0, WIDE)))


def widened(found: MemoryPlan, shape: ModelShape) -> MemoryPlan | None:
    """The plan with 4-bit weights dequantized while sampling, where the cache is as large beside them; else None."""
    if not found.settings.load_in_4bit or found.settings.engine != "vllm":
        return None
    wide = build(shape, replace(found.settings, sampling_weights="16bit"), found.device)
    return wide if wide.fits and wide.kv_bytes == found.kv_bytes else None


def needed(found: MemoryPlan, phase: str) -> int:
    """Bytes of a phase, without the cache, which takes what is left."""
    return found.train if phase == "train" else found.rollout - found.kv_bytes


def generous(asked: RunSettings) -> RunSettings:
    """The fastest setting in the place of each that was left open."""
    together = min(asked.num_generations, max(1, MAX_PACKED // asked.context))
    defaults: dict[str, Any] = {
        "max_tokens": together * asked.context, "mlp_tile": TILES[0], "chunk_rows": CHUNKS[0],
        "host_embedding": False, "optim": "adamw_torch",
    }
    return replace(asked, **{name: value for name, value in defaults.items() if getattr(asked, name) is None})


def steps_down(asked: RunSettings) -> list[tuple[str, Any, str]]:
    """(setting, value, what it does) of what lowers a peak, the cheapest in speed first; what was asked for stays."""
    together = (generous(asked).max_tokens or 0) // asked.context
    steps = [
        ("optim", "adamw_8bit", "optimizer states in 8 bits"),
        *(("max_tokens", count * asked.context, f"{count} of the longest sequences in a micro-batch")
          for count in range(together - 1, 0, -1)),
        *(("chunk_rows", rows, "logits of fewer tokens at a time") for rows in CHUNKS[1:]),
        *(("mlp_tile", tile, "smaller tiles of the MLP") for tile in TILES[1:]),
        ("host_embedding", True, "the input embedding is looked up on the host"),
        ("optim", PAGED, "optimizer states in 8 bits, on the host while they are not used"),
    ]
    possible = [step for step in steps if step[0] != "host_embedding" or asked.engine != "vllm"]  # it needs the table
    return [step for step in possible if getattr(asked, step[0]) is None]


def merged(choices: list[Choice]) -> list[Choice]:
    """One choice a setting: its last value, and what all its steps saved."""
    last = {choice.name: choice for choice in choices}
    return [replace(one, saved=sum(choice.saved for choice in choices if choice.name == name))
            for name, one in last.items()]


def chosen_for_rollout(found: MemoryPlan, asked: RunSettings) -> list[Choice]:
    """The cache's size, where it was left open."""
    if asked.kv_bytes is not None:
        return []
    group = asked.num_generations
    why = f"{found.concurrent_sequences} of {group} sequences of the longest length at a time"
    return [Choice("kv_bytes", found.kv_bytes, 0, why)]


def advise(shape: ModelShape, found: MemoryPlan, asked: RunSettings) -> list[str]:
    """What would fit: a shorter context, a smaller model, a larger card."""
    device, room = found.device, f"{found.device.budget / GIB:.1f} GiB"
    context, models = longest(shape, asked, device), fitting_models(asked, device)
    fixed = sum(row.train for row in found.rows if row.name in FIXED)
    alone = f"no context of it fits: weights and adapters alone take {fixed / GIB:.1f} GiB of {room}"
    known = f"the largest known model that fits {room} at {asked.context:,} tokens is {models[-1] if models else ''}"
    return [
        f"the longest context of this model that fits {room} is {context:,} tokens" if context else alone,
        known if models else f"none of the known models fits {room} at {asked.context:,} tokens",
        f"a card with {found.peak / GIB:.1f} GiB free would do",
    ]


def longest(shape: ModelShape, asked: RunSettings, device: Device) -> int:
    """By halving: what a run needs grows with its context."""
    low, high = 0, (shape.context or FAR) // CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        trial = choose(shape, replace(asked, context=middle * CONTEXT_STEP), device)
        low, high = (middle, high) if trial.fits else (low, middle - 1)
    return low * CONTEXT_STEP


def fitting_models(asked: RunSettings, device: Device) -> list[str]:
    """The shapes that ship with the package and fit, smallest first."""
    shapes = {name: ModelShape.of(named_config(name)) for name in named_shapes()}
    fitting = {name: shape for name, shape in shapes.items()
               if asked.context <= (shape.context or FAR) and choose(shape, asked, device).fits}
    return sorted(fitting, key=lambda name: fitting[name].weight_bytes(True))
