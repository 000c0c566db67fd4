"""Build the rows of a plan: the bytes of each component in both phases, for complete settings."""

from dataclasses import replace

from lowmem_grpo.memory import cards, training_step
from lowmem_grpo.memory.cards import Device
from lowmem_grpo.memory.layer_forms import FORMS
from lowmem_grpo.memory.model_shape import PAGED_BLOCK, ModelShape
from lowmem_grpo.memory.plan import EMBEDDING, KV_CACHE, OPTIMIZER_BYTES, Choice, MemoryPlan, PlanRow, RunSettings
from lowmem_grpo.memory.training_step import BAND_BYTES, CARD_ONLY, Moment, StepShape
from lowmem_grpo.utils import MIB, size_text

ADAPTER_BYTES = 4  # adapters and their gradients are float32
PAGED = "paged_adamw_8bit"  # its states are in managed memory: on the card while there is room, else on the host
PAGED_NUMBERS = 100_000  # least size of a tensor whose states bitsandbytes keeps there
CUDA_CONTEXT = 512 * MIB  # the driver and its libraries
GRAPHS = 384 * MIB  # CUDA graphs of vLLM or our engine
RESERVE = 0.04  # fragmentation, as a share of the memory that is freed and allocated again
REWARD_MODEL, SAVED = "reward model", "trained copies"
NOTES = training_step.NOTES | {REWARD_MODEL: "weights, and what is inside a layer (estimated)"}


def build(shape: ModelShape, settings: RunSettings, device: Device, choices: tuple[Choice, ...] = ()) -> MemoryPlan:
    """Return the plan of complete settings. The KV cache takes the remaining memory, but no more than sequences of the
    longest length need: one group in vLLM, where further requests wait, or all that our own engine decodes together."""
    fixed = fixed_rows(shape, settings)
    moments = most_of(step_shapes(shape, settings))
    if settings.reward_bytes:
        moments["scoring"] = {REWARD_MODEL: settings.reward_bytes}
    name = max(moments, key=lambda moment: sum(moments[moment].values()))
    working = [working_row(component, name, moments, settings.head_groups or 1) for component in NOTES
               if any(component in moment for moment in moments.values())]
    shown = (sum(size for part, size in moment.items() if part not in CARD_ONLY) for moment in moments.values())
    allocated = sum(row.train for row in fixed) + max(shown)
    graphs = GRAPHS if settings.engine == "vllm" or recorded(shape) else 0
    kept = graphs if settings.engine == "vllm" or not settings.sleeps else 0
    engine = PlanRow("engine workspace", engine_workspace(shape, settings, device) + graphs, kept, card_only=True,
                     note="prefill and sampling" + ("; CUDA graphs" if graphs else "")
                     + (", which stay" if kept else "") + " (estimated)")
    holes = int(RESERVE * engine.rollout), int(RESERVE * sum(row.train for row in working))
    driver = [PlanRow("CUDA context", CUDA_CONTEXT, CUDA_CONTEXT, 0, "driver and libraries (estimated)", True),
              PlanRow("reserve", *holes, 0, "holes between blocks (estimated)", True)]
    sampler = sampler_rows(shape, settings)
    taken = sum(row.rollout for row in (*fixed, *sampler, engine, *driver))
    first, each = cache_bytes(shape, settings)
    together = None if settings.engine == "vllm" else settings.sequences
    sequences = together or settings.num_generations
    wanted = first + (sequences - 1) * each
    kv_bytes = settings.kv_bytes or max(first, min(wanted, device.budget - taken))
    held_in, after = cards.cache_text(settings.kv_cache_dtype, shape.word), "freed" if settings.sleeps else "stays"
    cache = PlanRow(KV_CACHE, kv_bytes, 0 if settings.sleeps else kv_bytes,
                    note=f"{held_in}{states(shape)}; {after} while training")
    concurrent = min(sequences, max(0, 1 + (kv_bytes - first) // each))
    rows = (*fixed, *sampler, cache, engine, *working, host_row(shape, settings), *driver)
    return MemoryPlan("", device, settings, rows, choices, concurrent, name, allocated)


def recorded(shape: ModelShape) -> bool:
    """Return whether our own engine can record CUDA graphs: not with delta nets, experts, or layers of unlike sizes."""
    return not (shape.delta or shape.experts or shape.forms)


def cache_bytes(shape: ModelShape, settings: RunSettings) -> tuple[int, int]:
    """Return the KV cache bytes of a longest sequence, and the bytes that each further sequence of its group adds."""
    if settings.engine != "vllm":
        return (shape.kv_bytes(-(-settings.context // cards.GRAPH_PLACES) * cards.GRAPH_PLACES),) * 2
    itemsize = cards.cache_itemsize(settings.kv_cache_dtype)
    sequence = shape.paged_bytes(settings.context, itemsize=itemsize)
    if shape.delta is not None or settings.longest_completion is None:
        return sequence, sequence
    before_last = max(0, settings.context - settings.longest_completion - 1)
    return sequence, sequence - shape.paged_bytes(before_last // PAGED_BLOCK * PAGED_BLOCK, itemsize=itemsize)


def fixed_rows(shape: ModelShape, settings: RunSettings) -> list[PlanRow]:
    """Return the rows of components that are present throughout a phase: weights, embeddings, adapters, optimizer."""
    table, weights, trained = shape.table_bytes, shape.weight_bytes(settings.form), trained_bytes(shape, settings)
    lora, saved = trained["lora"], trained["saved"]
    copies = saved + ADAPTER_BYTES * settings.trained_rows * shape.hidden  # with the originals of rows
    on_device = 0 if settings.host_embedding else shape.host_bytes()
    states, of_critic = state_bytes(shape, settings)[0], critic_states(shape, settings)[0]
    bits = f"{8 * shape.word} bits"
    head = table if shape.tied or settings.own_head else 0
    table_note = "the head is the same table" if shape.tied else bits
    table_note += "; that of each layer's own numbers in 16 bits" if shape.per_layer else ""
    on_base = settings.reward_adapter_bytes
    where = "on the host" if settings.host_embedding and shape.host_bytes() else table_note
    form, ranks = FORMS[settings.form], settings.ranks > 1  # with several, gradients are summed in a copy
    held = "linears" if shape.experts is None else "experts" if form.only_experts else "linears and experts"
    words = f"experts in MXFP4, as they are stored, linears in {form.words}" if shape.stored and not form.only_experts \
        else f"{held} in {form.words}"
    adapted = "all linears" if shape.experts is None else "attention" + " and each expert" * settings.expert_lora
    tower = 0 if shape.vision is None else shape.vision.weight_bytes
    return [
        PlanRow("weights", weights, weights, note=f"{words}; norms, biases"),
        *([PlanRow("vision tower", tower, tower, note="frozen, 16 bits")] if tower and not settings.host_tower else []),
        *([PlanRow("teacher", settings.teacher_bytes, settings.teacher_bytes, note="weights of another model")]
          if settings.teacher_bytes else []),
        PlanRow("embedding", on_device, on_device, note=where),
        *([PlanRow("head", head, head, note=bits)] if head else []),
        PlanRow("adapters", lora, lora, note=f"{lora_text(shape, settings, adapted)}, float32"),
        *([PlanRow(SAVED, copies, copies, note=saved_text(shape, settings))] if saved or trained["away"] else []),
        *([PlanRow("reward adapters", on_base, on_base, note="of reward models on the same base")] if on_base else []),
        *([PlanRow("critic", lora + of_critic, 2 * lora + of_critic, note="adapter, its gradients, AdamW's states")]
          if settings.keeps_critic else []),
        PlanRow("gradients", 0, lora + saved + 4 * ranks * all_numbers(shape, settings), note="of the adapters, float32"
                + f"; of the {SAVED}" * bool(saved) + "; all ranks' sum, float32" * ranks),
        PlanRow("optimizer", states, states, note="AdamW's states" + (
            "; those of large tensors are here only while there is room" if settings.optim == PAGED else "")),
    ]


def trained_numbers(shape: ModelShape, settings: RunSettings) -> int:
    return lora_numbers(shape, settings) if settings.trained is None else settings.trained


def lora_numbers(shape: ModelShape, settings: RunSettings, least: int = 0) -> int:
    return shape.lora_weights(settings.lora_rank, least, settings.expert_lora)


def saved_numbers(shape: ModelShape, settings: RunSettings) -> tuple[int, int, int]:
    """Return the numbers that are trained of embedding and head: of whole matrices on the card (one, if they are tied)
    and on the host, and of single rows."""
    matrices = min(len(settings.modules_to_save), 1 if shape.tied else 2)
    away = bool(settings.host_embedding) and not shape.tied and EMBEDDING in settings.modules_to_save
    table = shape.vocabulary * shape.hidden
    return (matrices - away) * table, away * table, settings.trained_rows * shape.hidden


def all_numbers(shape: ModelShape, settings: RunSettings) -> int:
    return trained_numbers(shape, settings) + sum(saved_numbers(shape, settings))


def trained_bytes(shape: ModelShape, settings: RunSettings) -> dict[str, int]:
    """Return the bytes that are trained, which are also those of gradients: of LoRA, and of what is "saved" beside it
    on the card and "away" on the host."""
    whole, away, rows = saved_numbers(shape, settings)
    return {"lora": settings.trained_bytes or ADAPTER_BYTES * trained_numbers(shape, settings),
            "saved": settings.saved_itemsize * whole + ADAPTER_BYTES * rows, "away": settings.saved_itemsize * away}


def saved_text(shape: ModelShape, settings: RunSettings) -> str:
    """Return in words what is trained of embedding and head, and how large that makes the adapter's file."""
    parts = [*settings.modules_to_save, *[f"{settings.trained_rows:,} rows in float32"] * bool(settings.trained_rows)]
    bits = f", {8 * settings.saved_itemsize} bits" + ", one matrix" * shape.tied if settings.modules_to_save else ""
    trained = trained_bytes(shape, settings)  # PEFT writes a tied matrix under both names
    file = size_text(sum(trained.values()) + trained["saved"] * shape.tied)
    return f"of {' and '.join(parts)}{bits}; the adapter's file takes {file}"


def state_bytes(shape: ModelShape, settings: RunSettings) -> tuple[int, int]:
    """Return the bytes of AdamW's states that stay on the card, and of those on the host, or that may move there."""
    numbers = trained_numbers(shape, settings)
    each, (_, away, _) = OPTIMIZER_BYTES[settings.optim or PAGED], saved_numbers(shape, settings)
    states, on_host = int(each * (all_numbers(shape, settings) - away)), int(each * away)
    if settings.optim != PAGED:
        return states, on_host
    share = lora_numbers(shape, settings, PAGED_NUMBERS) / lora_numbers(shape, settings)
    paged = int(2 * share * numbers)  # those of whole matrices stay
    return states - paged, on_host + paged


def critic_states(shape: ModelShape, settings: RunSettings) -> tuple[int, int]:
    """Return the bytes of the critic's AdamW states, which trains LoRA alone, on the card and on the host."""
    lora = replace(settings, modules_to_save=(), trained_rows=0)
    return state_bytes(shape, lora) if settings.keeps_critic else (0, 0)


def lora_text(shape: ModelShape, settings: RunSettings, layers: str) -> str:
    if settings.trained in (None, lora_numbers(shape, settings)):
        return f"LoRA of rank {settings.lora_rank} on {layers}"
    return f"LoRA of {settings.trained:,} numbers, of rank {settings.lora_rank} at most"


def sampler_rows(shape: ModelShape, settings: RunSettings) -> list[PlanRow]:
    """Return the rows of the sampler's copies of weights. While training, vLLM keeps its copy of the adapters, and
    engines keep all copies unless they sleep."""
    copied, vllm, stays = shape.word * trained_numbers(shape, settings), settings.engine == "vllm", not settings.sleeps
    rows = [PlanRow("adapter copy", copied, copied if vllm or stays else 0, card_only=vllm,
                    note="what the sampler reads, 16 bits" + ("" if vllm or stays else ", while it samples"))]
    if settings.sampling_weights == "16bit":
        wide, held = shape.word * shape.sampler_weights, "; they stay" if stays else " while sampling; freed"
        rows.append(PlanRow("sampling weights", wide, wide if stays else 0, card_only=True,
                            note=f"weights in 16 bits{held} while training"))
    return rows


def states(shape: ModelShape) -> str:
    """Return a note on the layers with a state instead of keys and values; empty if there are none."""
    if shape.delta is None:
        return ""
    with_states, size = shape.delta.layers, shape.states_bytes / MIB
    return f", of {shape.layers - with_states} layers; states of {with_states}, {size:,.0f} MiB a sequence"


def step_shapes(shape: ModelShape, settings: RunSettings) -> list[StepShape]:
    """Return the largest micro-batches of a training step: of one sequence, and of several that attention pads."""
    bound = settings.max_tokens or settings.context
    area = int((settings.spread or 0) * bound)
    sizes = [(settings.context, 0), *([(min(bound, area), area)] if area else [])]  # packed <= padded
    return [StepShape(shape, settings, tokens, laid) for tokens, laid in sizes]


def most_of(shapes: list[StepShape]) -> dict[str, Moment]:
    """Return each moment, from the micro-batch that takes the most memory at that moment."""
    all_moments = [shape.moments() for shape in shapes]
    return {name: max((moments[name] for moments in all_moments), key=lambda moment: sum(moment.values()))
            for name in all_moments[0]}


def working_row(component: str, peak: str, moments: dict[str, Moment], groups: int) -> PlanRow:
    """Return the row of a component, with its bytes at the peak. A note says if another moment takes more."""
    now = moments[peak].get(component, 0)
    other = max((moment for moment in moments if moment != peak), key=lambda moment: moments[moment].get(component, 0))
    most = moments[other].get(component, 0)
    elsewhere = f"; {most / MIB:,.0f} MiB in {other}" if most > now else ""
    heads = "all heads" if groups == 1 else f"one of {groups} groups of heads"
    return PlanRow(component, 0, now, note=NOTES[component].format(heads) + elsewhere, card_only=component in CARD_ONLY)


def engine_workspace(shape: ModelShape, settings: RunSettings, device: Device) -> int:
    """Return the bytes of the engine while sampling, apart from weights, KV cache and CUDA graphs."""
    sequences = settings.sequences or settings.num_generations
    sampling = 3 * 4 * sequences * shape.vocabulary  # logits, probabilities, sorted
    most = cards.prefill_tokens(device.total, sequences) if settings.engine == "vllm" else cards.LARGE_PREFILL
    tokens = min(settings.context, most)
    prefill = shape.word * tokens * (2 * shape.inner + 3 * shape.hidden + shape.queries + 2 * shape.keys)
    masks = 0 if settings.engine == "vllm" else (2 + shape.word) * mask_numbers(settings, sequences)
    return sampling + prefill + BAND_BYTES + masks


def mask_numbers(settings: RunSettings, sequences: int) -> int:
    """Return the elements of each of attention's masks while our engine prefills: two of bools, and one of numbers."""
    prompts = -(-sequences // settings.num_generations)
    return prompts * min(settings.context, cards.prefill_piece(prompts, settings.context)) * settings.context


def host_row(shape: ModelShape, settings: RunSettings) -> PlanRow:
    """Return the row of host memory: offloaded layer inputs, embedding, optimizer states, adapter, reward models."""
    inputs, trained = max(step.host() for step in step_shapes(shape, settings)), trained_bytes(shape, settings)
    names = {"embedding": shape.host_bytes() if settings.host_embedding else 0,
             "vision tower": shape.vision.weight_bytes if settings.host_tower and shape.vision is not None else 0,
             "optimizer": state_bytes(shape, settings)[1] + critic_states(shape, settings)[1],
             "the trained embedding and its gradients": 3 * trained["away"],
             "the reference adapter": settings.keeps_reference * sum(trained.values()),
             "the teacher's adapter": settings.keeps_teacher * sum(trained.values()),
             "what undoes a step": bool(settings.modules_to_save) * (sum(trained.values()) + (
                 sum(state_bytes(shape, settings)) if settings.optim == "adamw_torch" else 0)),
             "the teacher's hidden states": settings.teacher_hidden_bytes,
             "reward models": settings.reward_host_bytes}
    held = ["layer inputs in pinned memory", *(name for name, size in names.items() if size)]
    return PlanRow("host buffers", host=inputs + sum(names.values()), note=", ".join(held))
