"""Recipe `arithmetic`: the embedded model learns to get multi-step arithmetic right. Minutes on two CPU cores."""

import logging
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from rich.console import Console

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer, SamplingParams
from lowmem_grpo.live import print_accuracy, print_samples
from lowmem_grpo.model import FastPeftModel, LoraRequest
from lowmem_grpo.recipes.arithmetic_problems import last_integer, problems
from lowmem_grpo.recipes.options import RecipeOptions

DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/arithmetic", "seed": 0, "max_steps": 60, "learning_rate": 3e-3, "max_completion_length": 64,
    "per_device_train_batch_size": 64, "gradient_accumulation_steps": 4, "num_generations": 8, "loss_type": "dr_grpo",
    "scale_rewards": "none", "adam_beta2": 0.99, "max_grad_norm": 1.0, "lr_scheduler_type": "linear",
    "save_steps": 10, "save_total_limit": 2,
}
SHOWN = 6  # samples in the report


@dataclass
class ArithmeticOptions(RecipeOptions):
    """The options of `lowmem-grpo run arithmetic`."""

    max_seq_length: int = 128
    gradient_checkpointing_mode: str = "none"
    train_size: int = 4096
    eval_problems: int = 512


OPTIONS = ArithmeticOptions


def make_dataset(split: str, size: int, seed: int = 0) -> Dataset:
    """`size` distinct problems of a split ("train" or "test"; disjoint whatever the seeds): `prompt`, `answer`."""
    if size < 1:
        raise ValueError(f"size is {size}; it must be at least 1")
    source = problems(split, seed)
    chosen = [next(source) for _ in range(size)]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": p.question}], "answer": str(p.answer)} for p in chosen]
    )


def correct_answer(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """1 where the last integer of the completion is the answer."""
    return [float(last_integer(text_of(c)) == int(a)) for c, a in zip(completions, answer, strict=True)]


def answer_line(completions: list[Any], **kwargs: Any) -> list[float]:
    """0.1 where the last line reads `Answer: <integer>`."""
    last_lines = [text_of(c).strip().rpartition("\n")[2] for c in completions]
    return [0.1 * (line.startswith("Answer: ") and line.removeprefix("Answer: ").isdecimal()) for line in last_lines]


def text_of(completion: Any) -> str:
    """The text of a completion, chat or plain."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def run(options: ArithmeticOptions) -> None:
    """Load, measure, train, measure again, report."""
    console = Console()
    config = GRPOConfig(**(DEFAULTS | options.config))
    model, trainer = load(options, config)
    test = make_dataset("test", options.eval_problems, config.seed)
    before, texts_before = accuracy(model, test, None, config)
    result = trainer.train(resume_from_checkpoint=options.resume or None)
    if not result.finished:
        trainer.finish({"recipe": "arithmetic", "accuracy_before": before, "eval_problems": len(test)})
        console.print(f"stopped at step {result.global_step}; the same command with resume=true goes on")
        return
    after, texts_after = accuracy(model, test, model.current_lora(), config)
    samples = [
        {"prompt": row["prompt"][0]["content"], "answer": row["answer"], "before": old, "after": new}
        for row, old, new in zip(test.select(range(min(SHOWN, len(test)))), texts_before, texts_after, strict=False)
    ]
    trainer.finish({
        "recipe": "arithmetic", "accuracy_before": before, "accuracy_after": after, "eval_problems": len(test),
        "samples": samples,
    })
    print_accuracy(console, before, after, len(test))
    print_samples(console, samples)
    console.print(f"{result.global_step} steps in {trainer.state.elapsed:.0f} s; report: {trainer.run_dir}/report.html")


def load(options: RecipeOptions, config: GRPOConfig) -> tuple[FastPeftModel, GRPOTrainer]:
    """The model under LoRA, and its trainer."""
    bare, tokenizer = FastLanguageModel.from_pretrained(
        options.model, max_seq_length=options.max_seq_length, load_in_4bit=bool(options.load_in_4bit),
        fast_inference=options.fast_inference,
    )
    model = FastLanguageModel.get_peft_model(
        bare, r=options.lora_rank, lora_alpha=2 * options.lora_rank, random_state=config.seed,
        use_gradient_checkpointing=options.checkpointing,
    )
    dataset = make_dataset("train", options.train_size, config.seed)  # type: ignore[attr-defined]
    return model, GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=[correct_answer, answer_line], args=config,
        train_dataset=dataset,
    )


def accuracy(
    model: FastPeftModel, dataset: Dataset, adapter: LoraRequest | None, config: GRPOConfig
) -> tuple[float, list[str]]:
    """Share of problems right at temperature 1, one sample each, and the samples."""
    params = SamplingParams(temperature=1.0, max_tokens=config.max_completion_length, seed=config.seed)
    texts = [output.outputs[0].text for output in model.fast_generate(list(dataset["prompt"]), params, adapter)]
    right = correct_answer(texts, list(dataset["answer"]))
    return sum(right) / len(right), texts


logging.getLogger("lowmem_grpo").addHandler(logging.NullHandler())
