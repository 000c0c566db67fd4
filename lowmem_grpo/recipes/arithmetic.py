"""Recipe `arithmetic`: the embedded model learns to get multi-step arithmetic right. Minutes on two CPU cores.

With `sft_steps=N` a new answer format is taught first, by supervised fine-tuning on worked solutions that end in
`Answer = 36` in place of `Answer: 36`; GRPO then rewards nothing else. (A format of other words, `<answer>36</answer>`
say, is beyond this model: it has never seen their tokens, and LoRA leaves the embeddings as they are.)
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from lowmem_grpo.checkpoint import last_good
from lowmem_grpo.live import print_accuracy, print_samples
from lowmem_grpo.model import FastPeftModel, LoraRequest
from lowmem_grpo.recipes.arithmetic_problems import Problem, last_integer, problems
from lowmem_grpo.recipes.exam import Exam
from lowmem_grpo.recipes.held_out import measure, side_by_side
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.rewards.texts import completion_text

DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/arithmetic", "seed": 0, "max_steps": 60, "learning_rate": 3e-3, "max_completion_length": 64,
    "per_device_train_batch_size": 64, "gradient_accumulation_steps": 4, "num_generations": 8, "loss_type": "dr_grpo",
    "scale_rewards": "none", "adam_beta2": 0.99, "max_grad_norm": 1.0, "lr_scheduler_type": "linear",
    "save_steps": 10, "save_total_limit": 2,
}
SFT_DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-3, "per_device_train_batch_size": 16, "adam_beta2": 0.99, "logging_steps": 5,
}
AFTER_SFT = {"learning_rate": 5e-4}  # a model that has been taught is surer of itself: 3e-3 unteaches it
TAUGHT = "Answer = "


@dataclass
class ArithmeticOptions(RecipeOptions):
    """The options of `lowmem-grpo run arithmetic`."""

    max_seq_length: int = 128
    gradient_checkpointing_mode: str = "none"
    train_size: int = 4096
    eval_problems: int = 512
    sft_steps: int = 0
    """Steps of supervised fine-tuning on a new answer format before GRPO; 0 leaves format and rewards as they are."""

    def __post_init__(self) -> None:
        if self.sft_steps < 0:
            raise ValueError(f"sft_steps is {self.sft_steps}; it must be 0 or above")


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


def make_demonstrations(size: int, seed: int = 0) -> Dataset:
    """`size` distinct problems of the training split with a solution in the new format: `prompt`, `completion`."""
    source = problems("train", seed)
    chosen = [next(source) for _ in range(size)]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": p.question}], "completion": worked_solution(p)} for p in chosen]
    )


def worked_solution(problem: Problem) -> str:
    """Every step with its exact total, and the answer in the new format."""
    totals = [problem.start, *problem.totals]
    pairs = zip(totals, problem.steps, problem.totals, strict=False)
    lines = [f"{total} {operator} {operand} = {result}" for total, (operator, operand), result in pairs]
    return "\n".join([*lines, f"{TAUGHT}{problem.answer}"])


def correct_answer(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """1 where the last integer of the completion is the answer."""
    return [float(last_integer(completion_text(c)) == int(a)) for c, a in zip(completions, answer, strict=True)]


EXAM = Exam(lambda size, seed, source: make_dataset("test", size, seed), correct_answer, max_tokens=64, size=512)


def answer_line(completions: list[Any], **kwargs: Any) -> list[float]:
    """0.1 where the last line reads `Answer: <integer>`."""
    last_lines = [completion_text(c).strip().rpartition("\n")[2] for c in completions]
    return [0.1 * (line.startswith("Answer: ") and line.removeprefix("Answer: ").isdecimal()) for line in last_lines]


def taught_line(completions: list[Any], **kwargs: Any) -> list[float]:
    """0.1 where the last line reads `Answer = <integer>`."""
    return [0.1 * (taught_answer(completion_text(c)) is not None) for c in completions]


def correct_taught_answer(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """1 where the last line reads `Answer = <integer>` with the right integer."""
    return [float(taught_answer(completion_text(c)) == a) for c, a in zip(completions, answer, strict=True)]


def taught_answer(text: str) -> str | None:
    """The integer of a last line in the new format; None where it has another form."""
    line = text.strip().rpartition("\n")[2]
    found = line.removeprefix(TAUGHT)
    return found if line.startswith(TAUGHT) and found.isdecimal() else None


def run(options: ArithmeticOptions) -> None:
    """Load, measure, train, measure again, report."""
    console = Console()
    config = GRPOConfig(**(DEFAULTS | (AFTER_SFT if options.sft_steps else {}) | options.config))
    model, trainer = load(options, config)
    test = make_dataset("test", options.eval_problems, config.seed)
    before, texts_before = accuracy(model, test, None, config)
    warm_up = teach_format(model, options, config, test, texts_before, console) if options.sft_steps else {}
    if warm_up is None:
        return
    result = trainer.train(resume_from_checkpoint=options.resume or None)
    if not result.finished:
        trainer.finish({"recipe": "arithmetic", "accuracy_before": before, "eval_problems": len(test), **warm_up})
        console.print(f"stopped at step {result.global_step}; the same command with resume=true goes on")
        return
    after, texts_after = accuracy(model, test, model.current_lora(), config)
    samples = side_by_side(test, texts_before, texts_after)
    trainer.finish({
        "recipe": "arithmetic", "accuracy_before": before, "accuracy_after": after, "eval_problems": len(test),
        "samples": samples, **warm_up, **({"taught_format_after": taught_share(texts_after)} if warm_up else {}),
    })
    print_accuracy(console, before, after, len(test))
    if warm_up:
        console.print(f"answers as `{TAUGHT}N`: {taught_share(texts_after):.1%} after GRPO")
    print_samples(console, samples)
    console.print(f"{result.global_step} steps in {trainer.state.elapsed:.0f} s; report: {trainer.run_dir}/report.html")


def teach_format(
    model: FastPeftModel, options: ArithmeticOptions, config: GRPOConfig, test: Dataset, texts_before: list[str],
    console: Console,
) -> dict[str, float] | None:
    """Teach the new format; what was measured around it, or None where Ctrl-C stopped it."""
    if options.resume and last_good(Path(config.output_dir))[0]:
        return {"sft_steps": options.sft_steps}  # the checkpoint has been taught already
    result = warm_up_trainer(model, options, config).train()
    if not result.finished:
        console.print(f"stopped in step {result.global_step} of the warm-up; with resume=true it begins again")
        return None
    right, texts = accuracy(model, test, model.current_lora(), config)
    before, after = taught_share(texts_before), taught_share(texts)
    console.print(
        f"answers as `{TAUGHT}N`: {before:.1%} before, {after:.1%} after {result.global_step} steps of fine-tuning; "
        f"accuracy {right:.1%}", soft_wrap=True,
    )
    return {"sft_steps": options.sft_steps, "accuracy_after_sft": right, "taught_format_before": before,
            "taught_format_after_sft": after}


def warm_up_trainer(model: FastPeftModel, options: ArithmeticOptions, config: GRPOConfig) -> SFTTrainer:
    """Fine-tuning on problems of the training split, each seen once."""
    settings = SFTConfig(
        **SFT_DEFAULTS, output_dir=f"{config.output_dir}/sft", max_steps=options.sft_steps, seed=config.seed,
        overwrite_output_dir=config.overwrite_output_dir or options.resume, disable_tqdm=config.disable_tqdm,
    )
    return SFTTrainer(model, make_demonstrations(options.sft_steps * settings.rows_per_step, config.seed), settings)


def taught_share(texts: list[str]) -> float:
    """The share of texts that end in the new format."""
    return sum(taught_answer(text) is not None for text in texts) / len(texts)


def load(options: ArithmeticOptions, config: GRPOConfig) -> tuple[FastPeftModel, GRPOTrainer]:
    """The model under LoRA, and its trainer."""
    bare, tokenizer = FastLanguageModel.from_pretrained(
        options.model, max_seq_length=options.max_seq_length, load_in_4bit=bool(options.load_in_4bit),
        fast_inference=options.fast_inference,
    )
    model = FastLanguageModel.get_peft_model(
        bare, r=options.lora_rank, lora_alpha=2 * options.lora_rank, random_state=config.seed,
        use_gradient_checkpointing=options.checkpointing,
    )
    dataset = make_dataset("train", options.train_size, config.seed)
    rewards: list[Callable[..., Any]] = [correct_answer, answer_line]
    if options.sft_steps:
        rewards = [correct_taught_answer, taught_line]
    return model, GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=rewards, args=config, train_dataset=dataset,
    )


def accuracy(
    model: FastPeftModel, dataset: Dataset, adapter: LoraRequest | None, config: GRPOConfig
) -> tuple[float, list[str]]:
    """Share of problems right at temperature 1, one sample each, and the samples."""
    return measure(model, dataset, adapter, config, correct_answer)


logging.getLogger("lowmem_grpo").addHandler(logging.NullHandler())
