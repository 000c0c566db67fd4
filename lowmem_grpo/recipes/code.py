"""Recipe `code`: small Python functions that must pass their tests in a sandbox. Two rewards.

    lowmem-grpo run code                            # model and settings fit the card, or gpu=24
    lowmem-grpo run code isolation=process          # less protection, for machines without a sandbox

The sandbox is bubblewrap. Without it the run is refused before the model is loaded. On a CPU the recipe uses the
embedded tiny model, which cannot learn this task: the run then only shows in a minute that everything works.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import ProblemOptions
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, prepare
from lowmem_grpo.recipes.tasks import distinct, take
from lowmem_grpo.rewards.ready.code import CodeVerifier, code_passes_tests
from lowmem_grpo.rewards.sandbox.limits import Limits
from lowmem_grpo.rewards.sandbox.trial import SandboxError
from lowmem_grpo.rewards.texts import completion_text
from lowmem_grpo.utils import at_least, from_number, one_of

DEFAULTS = USUAL | {"output_dir": "runs/code", "max_steps": 100, "max_completion_length": 256, "warmup_ratio": 0.05}
PRESETS: Presets = {
    "cpu": Preset("tiny", 1024, 32, 64,
                  {"max_steps": 5, "max_completion_length": 48, "gradient_accumulation_steps": 2}),
    "8": Preset("Qwen/Qwen2.5-Coder-1.5B-Instruct", 1024, 32, 64, {"optim": "paged_adamw_8bit"}),
    "16": Preset("Qwen/Qwen2.5-Coder-1.5B-Instruct", 1024, 32, 64, {"optim": "paged_adamw_8bit"}),
    "24": Preset("Qwen/Qwen2.5-Coder-3B-Instruct", 1024, 32, 64, {"optim": "paged_adamw_8bit"}),
    "48": Preset("Qwen/Qwen2.5-Coder-7B-Instruct", 1280, 32, 64,
                 {"max_completion_length": 512, "optim": "paged_adamw_8bit"}),
    "80": Preset("Qwen/Qwen2.5-Coder-7B-Instruct", 2048, 64, 128,
                 {"max_completion_length": 1024, "optim": "adamw_8bit"}),
}
HIDDEN_TESTS = 4
WORDS = ("ant", "bear", "crane", "dingo", "eel", "falcon", "goose", "heron", "ibex", "jackdaw", "kiwi", "lark")
QUESTION = ("Write a Python function `solve({argument})` that returns {wanted}. For example, solve({given!r}) gives "
            "{result!r}. Reply with the function in one ```python block.")
DRAWS: dict[str, Callable[[random.Random], Any]] = {  # by the name of the argument
    "x": lambda rng: rng.randint(0, 99),
    "numbers": lambda rng: [rng.randint(0, 99) for _ in range(rng.randint(0, 6))],
    "text": lambda rng: " ".join(rng.sample(WORDS, rng.randint(1, 3))),
    "words": lambda rng: rng.sample(WORDS, rng.randint(0, 5)),
}


@dataclass(frozen=True)
class Snippet:
    """A kind of task: write `solve(argument)`. The result is described in words (`wanted`), as a Python `expression`,
    and as the function `rule(argument, a, b)`. The parameters a and b are drawn from the ranges `a` and `b`."""

    argument: str
    wanted: str
    expression: str
    rule: Callable[[Any, int, int], Any]
    a: tuple[int, int]
    b: tuple[int, int]


TEMPLATES = (
    Snippet("x", "{a} times x plus {b}", "{a} * x + {b}", lambda x, a, b: a * x + b, (2, 20), (1, 50)),
    Snippet("x", "the remainder of {a} times x divided by {b}", "{a} * x % {b}", lambda x, a, b: a * x % b, (2, 20),
            (5, 50)),
    Snippet("x", "x minus {a} where x is above {b}, and x plus {a} where it is not", "x - {a} if x > {b} else x + {a}",
            lambda x, a, b: x - a if x > b else x + a, (1, 20), (20, 80)),
    Snippet("numbers", "how many of the numbers are above {a} and divisible by {b}",
            "sum(n > {a} and n % {b} == 0 for n in numbers)",
            lambda numbers, a, b: sum(n > a and n % b == 0 for n in numbers), (5, 60), (2, 5)),
    Snippet("numbers", "the sum of the numbers, each multiplied by {a} but never counted as more than {b}",
            "sum(min({a} * n, {b}) for n in numbers)",
            lambda numbers, a, b: sum(min(a * n, b) for n in numbers), (2, 9), (20, 90)),
    Snippet("numbers", "a list of the numbers above {b} in reverse order, {a} added to each",
            "[n + {a} for n in reversed(numbers) if n > {b}]",
            lambda numbers, a, b: [n + a for n in reversed(numbers) if n > b], (1, 20), (20, 60)),
    Snippet("text", "the text without its first {a} characters, in upper case, repeated {b} times",
            "text[{a}:].upper() * {b}", lambda text, a, b: text[a:].upper() * b, (1, 6), (2, 5)),
    Snippet("words", "the words of more than {a} letters as one text, with {b} dashes between them",
            '("-" * {b}).join(word for word in words if len(word) > {a})',
            lambda words, a, b: ("-" * b).join(word for word in words if len(word) > a), (3, 5), (1, 9)),
)


@dataclass(frozen=True)
class CodeProblem:
    """A task from TEMPLATES[template] with parameters `a` and `b`. The question shows one of its tests."""

    template: int
    a: int
    b: int

    @property
    def key(self) -> str:
        return f"{self.template} {self.a} {self.b}"

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """(argument, result) of each test, the question's example first. The tests are the same on every access."""
        form, rng = TEMPLATES[self.template], random.Random(self.key)
        drawn = {repr(argument): argument for argument in (DRAWS[form.argument](rng) for _ in range(20 * HIDDEN_TESTS))}
        chosen = list(drawn.values())[: 1 + HIDDEN_TESTS]
        return [(argument, form.rule(argument, self.a, self.b)) for argument in chosen]

    @property
    def question(self) -> str:
        form, (argument, result) = TEMPLATES[self.template], self.pairs[0]
        wanted = form.wanted.format(a=self.a, b=self.b)
        return QUESTION.format(argument=form.argument, wanted=wanted, given=argument, result=result)

    @property
    def tests(self) -> list[str]:
        return [f"assert solve({argument!r}) == {result!r}" for argument, result in self.pairs]

    @property
    def solution(self) -> str:
        form = TEMPLATES[self.template]
        return f"def solve({form.argument}):\n    return {form.expression.format(a=self.a, b=self.b)}\n"


def draw_problem(rng: random.Random) -> CodeProblem:
    number = rng.randrange(len(TEMPLATES))
    return CodeProblem(number, rng.randint(*TEMPLATES[number].a), rng.randint(*TEMPLATES[number].b))


@dataclass
class CodeOptions(ProblemOptions):
    train_size: int = 2048
    eval_problems: int = 128
    isolation: str | None = None
    """The sandbox: "bubblewrap", or "process", which protects less. None: bubblewrap."""
    workers: int | None = None
    """The number of functions tested at the same time. None: one per CPU core."""
    seconds: float = 5.0
    """The time limit of a test, in seconds."""

    OF_MACHINE = ("isolation", "workers")
    RANGES = ProblemOptions.RANGES | {
        "isolation": one_of("bubblewrap", "process"), "workers": at_least(1), "seconds": from_number(0.05)}

    def verifier(self) -> CodeVerifier:
        """Return the verifier that tests the code. SandboxError, with the fix, if the sandbox does not work."""
        limits = Limits(seconds=self.seconds, total_seconds=2 * self.seconds)
        return code_passes_tests(isolation=self.isolation, limits=limits, workers=self.workers)


OPTIONS = CodeOptions


def make_dataset(split: str, size: int, seed: int = 0) -> Dataset:
    """Return `size` different problems of a split, with `prompt`, `answer` (working code) and `tests` (asserts)."""
    return Dataset.from_list([
        {"prompt": [{"role": "user", "content": problem.question}], "answer": problem.solution, "tests": problem.tests}
        for problem in take(distinct(split, seed, draw_problem, lambda problem: problem.key), size)
    ])


def one_block(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return 0.1 where the completion has exactly one ```python block and the block defines `solve`, else 0."""
    texts = [completion_text(completion) for completion in completions]
    blocks = ["\n" + text.partition("```python\n")[2].partition("```")[0] for text in texts]
    return [0.1 * (text.count("```") == 2 and "\ndef solve(" in block)
            for text, block in zip(texts, blocks, strict=True)]


def right(completions: list[Any], tests: list[list[str]], **kwargs: Any) -> list[float | None]:
    """Return 1 where the code passes its tests in this machine's sandbox, else 0; None if no time was left to test."""
    return exam_verifier().reward()(completions=completions, tests=tests)


def exam_problems(size: int, seed: int, source: str | None) -> Dataset:
    """Return test problems. Raises SandboxError, before anything is sampled, if this machine has no sandbox."""
    exam_verifier()
    return make_dataset("test", size, seed)


def exam_verifier() -> CodeVerifier:
    """Return a verifier that uses this machine's sandbox. SandboxError, with advice, if none works."""
    try:
        return code_passes_tests()
    except SandboxError as error:
        raise SandboxError(
            f"{error}. In an exam: lowmem-grpo eval MODEL --recipe code isolation=process"
        ) from error


EXAM = Exam(exam_problems, right, max_tokens=256, size=128, of_options=lambda options, tiny: {
    "problems": lambda size, seed, source: make_dataset("test", size, seed), "right": options.verifier().reward()})


def run(options: CodeOptions) -> None:
    verifier = options.verifier()
    setup = prepare(options, DEFAULTS, PRESETS)
    isolation = verifier.sandbox.isolation
    notes = [f"Code runs in {isolation}, {verifier.workers} at a time.", setup.tiny_note("cannot write Python")]
    teach(setup, Lesson("code", make_dataset("train", options.train_size, setup.config.seed),
                        [verifier.reward(), one_block], make_dataset("test", options.eval_problems, setup.config.seed),
                        verifier.reward(), note=" ".join(filter(None, notes)), facts={"isolation": isolation}))
