"""Plan memory before a run: the bytes of each phase, and settings with which the run fits a card. Nothing is loaded.

The bytes of weights and adapters are exact, and tests compare those of a training step with measurements. Those of the
rollout engine and the driver are estimates."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lowmem_grpo.memory import cards
from lowmem_grpo.memory.cards import Device, in_8_bits
from lowmem_grpo.memory.layer_forms import BITS_16, FORMS
from lowmem_grpo.memory.model_shape import ModelShape, named_config, named_shapes
from lowmem_grpo.memory.plan import Choice, MemoryPlan, RunSettings
from lowmem_grpo.memory.rows import PAGED, SAVED, build, recorded
from lowmem_grpo.memory.time_plan import faster_in_16_bit, training_seconds
from lowmem_grpo.utils import size_text

TILES = (4096, 2048, 1024, 512)  # tokens in a tile of the MLP, fastest first
CHUNKS = (1024, 256, 64)  # tokens whose logits are in memory at a time
GROUPS = (2, 4, 8, 16, 32)  # groups of heads in attention's backward pass; at most one per key head
MAX_PACKED = 16_384  # tokens in a micro-batch beyond which more sequences gain little speed
MAX_PACKED_LARGE = 32_768  # the same on a large card, which computes faster than the host launches kernels
LARGE = 40 * 10**9  # budget in bytes from which a card counts as large
PLENTY = 0.5  # share of the budget that may be used to save launches, which matter only for small steps on large cards
KEPT_SHARE = 0.25  # least share of the layers that is worth the memory of keeping all that they compute
EASE = 0.9  # share of the budget that larger micro-batches may fill, since plans are estimates
SPREADS = (4.0, 3.0, 2.0, 1.5, 1.0, 0.9, 0.75, 0.5)  # padded tokens in attention per token of a micro-batch
CONTEXT_STEP = 128  # tokens
FAR = 2**20  # tokens of the longest context to search, if the config gives none
WIDE = "4-bit weights are dequantized to sample with: there is room beside the whole cache"
KEPT = "the last layers keep all they compute: there is room, and recomputing takes a quarter of training"
ROOM = "micro-batches in which more layers have room to keep all they compute"
WHOLE = "an MLP takes a micro-batch at once: there is room, and each tile would dequantize its weights anew"
LASTING = "the cache stays while training, with the CUDA graphs of token steps and all they read: there is room"
STAYS = "the cache stays while training: there is room, and vLLM's sleep would also empty torch's own cache"
Step = tuple[str, Any, str]  # setting, value, description
FIXED = ("weights", "teacher", "vision tower", "embedding", "head", "adapters", SAVED, "gradients", "optimizer")


def plan(model_config: Any, run_config: RunSettings, device: Device, model: str = "") -> MemoryPlan:
    """Return the plan of a run on a device, with every open setting chosen so that the run fits, if possible. If
    nothing fits (`fits` is False), `advice` says what would. `model_config` holds a config.json's fields, or is a
    transformers config. ValueError if the context is longer than the model's."""
    shape = checked_shape(model_config, run_config, device)
    if shape.context is not None and run_config.context > shape.context:
        raise ValueError(f"context is {run_config.context}; this model's is {shape.context} at most")
    asked = run_config.opened()
    draft = staying(shape, keeping(shape, choose(shape, asked, device), asked))
    draft = replace(draft, model=model or shape.model_type)
    return draft if draft.fits else replace(draft, advice=tuple(advise(shape, draft, asked)))


def max_context(model_config: Any, run_config: RunSettings, device: Device) -> int:
    """Return the longest context that fits, in steps of 128 tokens, whatever `run_config.context` is; 0 if none."""
    return longest(checked_shape(model_config, run_config, device), run_config.opened(), device)


def checked_shape(model_config: Any, run_config: RunSettings, device: Device) -> ModelShape:
    """Return the model's shape; ValueError if the run is no RunSettings, or the device no Device."""
    for name, value, kind, made in (("run_config", run_config, RunSettings, "RunSettings(context=2048)"),
                                    ("device", device, Device, "device('h100')")):
        if not isinstance(value, kind):
            raise ValueError(f"{name} is {value!r}; it must be made as in planning.{made}")
    return shape_on(model_config, device)


def shape_on(model_config: Any, device: Device) -> ModelShape:
    """Return a model's shape on a card. Numbers take 4 bytes if the card has no bfloat16, and float16 overflows."""
    shape = ModelShape.from_config(model_config)
    return replace(shape, word=4) if shape.family.only_bfloat16 and cards.lacks_bfloat16(device) else shape


def choose(shape: ModelShape, asked: RunSettings, device: Device) -> MemoryPlan:
    """Return a plan that fits, if possible. Settings are the fastest, or slower where a peak is too high."""
    asked = replace(asked, form=shape.stored) if shape.stored and asked.form == BITS_16 else asked
    draft = lowered(shape, asked, device)
    if asked.spread is None:
        alone = replace(asked, spread=0.0, max_tokens=asked.max_tokens or asked.context)  # one sequence per micro-batch
        draft = max(draft, lowered(shape, alone, device), key=worth)
        wider = (build(shape, replace(draft.settings, spread=spread), device)
                 for spread in SPREADS if spread > (draft.settings.spread or 0))
        # the largest that costs no memory, because another moment of the step has the peak
        free = next((wide for wide in wider if wide.train <= draft.train and wide.host <= draft.host), draft)
        draft = replace(free, choices=draft.choices)
    kept = [choice for choice in draft.choices if choice.value == getattr(draft.settings, choice.name)]  # not replaced
    draft = replace(draft, choices=(*kept, *chosen_for_rollout(shape, draft, asked)))
    return lasting(shape, dequantized(shape, in_one_piece(shape, draft, asked)))


def worth(draft: MemoryPlan) -> tuple[Any, ...]:
    """Return a key that is larger for the better plan."""
    settings = draft.settings
    return (draft.fits, draft.concurrent_sequences, settings.chunk_rows, settings.mlp_tile, not settings.host_embedding)


def lowered(shape: ModelShape, asked: RunSettings, device: Device) -> MemoryPlan:
    """Return a plan with the fastest settings, each changed to a slower one if that lowers a peak that is too high."""
    fastest: dict[str, Any] = {"max_tokens": together(asked, device) * asked.context, "spread": paid_spread(asked),
                               "mlp_tile": TILES[0], "chunk_rows": CHUNKS[0], "host_embedding": False,
                               "optim": "adamw_torch_fused", "head_groups": 1,
                               **({} if shape.vision is None else {"host_tower": False})}
    opened = {name: value for name, value in fastest.items() if getattr(asked, name) is None}
    draft = build(shape, replace(asked, **opened), device)
    choices: dict[str, Choice] = {}
    for steps, share in ((sizes(asked, device), EASE), (steps_down(asked, device), 1.0)):
        for name, value, why in (step for step in steps if getattr(asked, step[0]) is None):
            then = build(shape, replace(draft.settings, **{name: value}), device)
            saved = max((draft.needed(phase) - then.needed(phase) for phase in draft.short_of(share)), default=0)
            if saved > 0:
                before = choices[name].saved if name in choices else 0
                draft, choices[name] = then, Choice(name, value, before + saved, why)
    return replace(draft, choices=tuple(choices.values()))


def dequantized(shape: ModelShape, draft: MemoryPlan) -> MemoryPlan:
    """Return the plan with weights dequantized for sampling, if the KV cache keeps its size and decoding is faster."""
    settings, rows = draft.settings, draft.settings.sequences or draft.settings.num_generations
    own = settings.engine != "vllm"
    sixteen = settings.form == BITS_16 or FORMS[settings.form].only_experts
    if settings.sampling_weights is not None or sixteen or (own and not recorded(shape)):
        return draft
    wide = changed(shape, draft, "sampling_weights", "16bit", WIDE)
    if not wide.fits or wide.kv_bytes != draft.kv_bytes:
        return draft
    anew = lasting(shape, draft).settings.sleeps, lasting(shape, wide).settings.sleeps
    faster = faster_in_16_bit(shape, draft.device.name, rows, settings.context, settings.form, settings.engine, anew)
    return wide if faster else draft


def in_one_piece(shape: ModelShape, draft: MemoryPlan, asked: RunSettings) -> MemoryPlan:
    """If there is room, return the plan with one MLP tile per micro-batch. With more, an H100 waits for the host."""
    settings = draft.settings
    if asked.mlp_tile is not None or settings.mlp_tile != TILES[0] or (settings.max_tokens or 0) <= TILES[0]:
        return draft
    whole = changed(shape, draft, "mlp_tile", settings.max_tokens, WHOLE)
    return whole if whole.fits_with(PLENTY) and whole.kv_bytes == draft.kv_bytes else draft


def lasting(shape: ModelShape, draft: MemoryPlan) -> MemoryPlan:
    """If there is room, let our own engine keep KV cache, CUDA graphs and 16-bit weights while training."""
    if draft.settings.engine == "vllm" or not recorded(shape):
        return draft
    kept = changed(shape, draft, "sleeps", False, LASTING)
    return kept if kept.fits_with(EASE) else draft


def staying(shape: ModelShape, draft: MemoryPlan) -> MemoryPlan:
    """If there is room beside the layers that keep all they compute, let vLLM keep its cache while training."""
    if draft.settings.engine != "vllm" or not draft.settings.sleeps or not draft.settings.kept_layers:
        return draft
    stays = changed(shape, draft, "sleeps", False, STAYS)
    return stays if stays.fits else draft


def changed(shape: ModelShape, draft: MemoryPlan, name: str, value: Any, why: str) -> MemoryPlan:
    """Return the plan with another value of a setting, recorded as one more choice."""
    choices = (*draft.choices, Choice(name, value, 0, why))
    return build(shape, replace(draft.settings, **{name: value}), draft.device, choices)


def keeping(shape: ModelShape, draft: MemoryPlan, asked: RunSettings) -> MemoryPlan:
    """Return the plan in which as many of the last layers as have room keep all that they compute, or none if fewer
    than KEPT_SHARE of all have room. On a known card, micro-batches shrink where that is faster."""
    settings, known = draft.settings, cards.card_of(draft.device.name) is not None
    fixed = replace(draft, settings=replace(settings, kept_layers=asked.kept_layers or 0))
    if asked.kept_layers is not None or not settings.checkpointing or settings.head_groups != 1 or not draft.fits:
        return fixed
    drafts = list(with_kept_layers(shape, draft, asked, known))
    best = min(drafts, key=lambda kept: training_seconds(kept, shape)) if known else max(
        drafts, key=lambda kept: kept.settings.kept_layers or 0)
    if (count := best.settings.kept_layers or 0) < KEPT_SHARE * shape.layers:
        return fixed
    sizes = [Choice(name, value, 0, ROOM) for name in ("max_tokens", "spread")
             if (value := getattr(best.settings, name)) != getattr(settings, name)]
    replaced = {choice.name for choice in sizes} | ({"mlp_tile"} if count == shape.layers else set())
    others = (choice for choice in draft.choices if choice.name not in replaced)
    return replace(best, choices=(*others, *sizes, Choice("kept_layers", count, 0, KEPT)))


def with_kept_layers(shape: ModelShape, draft: MemoryPlan, asked: RunSettings, known: bool) -> Iterator[MemoryPlan]:
    """Yield plans that keep as many layers as have room. Each later plan has a smaller `spread` or, on a `known` card,
    smaller micro-batches, until a plan keeps all layers."""
    settings, wide = draft.settings, draft.settings.spread or 0.0
    most = settings.max_tokens or settings.context  # the user's may be below the context
    smaller = [most >> halved for halved in (1, 2, 3)] if known and asked.max_tokens is None else []
    for size in (most, *(size for size in smaller if size >= settings.context)):
        for spread in (wide, *(spread for spread in SPREADS if 1 <= spread < wide and asked.spread is None)):
            kept = most_kept(shape, replace(settings, max_tokens=size, spread=spread), draft.device)
            yield kept
            if kept.settings.kept_layers == shape.layers:
                return


def most_kept(shape: ModelShape, settings: RunSettings, device: Device) -> MemoryPlan:
    """Return the plan in which as many layers as have room keep all activations. If no plan fits, none keeps them."""
    def keep(count: int) -> MemoryPlan:
        return build(shape, replace(settings, kept_layers=count), device)

    return keep(highest(shape.layers, lambda count: keep(count).fits_with(EASE)))


def highest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the highest number up to `most` that fits, by binary search; 0 if none does."""
    return most - bisect_left(range(most, 0, -1), True, key=fits)


def together(asked: RunSettings, device: Device) -> int:
    """Return how many of the longest sequences a micro-batch can hold before more of them gain no speed."""
    most = MAX_PACKED_LARGE if device.budget >= LARGE else MAX_PACKED
    return max(1, min(most // asked.context, asked.completions_per_step or FAR))


def enough(asked: RunSettings, device: Device) -> int:
    """Return how many of the longest sequences a micro-batch should hold, even if that makes other settings slower."""
    return min(together(asked, device), asked.num_generations, max(1, MAX_PACKED // asked.context))


def paid_spread(asked: RunSettings) -> float:
    """Return the `spread` setting that is worth its memory: the largest, or the least for contexts above MAX_PACKED."""
    return SPREADS[0] if asked.context <= MAX_PACKED else SPREADS[-1]


def sizes(asked: RunSettings, device: Device) -> list[Step]:
    """Return steps to smaller micro-batches, down to `enough` sequences. They are tried before slower settings."""
    most, least, paid = together(asked, device), enough(asked, device), paid_spread(asked)
    usual = min(most, max(least, MAX_PACKED // asked.context))
    return [*fewer(most, usual, asked), *spreads(paid, 2.0), *fewer(usual, least, asked), *spreads(min(paid, 2.0), 1.0)]


def steps_down(asked: RunSettings, device: Device) -> list[Step]:
    """Return the slower settings that need less memory, in the order in which they are tried."""
    steps: list[Step] = [
        ("optim", "adamw_8bit", "optimizer states in 8 bits"),
        *fewer(enough(asked, device), 1, asked),
        *spreads(min(paid_spread(asked), 1.0), SPREADS[-1]),
        *(("chunk_rows", rows, "logits of fewer tokens at a time") for rows in CHUNKS[1:]),
        *(("mlp_tile", tile, "smaller tiles of the MLP") for tile in TILES[1:]),
        ("host_tower", True, "the vision tower waits on the host until it encodes images"),
        ("host_embedding", True, "the input embedding is looked up on the host"),
        ("optim", PAGED, "optimizer states in 8 bits, on the host while they are not used"),
        *(("head_groups", count, "attention's gradient by groups of heads, each computed again") for count in GROUPS),
    ]
    return [step for step in steps if step[0] != "host_embedding" or asked.engine != "vllm"]  # vLLM needs it


def fewer(most: int, least: int, asked: RunSettings) -> list[Step]:
    """Return steps from `most` to `least` of the longest sequences in a micro-batch, an eighth or one fewer each."""
    steps, count = list[Step](), most
    while count > least:
        count = max(least, count - max(1, count // 8))
        steps.append(("max_tokens", count * asked.context, f"{count} of the longest sequences in a micro-batch"))
    return steps


def spreads(most: float, least: float) -> list[Step]:
    why = "less is laid side by side in attention, so that micro-batches of short completions hold fewer"
    return [("spread", spread, why) for spread in SPREADS if least <= spread < most]


def chosen_for_rollout(shape: ModelShape, draft: MemoryPlan, asked: RunSettings) -> list[Choice]:
    """Return the choice of the KV cache's size, unless the user set it."""
    if asked.kv_bytes is not None:
        return []
    why = f"{draft.concurrent_sequences} of {asked.num_generations} sequences of the longest length at a time"
    if may_be_halved(draft):
        halved = build(shape, replace(draft.settings, kv_cache_dtype="fp8"), draft.device)
        why += f"; {halved.concurrent_sequences} with kv_cache_dtype=fp8"
    return [Choice("kv_bytes", draft.kv_bytes, 0, why)]


def may_be_halved(draft: MemoryPlan) -> bool:
    """Return whether an 8-bit KV cache would let more sequences run at once."""
    settings = draft.settings
    return (settings.engine == "vllm" and not in_8_bits(settings.kv_cache_dtype)
            and draft.concurrent_sequences < settings.num_generations)


def advise(shape: ModelShape, draft: MemoryPlan, asked: RunSettings) -> list[str]:
    """Return lines that say what would fit: an 8-bit KV cache, a shorter context, a smaller model, a larger card."""
    device, room = draft.device, size_text(draft.device.budget)
    context, models = longest(shape, asked, device), fitting_models(asked, device)
    fixed = size_text(sum(row.train for row in draft.rows if row.name in FIXED))
    halved = may_be_halved(draft) and choose(shape, replace(asked, kv_cache_dtype="fp8"), device).fits
    return [
        *(["with kv_cache_dtype=fp8 it fits: keys and values in 8 bits, which not every card supports"] * halved),
        f"the longest context of this model that fits {room} is {context:,} tokens" if context else
        f"no context of it fits: weights and adapters alone take {fixed} of {room}",
        f"the largest known model that fits {room} at {asked.context:,} tokens is {models[-1]}" if models else
        f"none of the known models fits {room} at {asked.context:,} tokens",
        f"a card with {size_text(draft.peak)} free would do",
    ]


def longest(shape: ModelShape, asked: RunSettings, device: Device) -> int:
    return CONTEXT_STEP * highest((shape.context or FAR) // CONTEXT_STEP, lambda steps: choose(
        shape, replace(asked, context=steps * CONTEXT_STEP), device).fits)


def fitting_models(asked: RunSettings, device: Device) -> list[str]:
    """Return the known models that fit with these settings, smallest first."""
    shapes = {name: shape_on(named_config(name), device) for name in named_shapes()}
    return sorted((name for name, shape in shapes.items() if shape.has_form(asked.form)
                   and (shape.family.vllm or asked.engine != "vllm")
                   and asked.context <= (shape.context or FAR) and choose(shape, asked, device).fits),
                  key=lambda name: shapes[name].linear_weights)
