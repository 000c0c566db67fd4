"""The parts of a trainer, built before the trainer itself: model, objective, learner and records."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lowmem_grpo.config.beside_lora import check_rows
from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.rollout import TRLS_SHARE
from lowmem_grpo.config.sampling import longest_prompt
from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.data.prompts import PromptEncoder
from lowmem_grpo.engines.base import Engine, check_own_engine
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.losses.objective import Objective
from lowmem_grpo.losses.off_policy import k3_bound
from lowmem_grpo.memory.cards import AUTO
from lowmem_grpo.memory.offload.activations import ActivationOffload, drop_nothing, enable_checkpointing
from lowmem_grpo.memory.oom import RunMemory
from lowmem_grpo.memory.peaks import PhasePeaks
from lowmem_grpo.models.card_check import mixed_dtype
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.models.score_head import CRITIC, delete_slot
from lowmem_grpo.rewards.reward_model import RewardModel
from lowmem_grpo.rollout.parity import ParityGate
from lowmem_grpo.runs.alarms import Alarms
from lowmem_grpo.runs.records import NoRecords, RunRecords
from lowmem_grpo.runs.state import Clock, TrainerState
from lowmem_grpo.trainer.distributed import Ranks, ranks
from lowmem_grpo.trainer.grpo_objective import GRPOObjective
from lowmem_grpo.trainer.learner import Learner
from lowmem_grpo.trainer.model_setup import Brought, tokenizer_of
from lowmem_grpo.trainer.nonfinite import Guard
from lowmem_grpo.trainer.optim import own_or_made
from lowmem_grpo.trainer.preflight.checks import check_settings
from lowmem_grpo.trainer.run_memory import PlannedTime, plan_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model with LoRA, its tokenizer, its policy (which computes log-probabilities), and the ranks that train it."""

    model: FastPeftModel
    tokenizer: Any
    policy: Policy
    ranks: Ranks

    @property
    def context(self) -> int:
        """The longest sequence that the model was loaded for, in tokens."""
        return int(self.model.loaded.max_seq_length)


def bring_model(
    model: Any, args: TrainSettings, processing_class: Any = None, peft_config: Any = None,
    quantization_config: Any = None, tokens: int = 0, takes_prompts: bool = True,
) -> TrainedModel:
    """Return the model to train: ours, one of transformers or PEFT, or a name to load. `tokens` is the context that a
    row needs; `takes_prompts` is False if the caller samples. TypeError or ValueError for unusable models."""
    tokenizer, processes = tokenizer_of(processing_class), ranks()
    check_settings(args, processes.count, takes_prompts)
    if args.log_level != "passive":
        logging.getLogger("lowmem_grpo").setLevel(args.log_level.upper())
    model = str(model) if isinstance(model, Path) else model
    loading = args
    if args.use_cpu and isinstance(model, str):
        loading = replace(args, model_init_kwargs={"device_map": "cpu", **(args.model_init_kwargs or {})})
    model = Brought(model, tokenizer, peft_config, quantization_config, loading, tokens).trainable()
    delete_slot(model, CRITIC)  # of an earlier trainer
    device = model.get_input_embeddings().weight.device
    if args.use_cpu and device.type != "cpu":
        raise ValueError(f'use_cpu is True, and the model lies on {device}; load it with device="cpu"')
    if args.disable_dropout:
        drop_nothing(model)
    stored, rows = model.loaded.vocabulary, len(model.get_input_embeddings().weight)
    if new := sorted({*model.loaded.new_tokens, *range(stored or rows, rows)}):
        from lowmem_grpo.models.new_tokens import untrained

        model.loaded.new_tokens = new  # whose rows in the base are saved with the adapter
        check_rows(stored, rows, untrained(model, new))
    check_rows(stored, rows)
    stops = getattr(getattr(args, "vllm_sampling_params", None), "stop_token_ids", None)
    tokenizer = tokenizer or model.loaded.tokenizer
    model.loaded.tokenizer, model.loaded.stop_ids = tokenizer, tuple(stops or ())  # both are saved with the adapter
    if model.loaded.processor is not None and hasattr(processing_class, "image_processor"):
        model.loaded.processor = processing_class
    policy = Policy(model, mixed_dtype(model, args.bf16, args.fp16), args.logits_chunk)
    if args.gradient_checkpointing is not None:
        enable_checkpointing(policy.base, args.gradient_checkpointing)
    return TrainedModel(model=model, tokenizer=tokenizer, policy=policy, ranks=processes)


@dataclass(frozen=True, kw_only=True)
class TrainerParts(TrainedModel):
    """The parts that every trainer has."""

    args: TrainSettings
    source: Any  # a PromptSource, or NoPrompts
    objective: Objective
    memory: RunMemory
    peaks: PhasePeaks
    state: TrainerState
    clock: Clock
    records: RunRecords
    learner: Learner
    alarms: Alarms | None = None
    planned_time: PlannedTime | None = None  # only with a memory plan, in trainers that sample


def make_parts(
    trained: TrainedModel, args: TrainSettings, source: Any, objective: Objective, memory: RunMemory,
    peaks: PhasePeaks, optimizers: Any = (None, None), learner_class: type[Learner] = Learner,
) -> TrainerParts:
    """Return the parts that every trainer has; `peaks` measures the memory of each phase."""
    policy, processes = trained.policy, trained.ranks
    rows = source.count_rows(read=args.max_steps < 1)
    state = TrainerState(
        max_steps=args.total_steps(rows), logging_steps=args.logging_steps, eval_steps=args.eval_steps,
        save_steps=args.save_steps, train_batch_size=args.per_device_train_batch_size,
        num_train_epochs=args.epochs_of(rows))
    if not processes.leads:  # the leading rank sets neither attribute, because its state is saved for all ranks
        state.is_world_process_zero, state.is_local_process_zero = False, not processes.process.local
    run_dir = Path(args.home, args.output_dir).absolute()  # a reward or a notebook may change the working directory
    records = RunRecords(run_dir) if processes.leads else NoRecords(run_dir)
    optimizer, scheduler = own_or_made(optimizers, policy.trained, args, state.max_steps)
    fp16 = torch.float16 in (policy.autocast_dtype, policy.dtype)
    offload = trained.model.loaded.offload and policy.base.is_gradient_checkpointing
    learner = learner_class(policy, args, objective, optimizer, scheduler, fp16=fp16, bound=memory.train,
                            offload=ActivationOffload(policy.model) if offload else None,
                            guard=Guard(args.nonfinite_steps, state, records), ranks=processes)
    return TrainerParts(**vars(trained), args=args, source=source, objective=objective, memory=memory, peaks=peaks,
                        state=state, clock=Clock(peaks if peaks.counted else None), records=records, learner=learner)


@dataclass(frozen=True, kw_only=True)
class PolicyParts(TrainerParts):
    """The parts of a trainer whose groups are sampled, by the trainer or by its caller."""

    args: GRPOConfig
    objective: GRPOObjective
    parity: ParityGate


def make_policy_parts(
    trained: TrainedModel, config: GRPOConfig, source: Any, engine: Engine, context: int,
    optimizers: Any = (None, None), reward_models: Sequence[RewardModel] = (), keeps_reference: bool = False,
    objective_class: Callable[..., GRPOObjective] = GRPOObjective, planned: Mapping[str, Any] | None = None,
    learner_class: type[Learner] = Learner,
) -> PolicyParts:
    """Return the parts of a trainer whose groups `engine` samples, in sequences of at most `context` tokens. With
    `keeps_reference` the policy keeps a KL reference even if beta is 0, because a single step may set another beta.
    `planned` has the fields of the memory plan about a teacher or critic."""
    policy = trained.policy
    keep_start(policy, config, keeps_reference)
    memory, peaks = plan_memory(trained.model, config, policy, context, "max_completion_length", trained.ranks, engine,
                                reward_models, planned)
    objective = objective_class(config, exact=not policy.drops)
    parts = make_parts(trained, config, source, objective, memory, peaks, optimizers, learner_class)
    objective.mismatch.bound = k3_bound(policy.autocast_dtype or policy.dtype)
    cache_dtype = getattr(engine, "cache_dtype", AUTO)
    steps = 0 if config.off_policy else config.parity_steps
    parity = ParityGate(policy, config.sampling(None), steps, config.parity_bound, state=parts.state,
                        stride=config.steps_per_rollout, memory=memory.train, mismatch=objective.mismatch,
                        clock=parts.clock, cache_dtype=cache_dtype, engine=engine.name,
                        correction=config.vllm_importance_sampling_correction)
    warn_of_settings(config)
    return PolicyParts(**vars(parts) | {
        "alarms": Alarms(parts.state, config.nothing_to_learn_steps, cache_dtype), "parity": parity,
        "planned_time": None if peaks.plan is None else PlannedTime(peaks.plan, trained.model.config)})


def keep_start(policy: Policy, config: GRPOConfig, always: bool = False) -> None:
    """Keep the policy as it is now as the KL reference, if the settings want one."""
    if config.kl_reference == "start" and (config.kl_weight or always):
        policy.keep_reference(config.sync_ref_model)


def warn_of_settings(config: GRPOConfig) -> None:
    """Warn of a batch size that was rounded up, settings that contradict a method's paper, and truncated sampling."""
    for doubt in (config.rounding(), *config.doubts()):
        if doubt:
            logger.warning(doubt)
    if config.sampling(0).truncates:
        logger.warning("top_p, top_k or min_p cut tokens off: sampled log-probabilities are not the policy's own")


def tokens_of_row(config: GRPOConfig) -> int:
    """Return the maximum tokens of prompt plus completion; without a prompt limit, both have the completion's limit."""
    return (config.max_prompt_length or config.max_completion_length) + config.max_completion_length


def prompt_encoder(trained: TrainedModel, longest: int, config: GRPOConfig, images: bool) -> PromptEncoder:
    """Return the encoder of rows to prompts of at most `longest` tokens. With `images` it reads those of rows, if
    the model reads images."""
    reader, settings = trained.model.image_reader(), (longest, config.chat_template_kwargs, config.truncate_prompts)
    if reader is None or not images:
        return PromptEncoder(trained.tokenizer, *settings)
    from lowmem_grpo.data.images import ImageEncoder  # imports PIL

    return ImageEncoder(reader, *settings)


def lengths(config: GRPOConfig, context: int) -> tuple[int, int]:
    """Return (longest prompt, longest prompt with completion) in tokens; ValueError if settings exceed `context`."""
    if (bound := config.vllm_max_model_length or context) > context:
        raise ValueError(f"vllm_max_model_length is {bound}, and the model was loaded with a context of {context} "
                         "tokens; lower it, or load with a larger max_seq_length")
    longest = longest_prompt(config.max_prompt_length, config.max_completion_length, bound)
    return longest, longest + config.max_completion_length


def first_engine(trained: TrainedModel, config: GRPOConfig, own: Engine | None = None) -> Engine:
    """Return the caller's engine, or the model's own. TypeError if the caller's engine lacks an attribute; ValueError
    if the `vllm` settings do not match the engine."""
    prompts, keeper = len(trained.ranks.process.share(config.prompts_per_generation)) or 1, trained.model.loaded.keeper
    keeper.expect(prompts * config.num_generations)
    if own is not None:
        check_own_engine(own)
    engine = own or trained.model.engine(trained.policy, trained.tokenizer)
    if config.use_vllm and engine.name != "vllm":
        raise ValueError(f'use_vllm=True, and the engine is {engine.name}: load the model with fast_inference="vllm"')
    share, loaded = config.vllm_gpu_memory_utilization, keeper.settings.gpu_memory_utilization
    if engine.name == "vllm" and share not in (None, TRLS_SHARE, loaded):
        raise ValueError(f"vllm_gpu_memory_utilization is {share}, and the model was loaded with "
                         f"gpu_memory_utilization={loaded}; set it there, or leave it out")
    return engine
