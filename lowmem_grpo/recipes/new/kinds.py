"""The kinds of answers, how to recognize them, and what a new recipe contains for each: a system prompt, a verifier and
an example of the user's own reward function."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from lowmem_grpo.data.layouts import holds_tests
from lowmem_grpo.recipes.problems.arithmetic import QUESTION
from lowmem_grpo.rewards.ready.reading import boxed, read_number

MOSTLY = 0.9  # a kind must fit this share of the answers
MATHS = 0.5  # so must LaTeX and numbers: the other answers to mathematics are words, names and intervals
SHORT = (8, 60)  # words and characters of a short answer
LATEX = re.compile(r"\\[a-zA-Z]+|\$[^$]+\$|\^|_\{")


@dataclass(frozen=True)
class Kind:
    """The parts of a recipe that depend on its answers."""

    about: str
    """The answers in words."""
    system: str
    """The system prompt."""
    right: str
    """The verifier as code; empty if no answer is simply right or wrong."""
    comment: str
    """The comment above the verifier."""
    own: str
    """An example of the user's own reward function as code, with its constants."""
    rewards: str
    """The list of rewards as code."""
    uses: tuple[str, ...] = ("re",)
    """Modules of the standard library that the code imports."""
    label: str = "answer_of(row, ANSWER_COLUMN)"
    """Code for the text that a completion is compared with."""


ANSWER_LINE = '''
def answer_line(completions: list[Any], **kwargs: Any) -> list[float]:
    """0.1 if the last line is `Answer: ` and {what}."""
    lines = [rewards.last_line(text) or "" for text in completion_texts(completions)]
    return [0.1 if re.fullmatch(r"Answer: {pattern}", line) else 0.0 for line in lines]
'''
ONCE = '''
def {name}(completions: list[Any], **kwargs: Any) -> list[float]:
    """0.1 if the completion has exactly one {what}."""
    return [0.1 if len(re.findall(r"{pattern}", text)) == 1 else 0.0 for text in completion_texts(completions)]
'''
SAME_JSON = '''
def same_json(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """1 if the completion is JSON with the same value as the answer; the order of keys does not matter."""
    pairs = zip(completion_texts(completions), answer, strict=True)
    return [float(parsed(text) == parsed(label)) for text, label in pairs]


def parsed(text: str) -> Any:
    """The value of a JSON text, with or without a ``` block around it; the text itself if it is not JSON."""
    try:
        return json.loads(text.strip().removeprefix("```json").strip("`"))
    except (ValueError, RecursionError):
        return text
'''
SHARED_WORDS = '''
def shared_words(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """From 0 to 1: the share of the words in completion and answer that both contain."""
    pairs = zip(completion_texts(completions), answer, strict=True)
    both = [(words(text), words(label)) for text, label in pairs]
    return [len(said & wanted) / max(len(said | wanted), 1) for said, wanted in both]


def words(text: str) -> set[str]:
    """The different words of a text."""
    return set(re.findall(r"\\w+", text.lower()))
'''
WHOLE_SENTENCES = '''
def whole_sentences(completions: list[Any], **kwargs: Any) -> list[float]:
    """1 if a completion ends like a sentence."""
    return [1.0 if text.strip().endswith((".", "!", "?")) else 0.0 for text in completion_texts(completions)]
'''
TRUE_STEPS = '''
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def true_steps(completions: list[Any], **kwargs: Any) -> list[float]:
    """Up to 0.2: the share of lines like `3 + 4 = 7` that are true."""
    found = [re.findall(r"(\\d+) ([-+*]) (\\d+) = (\\d+)", text) for text in completion_texts(completions)]
    true = [[OPERATORS[sign](int(a), int(b)) == int(c) for a, sign, b, c in lines] for lines in found]
    return [0.2 * sum(lines) / max(len(lines), 1) for lines in true]
'''
JUDGE = """# No answer is simply right or wrong here: accuracy is not measured, and `lowmem-grpo eval` has no EXAM.
# A language model judges such texts better than these functions do (docs/judge.md):
#     judge = rewards.UrlJudge("http://localhost:8000/v1", "MODEL")
#     REWARDS = [rewards.judged(judge{reference})]"""


def ends_in(what: str) -> str:
    """A system prompt."""
    return f"Think step by step. Then end with a line of its own: `Answer: ` and {what}, nothing else."


LAST_NUMBER = "The last number of the completion must be the answer's. Stricter is where=rewards.after(\"Answer:\")"
EXAMPLE = "example"  # the kind of the rows that come with a new recipe, and of other rows that are like them
KINDS = {
    EXAMPLE: Kind(
        "numbers", "", "rewards.number_match()", LAST_NUMBER, TRUE_STEPS, "[CORRECT, true_steps]", ("operator", "re"),
    ),
    "number": Kind(
        "numbers", ends_in("the number"), "rewards.number_match()",
        LAST_NUMBER,
        ANSWER_LINE.format(what="a number", pattern=r"[-+]?[$\d.,/]+"), "[CORRECT, answer_line]",
    ),
    "marked": Kind(
        "solutions that end in `#### ` and the answer", ends_in("the number"), "rewards.number_match()",
        LAST_NUMBER,
        ANSWER_LINE.format(what="a number", pattern=r"[-+]?[$\d.,/]+"), "[CORRECT, answer_line]",
        label='rewards.after("####")(answer_of(row, ANSWER_COLUMN) or "")',
    ),
    "choice": Kind(
        "letters of a choice", ends_in("the letter"),
        'rewards.answer_match(where=rewards.after("Answer:"), ignore_case=True)',
        "What follows `Answer:` must be the answer's letter.",
        ANSWER_LINE.format(what="a letter", pattern="[A-Z]"), "[CORRECT, answer_line]",
    ),
    "text": Kind(
        "short texts", ends_in("the answer"),
        'rewards.answer_match(where=rewards.after("Answer:"), ignore_case=True)',
        "What follows `Answer:` must be the answer's text; case and spaces do not matter.",
        ANSWER_LINE.format(what="a short text", pattern=".{1,80}"), "[CORRECT, answer_line]",
    ),
    "math": Kind(
        "LaTeX", "Think step by step. Then give the final answer in \\boxed{}.", "rewards.math_match()",
        "What is in the last \\boxed{} must equal the answer as mathematics.",
        ONCE.format(name="boxed_once", what="boxed answer", pattern=r"\\boxed"), "[CORRECT, boxed_once]",
    ),
    "code": Kind(
        "tests of code", "Write Python code that solves the task, in one ```python block.",
        "rewards.code_passes_tests(\"answer\")", "The code must pass the tests, which run in a sandbox.",
        ONCE.format(name="one_block", what="block of Python", pattern="```python"), "[CORRECT, one_block]",
    ),
    "json": Kind(
        "JSON", "Reply with JSON and nothing else.", "",
        "`rewards.json_match(schema)` says whether a text is JSON of that schema; same_json, whether it is the answer.",
        SAME_JSON, "[CORRECT, rewards.json_match().reward(right=0.2, wrong=0.0)]", ("json",),
    ),
    "long": Kind(
        "long texts", "Answer in a few sentences.", "", JUDGE.format(reference=', reference="answer"'),
        SHARED_WORDS, "[shared_words, rewards.length_near(target=100, spread=100, unit=\"words\")]",
    ),
    "none": Kind(
        "none", "Answer in a few sentences.", "", JUDGE.format(reference=""), WHOLE_SENTENCES,
        "[whole_sentences, rewards.length_near(target=100, spread=100, unit=\"words\")]", (),
    ),
}
CHOICES = [name for name in KINDS if name not in (EXAMPLE, "none")]


def kind_of(answers: list[str]) -> str:
    """The first kind that fits most of the answers; "text" or "long" if none does."""
    if mostly(answers, lambda answer: read_number(answer.rpartition("####")[2]) is not None and "####" in answer):
        return "marked"
    suits: list[tuple[str, Callable[[str], bool]]] = [
        ("code", holds_tests), ("json", is_json), ("number", is_number), ("choice", is_letter),
    ]
    found = next((name for name, suit in suits if mostly(answers, suit)), None)
    if found is None and mostly(answers, has_latex, 0.05) and mostly(answers, is_math, MATHS):
        found = "math"
    words, characters = SHORT
    short = mostly(answers, lambda answer: len(answer.split()) <= words and len(answer) <= characters)
    return found or ("text" if short else "long")


def of_the_tiny_model(kind: str, questions: list[str]) -> bool:
    """Whether these are problems of the kind that the embedded tiny model was trained on. It answers them without a
    system prompt, and any system prompt makes it talk nonsense."""
    return kind == "number" and mostly(questions, lambda question: QUESTION.fullmatch(question.strip()) is not None)


def marks_of(kind: str, answers: list[str]) -> str:
    """The marks of choices (A, B, ... or 0, 1, ...) if the answers are such marks; else empty."""
    if kind == "choice":
        return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    if kind == "number" and set(answers) <= set("0123456789"):
        return "0123456789" if "0" in answers else "123456789"
    return ""


def mostly(answers: list[str], suits: Callable[[str], bool], share: float = MOSTLY) -> bool:
    """Whether at least this share of the answers fits."""
    return sum(map(suits, answers)) >= share * len(answers)


def is_json(answer: str) -> bool:
    """Whether it is a JSON object or list."""
    try:
        return answer[:1] in "{[" and isinstance(json.loads(answer), dict | list)
    except (ValueError, RecursionError):
        return False


def is_number(answer: str) -> bool:
    """Return whether it is one number, without LaTeX: math_match reads that better."""
    return read_number(answer) is not None and not has_latex(answer)


def has_latex(answer: str) -> bool:
    return boxed(answer) is not None or LATEX.search(answer) is not None


def is_math(answer: str) -> bool:
    """A boxed solution, a number, or a short text with LaTeX in it."""
    return boxed(answer) is not None or is_number(answer) or (has_latex(answer) and len(answer) <= 2 * SHORT[1])


def is_letter(answer: str) -> bool:
    return re.fullmatch("[A-Z]", answer) is not None


def math_verifier() -> tuple[str, str]:
    """The mathematics verifier that can be used on this machine, as code, and the comment above it."""
    if find_spec("math_verify") is not None:
        return "rewards.math_match()", "What is in the last \\boxed{} must equal the answer as mathematics."
    return "rewards.boxed_match()", (
        "What is in the last \\boxed{} must be the answer's number or text; after `pip install math-verify`,\n"
        "# rewards.math_match() also accepts 1/2 for \\frac{1}{2}."
    )
