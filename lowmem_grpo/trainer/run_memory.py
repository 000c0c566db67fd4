"""The memory plan of a run on its GPU, the settings to change if memory runs out, and the planned time of steps."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from lowmem_grpo.config.loading import TRANSFORMERS, VLLM
from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.engines.base import Engine
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.kernels.linear_logprobs import default_rows
from lowmem_grpo.memory.cards import AUTO, Device
from lowmem_grpo.memory.layer_forms import FORMS
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.offload import pages
from lowmem_grpo.memory.offload.activations import checkpointed_layers, enable_checkpointing, keep_last
from lowmem_grpo.memory.offload.embedding import on_host
from lowmem_grpo.memory.oom import BatchLimit, MemoryAdvice, RunMemory
from lowmem_grpo.memory.peaks import PhasePeaks, this_card
from lowmem_grpo.memory.plan import EMBEDDING, HEAD, MemoryPlan, RunSettings, Workload
from lowmem_grpo.memory.planner import EASE, plan
from lowmem_grpo.memory.time_plan import TimePlan, plan_time
from lowmem_grpo.models.lean_modules import MLP_TILE, LeanMLP
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.quantized_linear import form_of
from lowmem_grpo.models.trained_set import TrainedSet
from lowmem_grpo.models.vision import ImageInputs
from lowmem_grpo.rewards.reward_model import RewardModel
from lowmem_grpo.types import RolloutGroup, TokenField
from lowmem_grpo.utils import size_text

logger = logging.getLogger(__name__)


def settings_of(model: FastPeftModel, config: TrainSettings, engine: str, context: int) -> RunSettings:
    """Return the planner's settings for a run, from the values in effect."""
    base: Any = model.get_base_model()
    trained, rows, of_experts = ([weight.parameter for weight in TrainedSet.of(model) if part in weight.name]
                                 for part in (".lora_", ".trainable_tokens_delta.", ".experts."))
    ends = {EMBEDDING: base.get_input_embeddings().weight, HEAD: base.get_output_embeddings().weight}
    whole = {name: weight for name, weight in ends.items() if weight.requires_grad}
    tiled, checkpointing = bool(tiled_mlps(base)), bool(base.is_gradient_checkpointing)
    vocabulary = base.config.get_text_config().vocab_size
    lora = vars(model.peft_config[model.active_adapter])
    return RunSettings(
        context=context, num_generations=config.completions_per_prompt,
        lora_rank=max(int(lora["r"]), *(lora.get("rank_pattern") or {}).values(), 0),
        expert_lora=bool(of_experts), trained=sum(p.numel() for p in trained) or None,
        trained_bytes=sum(p.nbytes for p in trained) or None,
        modules_to_save=tuple(whole), own_head=ends[HEAD] is not ends[EMBEDDING], trained_rows=sum(map(len, rows)),
        saved_itemsize=max((weight.element_size() for weight in whole.values()), default=2), form=form_of(base),
        checkpointing=checkpointing and (may_keep(model, config) or ("offload" if model.loaded.offload else True)),
        engine=VLLM if engine == VLLM else TRANSFORMERS,  # an engine of the user is planned like our own
        max_tokens=config.max_tokens_per_micro_batch, mlp_tile=model.loaded.mlp_tile if tiled else 0,
        chunk_rows=config.logits_chunk or default_rows(base.device, vocabulary),
        kv_bytes=model.loaded.keeper.settings.kv_cache_bytes, optim=config.optim,
        host_embedding=bool(on_host(base)),
        head_groups=1 if getattr(base.config.get_text_config(), "attention_dropout", 0.0) else None,
        kv_cache_dtype=model.loaded.keeper.settings.kv_cache_dtype if engine == VLLM else AUTO,
        completions_per_step=config.completions_per_step, host_bytes=host_bytes_to_fill(),
        image_tokens=most_image_tokens(model, context),
    )


def most_image_tokens(model: FastPeftModel, context: int) -> int:
    """Return the most tokens that a prompt's images may have; 0 for a model of text."""
    if (processor := model.loaded.processor) is None:
        return 0
    images = processor.image_processor
    return min(context, int(images.size["longest_edge"]) // (images.patch_size * images.merge_size) ** 2)


def may_keep(model: FastPeftModel, config: TrainSettings) -> str:
    """Return "auto" if the plan may exempt layers from checkpointing, else "". It may if the user left checkpointing to
    the plan and nothing is trained while sampling."""
    beside = getattr(config, "train_while_sampling", False)
    return "auto" if model.loaded.auto and config.gradient_checkpointing is None and not beside else ""


def checkpoint_again(model: FastPeftModel) -> None:
    """Checkpoint again the layers that an earlier trainer's plan had exempted, and tile their MLPs again."""
    if not model.loaded.kept_layers:
        return
    enable_checkpointing(model.get_base_model(), "auto")
    for module in model.modules():
        if isinstance(module, LeanMLP):
            module.tile_rows = module.tile_rows or MLP_TILE
    model.loaded.kept_layers = 0


def keep_layers(base: Any, count: int) -> None:
    """Exempt the last `count` layers from checkpointing, and their MLPs from tiling."""
    kept = keep_last(base, count)
    for layer in kept:
        for mlp in tiled_mlps(layer):
            mlp.tile_rows = None
    if kept and not checkpointed_layers(base):
        enable_checkpointing(base, False)


def tiled_mlps(base: Any) -> list[LeanMLP]:
    return [module for module in base.modules() if isinstance(module, LeanMLP) and module.tile_rows]


def host_bytes_to_fill(processes: int = 1) -> int | None:
    """Return the host memory, in bytes, that each of this many processes may take; None if it is unknown."""
    available = pages.available_host_bytes()
    return None if available is None else max(0, available - pages.SPARE) // processes


def plan_memory(
    model: FastPeftModel, config: TrainSettings, policy: Policy, context: int, length: str, ranks: Any,
    engine: Engine | None = None, reward_models: Sequence[RewardModel] = (), planned: Mapping[str, Any] | None = None,
) -> tuple[RunMemory, PhasePeaks]:
    """Plan a run's memory; return its limits and the peaks of its phases. `length` names the setting that limits
    sequences; `engine` is None without sampling, and `planned` has fields of RunSettings about a teacher or critic.
    MemoryError if the host has no room for offloaded layer inputs."""
    four_bit = FORMS[form_of(policy.base)].bits == 4
    shorter = f"a lower {length} (now {getattr(config, length) or context})"
    name = "transformers" if engine is None else engine.name
    memory = RunMemory(MemoryAdvice(helpful_settings(shorter, config.optim, model.loaded, four_bit, name)))
    on_host = sum(reward_model.weight_bytes for reward_model in reward_models)
    room = host_bytes_to_fill(ranks.here)
    own: dict[str, Any] = {
        "ranks": ranks.count, "host_bytes": None if room is None else room + on_host,  # already in host memory
        "reward_bytes": max((reward_model.scoring_bytes for reward_model in reward_models), default=0),
        "reward_adapter_bytes": sum(reward_model.adapter_bytes for reward_model in reward_models),
        "reward_host_bytes": on_host, **(planned or {}),
    }
    if engine is not None:
        memory.watch(engine)
        own |= {  # the defaults are for an engine without the attribute
            "sleeps": isinstance(engine, TransformersEngine) or getattr(engine, "sleeps", True),  # ours does as planned
            "sequences": getattr(engine, "max_num_seqs", None if name == VLLM else config.completions_per_step),
            "sampling_weights": getattr(engine, "sampling_weights", "4bit"),  # the weights that it samples with now
        }
    if policy.device.type != "cuda":
        return memory, PhasePeaks(policy.device)
    run_plan = plan_training(memory, model, config, policy, name, context, **own)
    if run_plan is not None and engine is not None:
        follow_plan(engine, memory, run_plan)
    return memory, PhasePeaks(policy.device, run_plan)


def follow_plan(engine: Any, memory: RunMemory, run_plan: MemoryPlan) -> None:
    """Let an engine keep its cache and weights during training if the plan has room, until memory runs out."""
    sleeps = run_plan.settings.sleeps
    if isinstance(engine, TransformersEngine):
        engine.sleeps, memory.train.spare = sleeps, engine.give_back
        engine.use_weights(run_plan.settings.sampling_weights)
    elif hasattr(engine, "stay"):  # vLLM's
        engine.stay(not sleeps)
        memory.train.spare = None if sleeps else engine.give_back


def plan_training(
    memory: RunMemory, model: FastPeftModel, config: TrainSettings, policy: Policy, engine: str, context: int,
    **own: Any,
) -> MemoryPlan | None:
    """Plan a run on its GPU, and limit its micro-batches by the plan. Return None if there is no plan. `own` overrides
    fields of RunSettings. MemoryError if the host has no room for the offloaded layer inputs."""
    own |= {"keeps_reference": bool(policy.reference_adapter), "logits": len(policy.head.weight) > 1}
    if config.gradient_checkpointing is not False:
        checkpoint_again(model)
    settings = replace(settings_of(model, config, engine, context), **own)
    if pages.on_wsl():
        logger.warning(pages.WSL_ADVICE)
    memory.advice.plan = run_plan = plan_run(settings, model, this_card(policy.device))
    if run_plan is not None:
        bind(memory.train, run_plan, config)
        if engine == TRANSFORMERS:
            memory.rollout.planned = max(1, run_plan.concurrent_sequences)
        policy.head_groups = run_plan.settings.head_groups or 1
        if isinstance(policy.inputs, ImageInputs):
            policy.inputs.wait_on_host(bool(run_plan.settings.host_tower))
        policy.keeps_factors = run_plan.fits_with(EASE)  # the plan does not count their 2 bytes a number
        model.loaded.kept_layers = run_plan.settings.kept_layers or 0
        keep_layers(policy.base, model.loaded.kept_layers)
        for mlp in tiled_mlps(policy.base):
            mlp.tile_rows = run_plan.settings.mlp_tile
        if run_plan.settings.checkpointing == "offload":
            shape, layers = policy.base.config.get_text_config(), model.loaded.kept_layers
            pages.check_host_room(pages.host_bytes_needed(
                shape.num_hidden_layers - layers, run_plan.settings.max_tokens or run_plan.settings.context,
                shape.hidden_size, policy.dtype))
    return run_plan


def bind(bound: BatchLimit, run_plan: MemoryPlan, config: TrainSettings) -> None:
    """Let the plan alone limit micro-batches; warn if the user may expect `per_device_train_batch_size` to do so."""
    bound.planned, bound.spread = run_plan.settings.max_tokens, run_plan.limits.spread
    size = config.per_device_train_batch_size
    if size < config.completions_per_step:
        logger.warning(
            "per_device_train_batch_size=%d counts what an optimizer step trains on (%d), and does not bound "
            "micro-batches here: the memory plan does, at %s tokens; max_tokens_per_micro_batch is a bound of your own",
            size, config.completions_per_step, f"{run_plan.settings.max_tokens or 0:,}",
        )


def plan_run(settings: RunSettings, model: FastPeftModel, device: Device) -> MemoryPlan | None:
    """Log and return the run's plan, even if it does not fit. Warn and return None if the model cannot be planned."""
    try:
        run_plan = plan(model.config, settings, device, model.loaded.name)
    except ValueError as error:
        logger.warning("memory: no plan for this model; micro-batches shrink only once memory runs out (%s)", error)
        return None
    if not run_plan.fits:
        logger.warning("memory: this run needs %s and may fill %s of %s; it goes on in the smallest pieces "
                       "and may run out of memory. %s", size_text(run_plan.peak), size_text(device.budget), device.name,
                       "; ".join(run_plan.advice))
    logger.info(
        "memory planned on %s: rollout %s, training %s in micro-batches of at most %s tokens, %s on "
        "the host, %s layers are not computed again", device.name, size_text(run_plan.rollout),
        size_text(run_plan.train), f"{run_plan.settings.max_tokens or 0:,}", size_text(run_plan.host),
        run_plan.settings.kept_layers or ("no" if run_plan.settings.checkpointing else "all"),
    )
    return run_plan


def helpful_settings(shorter: str, optim: str, loaded: Any, four_bit: bool, engine: str) -> dict[str, list[str]]:
    """Return, for each phase, settings not yet in use that save memory, best first. `loaded` is `model.loaded`."""
    shorter = f"{shorter} or max_seq_length (now {loaded.max_seq_length})"
    weights = [] if four_bit else ["load_in_4bit=True"]
    offload = [] if loaded.offload else ['use_gradient_checkpointing="offload"']
    eight_bit = [] if "8bit" in optim else ['optim="paged_adamw_8bit"']
    share = ["a lower gpu_memory_utilization"] if engine == "vllm" else []
    last = ["a smaller LoRA rank (r)", "nothing else on the card beside this run"]
    return {"train": [shorter, *offload, *weights, *eight_bit, *share, *last],
            "rollout": [shorter, *weights, *share, *eight_bit, *last]}


class PlannedTime:
    """Plans the seconds of steps under a memory plan, on cards that memory/cards.py lists."""

    def __init__(self, plan: MemoryPlan, model_config: Any) -> None:
        self.plan, self.shape = plan, ModelShape.from_config(model_config)

    def metrics(
        self, sampled: Sequence[RolloutGroup], trained: Sequence[RolloutGroup], updates: int = 1, iterations: int = 1,
        fields: Sequence[TokenField] = (),
    ) -> dict[str, float]:
        """Return the planned seconds of sampling, training and the step, including passes that compute `fields`."""
        passes = len({field.source for field in fields})
        generated = self.plan_step(workload_of(sampled))
        learned = self.plan_step(workload_of(trained, updates, iterations, passes))
        if generated is None or learned is None:
            return {}
        generate, train = generated.generate_seconds or 0.0, learned.train_seconds or 0.0
        around = (generated.step_seconds or 0.0) - generate - (generated.train_seconds or 0.0)
        return {"time/planned_generate_s": generate, "time/planned_train_s": train,
                "time/planned_step_s": generate + train + around}

    def plan_step(self, work: Workload | None) -> TimePlan | None:
        """Return the time plan of a workload; None without a workload or known seconds."""
        time = None if work is None else plan_time(self.plan, self.shape, work)
        return time if time is not None and time.seconds else None


def workload_of(
    groups: Sequence[RolloutGroup], updates: int = 1, iterations: int = 1, forward_only: int = 0
) -> Workload | None:
    """Return the workload of the groups that have a trained completion; None if there are none."""
    filled = [group for group in groups if any(rollout.num_trained for rollout in group.rollouts)]
    if not filled:
        return None
    lengths = [max(1, rollout.num_trained) for group in filled for rollout in group.rollouts]
    generations = max(1, round(len(lengths) / len(filled)))
    prompt = fmean(max(1, len(group.prompt_ids)) for group in filled)
    return Workload(len(filled), generations, prompt, fmean(lengths), max(lengths), iterations, updates, forward_only)
