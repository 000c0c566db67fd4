"""Our training steps, timed through `rollout()` and `update()`. Prints one JSON object."""

import tempfile
from importlib.metadata import version
from typing import Any

from bench.loop import processes as common
from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer


def make_trainer(options: Any, folder: str) -> GRPOTrainer:
    """The model under LoRA in our trainer."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        options.model, max_seq_length=256, load_in_4bit=False, device=options.device
    )
    model = FastLanguageModel.get_peft_model(
        model, **common.LORA, target_modules=common.TARGETS, use_gradient_checkpointing=False, random_state=common.SEED
    )
    config = GRPOConfig(
        **common.SHARED, output_dir=folder, loss_type=options.loss_type, max_steps=options.steps,
        per_device_train_batch_size=options.batch, max_tokens_per_micro_batch=options.max_tokens,
        gradient_accumulation_steps=common.COMPLETIONS_PER_STEP // options.batch,
    )
    return GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=[common.correct_answer, common.answer_line], args=config,
        train_dataset=common.read_rows(options.prompts, options.steps),
    )


def run_steps(trainer: GRPOTrainer, steps: int) -> dict[str, list[float]]:
    """Seconds, of generation too, completion tokens and trained completions of each step."""
    table: dict[str, list[float]] = {"generate_seconds": [], "tokens": [], "trained": []}
    moments = [common.Moment.now()]
    for _ in range(steps):
        trainer.clock.restart()
        groups = trainer.rollout()
        metrics = trainer.update(groups)
        moments.append(common.Moment.now())
        table["generate_seconds"].append(trainer.clock.seconds["generate"])
        table["tokens"].append(sum(len(rollout.completion_ids) for group in groups for rollout in group.rollouts))
        table["trained"].append(metrics["completions/trained"])
    return common.durations(moments) | table


def main() -> None:
    """Train, then print what it took."""
    options = common.arguments("Time our GRPO steps.")
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options, folder)
        loaded = common.resident_bytes("VmRSS")
        table = run_steps(trainer, options.steps)
    common.print_result(
        provider="lowmem_grpo", **table, loaded_bytes=loaded, peak_bytes=common.peak_bytes(options.device),
        versions={"lowmem_grpo": version("lowmem-grpo")},
        config={"per_device_train_batch_size": options.batch, "loss_type": options.loss_type,
                "gradient_accumulation_steps": trainer.args.gradient_accumulation_steps,
                "scale_rewards": trainer.args.scale_rewards, "max_tokens_per_micro_batch": options.max_tokens},
    )


if __name__ == "__main__":
    main()
