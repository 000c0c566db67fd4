"""Recipe `code`: small Python functions, which must pass their tests in a sandbox. Two rewards.

    lowmem-grpo run code model=Qwen/Qwen2.5-Coder-1.5B-Instruct
    lowmem-grpo run code isolation=process          # an opt-in to less protection, where no sandbox can be installed

`isolation` is bubblewrap or nsjail; by default the one that works here, and without one the run is refused before the
model is loaded. The embedded tiny model, the default, knows arithmetic alone: with it the recipe runs through on a CPU
in a minute, and its accuracy stays at zero.
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
from lowmem_grpo.recipes.code_problems import code_problems
from lowmem_grpo.recipes.exam import Exam
from lowmem_grpo.recipes.held_out import measure, side_by_side, text_of
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.rewards.code import CodeVerifier, code_passes_tests
from lowmem_grpo.sandbox.isolation import SandboxError
from lowmem_grpo.sandbox.limits import Limits

DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/code", "seed": 0, "max_steps": 100, "learning_rate": 1e-5, "max_completion_length": 256,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "num_generations": 8, "loss_type": "dr_grpo",
    "scale_rewards": "none", "adam_beta2": 0.99, "max_grad_norm": 0.2, "warmup_ratio": 0.05,
    "lr_scheduler_type": "linear", "save_steps": 25, "save_total_limit": 2,
}
WITH_TINY: dict[str, Any] = {"max_steps": 5, "max_completion_length": 48, "gradient_accumulation_steps": 2}


@dataclass
class CodeOptions(RecipeOptions):
    """The options of `lowmem-grpo run code`; 4-bit weights by default, but for the embedded model."""

    max_seq_length: int = 1024
    lora_rank: int = 32
    train_size: int = 2048
    eval_problems: int = 128
    isolation: str | None = None
    """bubblewrap, nsjail or process; None is the first of the two sandboxes that works."""
    workers: int | None = None
    """Codes that run at a time; None is one per CPU."""
    seconds: float = 5.0
    """Wall time of one test."""

    def verifier(self) -> CodeVerifier:
        """What judges the code. SandboxError where nothing can run it safely, with what to do."""
        limits = Limits(seconds=self.seconds, total_seconds=2 * self.seconds)
        return code_passes_tests(isolation=self.isolation, limits=limits, workers=self.workers)


OPTIONS = CodeOptions


def make_dataset(split: str, size: int, seed: int = 0) -> Dataset:
    """`size` distinct problems of a split ("train" or "test"; disjoint whatever the seeds).

    Columns: `prompt`, `answer` (a code that passes), `tests` (asserts).
    """
    if size < 1:
        raise ValueError(f"size is {size}; it must be at least 1")
    source = code_problems(split, seed)
    return Dataset.from_list([
        {"prompt": [{"role": "user", "content": problem.question}], "answer": problem.solution, "tests": problem.tests}
        for problem in (next(source) for _ in range(size))
    ])


def one_block(completions: list[Any], **kwargs: Any) -> list[float]:
    """0.1 where the completion has one ```python block, in which `solve` is defined, after imports or not."""
    texts = [text_of(completion) for completion in completions]
    blocks = ["\n" + text.partition("```python\n")[2].partition("```")[0] for text in texts]
    return [0.1 * (text.count("```") == 2 and "\ndef solve(" in block)
            for text, block in zip(texts, blocks, strict=True)]


def right(completions: list[Any], tests: list[list[str]], **kwargs: Any) -> list[float | None]:
    """1 where a code passes all its tests in the sandbox that works here, None where there was no time to run it."""
    return exam_verifier().reward()(completions=completions, tests=tests)


def exam_problems(size: int, seed: int, source: str | None) -> Dataset:
    """Problems of the test split. SandboxError where nothing could judge the answers: nothing is sampled then."""
    exam_verifier()
    return make_dataset("test", size, seed)


def exam_verifier() -> CodeVerifier:
    """In the sandbox that works here. SandboxError says what an exam offers in place of `isolation`."""
    try:
        return code_passes_tests()
    except SandboxError as error:
        raise SandboxError(
            f"{error}. An exam has no such option: take problems in a file, --dataset FILE --reward MINE.py:judge, "
            'with judge = code_passes_tests(isolation="process") in MINE.py'
        ) from error


def passes(verifier: CodeVerifier) -> Callable[..., list[float]]:
    """For measuring: 1 where all tests pass, and 0 also where there was no time to run them."""

    def score(completions: list[Any], tests: list[list[str]], **kwargs: Any) -> list[float]:
        return [value or 0.0 for value in verifier.reward()(completions=completions, tests=tests)]

    return score


EXAM = Exam(exam_problems, right, max_tokens=256, size=128)


def load(options: CodeOptions, config: GRPOConfig, verifier: CodeVerifier) -> tuple[FastPeftModel, GRPOTrainer]:
    """The model under LoRA, and its trainer."""
    four_bit = options.model != TINY if options.load_in_4bit is None else options.load_in_4bit
    bare, tokenizer = FastLanguageModel.from_pretrained(
        options.model, max_seq_length=options.max_seq_length, load_in_4bit=four_bit,
        fast_inference=options.fast_inference,
    )
    model = FastLanguageModel.get_peft_model(
        bare, r=options.lora_rank, lora_alpha=2 * options.lora_rank, random_state=config.seed,
        use_gradient_checkpointing=options.checkpointing,
    )
    return model, GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=[verifier.reward(), one_block], args=config,
        train_dataset=make_dataset("train", options.train_size, config.seed),
    )


def run(options: CodeOptions) -> None:
    """Find a sandbox, load, measure, train, measure again, report."""
    console = Console()
    verifier = options.verifier()
    config = GRPOConfig(**(DEFAULTS | (WITH_TINY if options.model == TINY else {}) | options.config))
    test = make_dataset("test", options.eval_problems, config.seed)
    model, trainer = load(options, config, verifier)
    console.print(f"code runs in {verifier.sandbox.isolation}, {verifier.workers} at a time")
    if options.model == TINY:
        console.print("the embedded model writes no Python: this shows that all runs, not that anything is learnt")
    before, texts_before = measure(model, test, None, config, passes(verifier))
    found: dict[str, Any] = {
        "recipe": "code", "accuracy_before": before, "eval_problems": len(test),
        "isolation": verifier.sandbox.isolation,
    }
    result = trainer.train(resume_from_checkpoint=options.resume or None)
    if not result.finished:
        trainer.finish(found)
        console.print(f"stopped at step {result.global_step}; the same command with resume=true goes on")
        return
    after, texts_after = measure(model, test, model.current_lora(), config, passes(verifier))
    samples = side_by_side(test, texts_before, texts_after)
    trainer.finish(found | {"accuracy_after": after, "samples": samples})
    print_accuracy(console, before, after, len(test))
    print_samples(console, samples)
    console.print(f"{result.global_step} steps in {trainer.state.elapsed:.0f} s; report: {trainer.run_dir}/report.html")
