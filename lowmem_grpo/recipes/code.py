"""Recipe `code`: small Python functions that must pass their tests in a sandbox. Two rewards.

    lowmem-grpo run code                            # model and settings fit the card, or gpu=24
    lowmem-grpo run code isolation=process          # less protection, for machines without a sandbox

The sandbox is bubblewrap. Without it the run is refused before the model is
loaded. On a CPU the recipe uses the embedded tiny model, which cannot learn this task: the run then only shows in a
minute that everything works.
"""

from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import Preset, Presets, prepare
from lowmem_grpo.recipes.problems.code import code_problems
from lowmem_grpo.recipes.problems.splits import take
from lowmem_grpo.rewards.ready.code import CodeVerifier, code_passes_tests
from lowmem_grpo.rewards.sandbox.isolation import SandboxError
from lowmem_grpo.rewards.sandbox.limits import Limits
from lowmem_grpo.rewards.texts import completion_text

DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/code", "seed": 0, "max_steps": 100, "learning_rate": 1e-5, "max_completion_length": 256,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "num_generations": 8, "loss_type": "dr_grpo",
    "scale_rewards": "none", "adam_beta2": 0.99, "max_grad_norm": 0.2, "warmup_ratio": 0.05,
    "lr_scheduler_type": "linear", "save_steps": 25, "save_total_limit": 2,
}
PRESETS: Presets = {
    "cpu": Preset("tiny", 1024, 32, 64,
                  {"max_steps": 5, "max_completion_length": 48, "gradient_accumulation_steps": 2}),
    "16": Preset("Qwen/Qwen2.5-Coder-1.5B-Instruct", 1024, 32, 64, {"optim": "paged_adamw_8bit"}),
    "24": Preset("Qwen/Qwen2.5-Coder-3B-Instruct", 1024, 32, 64, {"optim": "paged_adamw_8bit"}),
    "48": Preset("Qwen/Qwen2.5-Coder-7B-Instruct", 1280, 32, 64,
                 {"max_completion_length": 512, "optim": "paged_adamw_8bit"}),
    "80": Preset("Qwen/Qwen2.5-Coder-7B-Instruct", 2048, 64, 128,
                 {"max_completion_length": 1024, "optim": "adamw_8bit"}),
}


@dataclass
class CodeOptions(RecipeOptions):
    train_size: int = 2048
    """Problems to train on."""
    eval_problems: int = 128
    """Held-out problems that are answered before and after training."""
    isolation: str | None = None
    """bubblewrap, or process, which protects less; None is bubblewrap."""
    workers: int | None = None
    """Functions tested at a time; None is one per CPU."""
    seconds: float = 5.0
    """Time limit of one test, in seconds."""

    def verifier(self) -> CodeVerifier:
        """Return the verifier that tests the code; SandboxError, with what to do, where nothing runs it safely."""
        limits = Limits(seconds=self.seconds, total_seconds=2 * self.seconds)
        return code_passes_tests(isolation=self.isolation, limits=limits, workers=self.workers)


OPTIONS = CodeOptions


def make_dataset(split: str, size: int, seed: int = 0) -> Dataset:
    """`size` different problems of a split ("train" or "test"). Columns: `prompt`, `answer` (a function that passes),
    `tests` (asserts)."""
    return Dataset.from_list([
        {"prompt": [{"role": "user", "content": problem.question}], "answer": problem.solution, "tests": problem.tests}
        for problem in take(code_problems(split, seed), size)
    ])


def one_block(completions: list[Any], **kwargs: Any) -> list[float]:
    """0.1 where the completion has exactly one ```python block, and the block defines `solve`."""
    texts = [completion_text(completion) for completion in completions]
    blocks = ["\n" + text.partition("```python\n")[2].partition("```")[0] for text in texts]
    return [0.1 * (text.count("```") == 2 and "\ndef solve(" in block)
            for text, block in zip(texts, blocks, strict=True)]


def right(completions: list[Any], tests: list[list[str]], **kwargs: Any) -> list[float | None]:
    """1 where the code passes all its tests in the sandbox of this machine; None where there was no time to run it."""
    return exam_verifier().reward()(completions=completions, tests=tests)


def exam_problems(size: int, seed: int, source: str | None) -> Dataset:
    """Problems of the test split. Raises SandboxError, before anything is sampled, where nothing can test the code."""
    exam_verifier()
    return make_dataset("test", size, seed)


def exam_verifier() -> CodeVerifier:
    """A verifier in the sandbox of this machine. Its SandboxError says what an exam offers instead of `isolation`."""
    try:
        return code_passes_tests()
    except SandboxError as error:
        raise SandboxError(
            f"{error}. An exam has no such option: test with --dataset FILE --reward MINE.py:judge instead, "
            'with judge = code_passes_tests(isolation="process") in MINE.py'
        ) from error


EXAM = Exam(exam_problems, right, max_tokens=256, size=128)


def run(options: CodeOptions) -> None:
    verifier = options.verifier()
    setup = prepare(options, DEFAULTS, PRESETS)
    isolation = verifier.sandbox.isolation
    notes = [f"Code runs in {isolation}, {verifier.workers} at a time.", setup.tiny_note("cannot write Python")]
    teach(setup, Lesson("code", make_dataset("train", options.train_size, setup.config.seed),
                        [verifier.reward(), one_block], make_dataset("test", options.eval_problems, setup.config.seed),
                        verifier.reward(), note=" ".join(filter(None, notes)), facts={"isolation": isolation}))
