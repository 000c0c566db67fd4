"""TRL's training steps, timed. Runs in TRL's environment (requirements-trl.txt) and prints one JSON object."""

import tempfile
import time
from typing import Any

import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.loop import processes as common


class Stopwatch(TrainerCallback):
    """The moment at which each optimizer step ended; the first entry is the begin of training."""

    def __init__(self) -> None:
        self.moments: list[common.Moment] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.moments.append(common.Moment.now())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.moments.append(common.Moment.now())


class TimedTrainer(GRPOTrainer):
    """TRL's trainer, with the seconds and the completion tokens of each generation noted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generate_seconds: list[float] = []
        self.tokens: list[int] = []

    def _generate(self, prompts: list[Any]) -> Any:
        began = time.perf_counter()
        result = super()._generate(prompts)
        self.generate_seconds.append(time.perf_counter() - began)
        self.tokens.append(sum(len(ids) for ids in result[1]))
        return result


def make_trainer(options: Any, folder: str) -> TimedTrainer:
    """The model under LoRA in TRL's trainer."""
    cpu = options.device == "cpu"
    config = GRPOConfig(
        **common.SHARED, output_dir=folder, loss_type=options.loss_type, max_steps=options.steps, use_cpu=cpu,
        bf16=not cpu, per_device_train_batch_size=options.batch, disable_tqdm=True, logging_strategy="no",
        gradient_accumulation_steps=common.COMPLETIONS_PER_STEP // options.batch, dataloader_pin_memory=not cpu,
    )
    return TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            options.model, dtype="float32" if cpu else "bfloat16", trust_remote_code=False
        ),
        reward_funcs=[common.correct_answer, common.answer_line], args=config,
        train_dataset=Dataset.from_list(common.read_rows(options.prompts, options.steps)),
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left", trust_remote_code=False),
        peft_config=LoraConfig(**common.LORA, target_modules=common.TARGETS, task_type="CAUSAL_LM"),
    )


def main() -> None:
    """Train, then print what it took."""
    options = common.arguments("Time TRL's GRPO steps.")
    with tempfile.TemporaryDirectory() as folder:
        trainer, watch = make_trainer(options, folder), Stopwatch()
        trainer.add_callback(watch)
        loaded = common.resident_bytes("VmRSS")
        trainer.train()
    common.print_result(
        provider="trl", **common.durations(watch.moments), generate_seconds=trainer.generate_seconds,
        tokens=trainer.tokens, loaded_bytes=loaded, peak_bytes=common.peak_bytes(options.device),
        versions={"trl": trl.__version__},
        config={"per_device_train_batch_size": options.batch, "loss_type": options.loss_type,
                "gradient_accumulation_steps": trainer.args.gradient_accumulation_steps,
                "scale_rewards": trainer.args.scale_rewards},
    )


if __name__ == "__main__":
    main()
