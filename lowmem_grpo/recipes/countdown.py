"""Recipe `countdown`: make a target from given numbers with + - * /, generated puzzles, three rewards.

    lowmem-grpo run countdown model=Qwen/Qwen2.5-3B-Instruct
    lowmem-grpo run countdown model=Qwen/Qwen2.5-1.5B-Instruct max_numbers=3 largest_number=20     # easier puzzles

The embedded tiny model, the default, knows arithmetic alone: with it the recipe runs through on a CPU in a minute, and
its accuracy stays where it is. Puzzles that the model never gets right teach it nothing: begin with easy ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from rich.console import Console

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.live import print_accuracy, print_samples
from lowmem_grpo.loader import TINY
from lowmem_grpo.model import FastPeftModel
from lowmem_grpo.recipes.countdown_problems import Difficulty, allowed, answer_text, countdowns, evaluate
from lowmem_grpo.recipes.exam import Exam
from lowmem_grpo.recipes.held_out import measure, side_by_side
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.rewards.texts import completion_text

DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/countdown", "seed": 0, "max_steps": 200, "learning_rate": 1e-5, "max_completion_length": 640,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "num_generations": 8, "loss_type": "dr_grpo",
    "scale_rewards": "none", "adam_beta2": 0.99, "max_grad_norm": 0.2, "warmup_ratio": 0.05,
    "lr_scheduler_type": "linear", "save_steps": 25, "save_total_limit": 2,
}
WITH_TINY: dict[str, Any] = {"max_steps": 10, "max_completion_length": 64, "gradient_accumulation_steps": 2}


@dataclass
class CountdownOptions(RecipeOptions):
    """The options of `lowmem-grpo run countdown`; 4-bit weights by default, but for the embedded model."""

    max_seq_length: int = 1024
    lora_rank: int = 32
    train_size: int = 4096
    eval_problems: int = 256
    min_numbers: int = 3
    max_numbers: int = 4
    largest_number: int = 50
    largest_target: int = 99
    operators: str = "+-*/"

    @property
    def difficulty(self) -> Difficulty:
        """Which puzzles; ValueError for what makes none."""
        return Difficulty(
            self.min_numbers, self.max_numbers, self.largest_number, self.largest_target, self.operators
        )


OPTIONS = CountdownOptions


def make_dataset(split: str, size: int, seed: int = 0, difficulty: Difficulty | None = None) -> Dataset:
    """`size` distinct puzzles of a split ("train" or "test"; disjoint whatever the seeds and difficulties).

    Columns: `prompt`, `answer` (one solution of several), `numbers`, `target`.
    """
    if size < 1:
        raise ValueError(f"size is {size}; it must be at least 1")
    source = countdowns(split, seed, difficulty)
    return Dataset.from_list([
        {"prompt": [{"role": "user", "content": puzzle.question}], "answer": puzzle.solution,
         "numbers": list(puzzle.numbers), "target": puzzle.target}
        for puzzle in (next(source) for _ in range(size))
    ])


def reaches_target(
    completions: list[Any], numbers: list[list[int]], target: list[int], **kwargs: Any
) -> list[float]:
    """1 where the expression after the last `Answer:` makes the target from the given numbers."""
    rows = zip(completions, numbers, target, strict=True)
    return [float(solves(completion_text(completion), given, wanted)) for completion, given, wanted in rows]


def solves(text: str, numbers: list[int], target: int) -> bool:
    """Whether a text ends in a solution."""
    answer = evaluate(answer_text(text))
    return answer is not None and answer.value == target and allowed(answer, numbers)


def given_numbers(completions: list[Any], numbers: list[list[int]], **kwargs: Any) -> list[float]:
    """0.1 where that expression uses none but the given numbers, each at most once, and two or more of them."""
    found = [evaluate(answer_text(completion_text(completion))) for completion in completions]
    return [0.1 * (answer is not None and answer.numbers.total() > 1 and allowed(answer, given))
            for answer, given in zip(found, numbers, strict=True)]


def answer_line(completions: list[Any], **kwargs: Any) -> list[float]:
    """0.1 where the last line is `Answer: ` and an expression, and nothing else."""
    last_lines = [completion_text(completion).strip().rpartition("\n")[2] for completion in completions]
    return [0.1 * (line.startswith("Answer: ") and evaluate(line.removeprefix("Answer: ")) is not None)
            for line in last_lines]


EXAM = Exam(lambda size, seed, source: make_dataset("test", size, seed), reaches_target, max_tokens=640)
REWARDS: list[Callable[..., Any]] = [reaches_target, given_numbers, answer_line]


def load(options: CountdownOptions, config: GRPOConfig) -> tuple[FastPeftModel, GRPOTrainer]:
    """The model under LoRA, and its trainer."""
    four_bit = options.model != TINY if options.load_in_4bit is None else options.load_in_4bit
    dataset = make_dataset("train", options.train_size, config.seed, options.difficulty)
    bare, tokenizer = FastLanguageModel.from_pretrained(
        options.model, max_seq_length=options.max_seq_length, load_in_4bit=four_bit,
        fast_inference=options.fast_inference,
    )
    model = FastLanguageModel.get_peft_model(
        bare, r=options.lora_rank, lora_alpha=2 * options.lora_rank, random_state=config.seed,
        use_gradient_checkpointing=options.checkpointing,
    )
    return model, GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=REWARDS, args=config, train_dataset=dataset,
    )


def run(options: CountdownOptions) -> None:
    """Load, measure, train, measure again, report."""
    console = Console()
    config = GRPOConfig(**(DEFAULTS | (WITH_TINY if options.model == TINY else {}) | options.config))
    test = make_dataset("test", options.eval_problems, config.seed, options.difficulty)
    model, trainer = load(options, config)
    if options.model == TINY:
        console.print("the embedded model knows no countdown: this shows that all runs, not that anything is learnt")
    before, texts_before = measure(model, test, None, config, reaches_target)
    found: dict[str, Any] = {"recipe": "countdown", "accuracy_before": before, "eval_problems": len(test)}
    result = trainer.train(resume_from_checkpoint=options.resume or None)
    if not result.finished:
        trainer.finish(found)
        console.print(f"stopped at step {result.global_step}; the same command with resume=true goes on")
        return
    after, texts_after = measure(model, test, model.current_lora(), config, reaches_target)
    samples = side_by_side(test, texts_before, texts_after)
    trainer.finish(found | {"accuracy_after": after, "samples": samples})
    print_accuracy(console, before, after, len(test))
    print_samples(console, samples)
    console.print(f"{result.global_step} steps in {trainer.state.elapsed:.0f} s; report: {trainer.run_dir}/report.html")
