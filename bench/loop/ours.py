"""Our steps: the visible loop, with the engine's work timed separately."""

from pathlib import Path
from typing import Any

from bench.loop.inputs import GIB, TARGETS, RandomModel
from bench.loop.phase_watch import PhaseWatch
from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer, SamplingParams
from lowmem_grpo.engines.base import Engine
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.memory.cards import Device
from lowmem_grpo.memory.planner import plan
from lowmem_grpo.trainer.run_memory import follow_plan, settings_of

ENDLESS = 1024 * GIB  # bytes of a card on which everything fits


def timed(name: str, phase: str) -> Any:
    """Return a method that calls the engine's method `name` inside a phase of the watch."""
    def method(self: "TimedEngine", *args: Any, **options: Any) -> Any:
        with self.watch.phase(phase):
            return getattr(self.engine, name)(*args, **options)

    return method


class TimedEngine:
    """The model's own engine; sampling is one phase, sleeping and waking another."""

    capabilities = frozenset({"on_group", "converse"})
    generate, converse = timed("generate", "generate"), timed("converse", "generate")
    sleep, wake, on_policy_update = (timed(name, "switch") for name in ("sleep", "wake", "on_policy_update"))
    kv_bytes = property(lambda self: self.engine.kv_bytes)
    bound = property(lambda self: self.engine.bound, lambda self, bound: setattr(self.engine, "bound", bound))

    def __init__(self, engine: Engine, watch: PhaseWatch) -> None:
        self.engine, self.watch, self.name, self.close = engine, watch, engine.name, engine.close

    def __getattr__(self, name: str) -> Any:
        """Return what else the plan asks of the engine: whether it sleeps, its weights, its most sequences."""
        return getattr(self.engine, name)


def load(folder: Path, device: str, work: Any, engine: str, sampling_weights: str | None = None) -> FastPeftModel:
    """Return the model with LoRA on all linears; the random one in NF4 and with the package's own checkpointing."""
    size, own = work.size, {} if work.checkpointing else {"use_gradient_checkpointing": False}
    room = {"kv_cache_bytes": size.kv_bytes, "max_num_seqs": size.sequences} if size.config else {}
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=size.context, load_in_4bit=work.four_bit, dtype=work.dtype, fast_inference=engine,
        device=device, sampling_weights=sampling_weights, **room,
    )
    return FastLanguageModel.get_peft_model(model, **work.lora, target_modules=TARGETS, random_state=0, **own)


def settings(options: Any, outputs: str) -> GRPOConfig:
    """Return settings with one optimizer step per rollout."""
    work, size, batch = options.work, options.work.size, options.batch or options.work.size.n
    return GRPOConfig(
        output_dir=outputs, max_steps=options.all_steps, per_device_train_batch_size=batch,
        gradient_accumulation_steps=size.sequences // batch, num_generations=size.n,
        max_completion_length=size.completion_tokens, learning_rate=work.learning_rate, beta=0.0,
        loss_type=options.loss_type, vllm_sampling_params=SamplingParams(ignore_eos=work.whole), parity_steps=0,
        shuffle_dataset=False, disable_tqdm=True, save_strategy="no", seed=0,
    )


def step(trainer: GRPOTrainer, watch: PhaseWatch) -> dict[str, float]:
    """Do what `train` does in a step, without its records. The engine's phases are inside "score"."""
    with watch.step():
        with watch.phase("score"):
            groups = trainer.rollout()
        with watch.phase("train"):
            metrics = trainer.forward_backward(groups)
        with watch.phase("optimizer"):
            return metrics | trainer.optim_step()


def planned(trainer: GRPOTrainer, gib: float | None) -> dict[str, int]:
    """Return what the planner predicts: bytes of the rollout, of training, and on the host."""
    found = trainer.memory.advice.plan
    if found is None:  # the trainer only plans on cards
        context = trainer.model.loaded.max_seq_length
        card = Device("any", ENDLESS, int((gib or 1024) * GIB))
        found = plan(trainer.model.config, settings_of(trainer.model, trainer.args, trainer.engine.name, context), card)
    return {"rollout_bytes": found.rollout, "train_bytes": found.train, "host_bytes": found.host,
            "allocated_bytes": found.train_allocated}


def run(options: Any, watch: PhaseWatch, outputs: str, engine: str,
        sampling_weights: str | None = None) -> dict[str, Any]:
    """Make all steps; return what is known of them beside the watch's measures."""
    work, args = options.work, settings(options, outputs)
    model = load(options.folder, options.device, work, engine, sampling_weights)
    rows = work.rows(model.loaded.tokenizer, options.all_steps)
    trainer = GRPOTrainer(model=model, reward_funcs=[work.reward], args=args, train_dataset=rows,
                          engine=TimedEngine(model.engine(), watch))
    inner, run_plan = trainer.engine.engine, trainer.memory.advice.plan
    if isinstance(inner, TransformersEngine) and run_plan is not None:  # the trainer sees only the timed engine
        follow_plan(inner, trainer.memory, run_plan)
    trained = [step(trainer, watch)["completions/trained"]]
    while len(trained) < options.all_steps and options.patience.another(watch.steps):
        trained.append(step(trainer, watch)["completions/trained"])
    found = {"tokens": work.reward.tokens, "trained": trained, "config": {
        "weights": "nf4" if work.four_bit else work.dtype, "engine": trainer.engine.name, "optim": args.optim,
        "sampling_weights": getattr(inner, "sampling_weights", None),
        "loss_type": args.loss_type, "per_device_train_batch_size": args.per_device_train_batch_size,
        "parity_steps": args.parity_steps, "kv_cache_bytes": trainer.engine.kv_bytes,
        "max_tokens_per_micro_batch": trainer.memory.train.planned, "out_of_memory": trainer.memory.metrics()}}
    return found | ({"planned": planned(trainer, options.gib)} if isinstance(work, RandomModel) else {})
