"""Generate a recipe for a user's data: recognize the kind of the answers, and fill assets/new_recipe/recipe.txt."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2

from lowmem_grpo.data.files import ONE_ROW, is_file_name, listed
from lowmem_grpo.data.layouts import CHOICES, Columns, answer_of, find_columns, holds_tests, value_at
from lowmem_grpo.recipes.tasks.arithmetic import QUESTION
from lowmem_grpo.rewards.reading import boxed, read_number

ENDS_IN = "Think step by step. Then end with a line of its own: `Answer: ` and the {}, nothing else."
KINDS = {  # kind: (its name in messages, the system prompt)
    "example": ("numbers", ""),  # rows that the embedded tiny model can learn; any system prompt makes it talk nonsense
    "number": ("numbers", ENDS_IN.format("number")),
    "marked": ("solutions that end in `#### ` and the answer", ENDS_IN.format("number")),
    "choice": ("letters of a choice", ENDS_IN.format("letter")),
    "text": ("short texts", ENDS_IN.format("answer")),
    "math": ("LaTeX", "Think step by step. Then give the final answer in \\boxed{}."),
    "code": ("tests of code", "Write Python code that solves the task, in one ```python block."),
    "json": ("JSON", "Reply with JSON and nothing else."),
    "long": ("long texts", "Answer in a few sentences."),
    "none": ("none", "Answer in a few sentences."),
}
MOSTLY = 0.9  # a kind must fit this share of the answers
MATHS = 0.5  # LaTeX and numbers must fit this share: other answers to mathematics are words, names and intervals
SHORT = (8, 60)  # words and characters of a short answer
LATEX = re.compile(r"\\[a-zA-Z]+|\$[^$]+\$|\^|_\{")


@dataclass(frozen=True)
class NewRecipe:
    """The values from which the recipe for the user's rows is generated."""

    name: str
    folder: Path
    source: str  # the user's file, a dataset of the hub, or the file of example rows beside the recipe
    columns: Columns
    kind: str
    others: tuple[str, ...] = ()  # the columns that the recipe does not use
    split: str = "train"
    is_sure: bool = True  # whether the kind is known from the answers or from the user
    marks: str = ""  # the marks of choices in the question, such as "ABCD"; empty for none

    def text(self) -> str:
        more = [column.strip().lower() for column in self.columns.more]
        return fill_template(
            "recipe.txt", **vars(self), system=KINDS[self.kind][1], shown=self.shown, place=self.place,
            is_file=is_file_name(self.source), printable=[name for name in self.others if name.isprintable()],
            has_choices=not {*CHOICES}.isdisjoint(more), has_math_verify=find_spec("math_verify") is not None)

    @property
    def shown(self) -> str:
        """The source's name in the recipe's docstring: its last part, or "a file" if that part would need escapes."""
        name = self.source if self.source.count("/") == 1 else Path(self.source).name
        return name if name.replace("/", "").isprintable() and not set(name) & set('"\\$') else "a file"

    @property
    def place(self) -> str:
        """The source as Python code; a file below the recipe's folder becomes a path relative to the recipe."""
        if not is_file_name(self.source):
            return literal(self.source)
        whole = Path(self.source).resolve()
        path = os.path.relpath(whole, self.folder.resolve())
        outside = path.startswith("..") or Path(path).is_absolute()
        return literal(str(whole)) if outside else f"Path(__file__).parent / {literal(Path(path).as_posix())}"


def fill_template(template: str, **values: Any) -> str:
    """Return the text of a template in assets/new_recipe with these values."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parents[1] / "assets" / "new_recipe"), trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    templates.filters |= {"literal": literal, "listed": listed}
    return templates.get_template(template).render(values)


def literal(text: str) -> str:
    """Return a text as Python source, in double quotes unless that needs escapes."""
    return f'"{text}"' if text.isprintable() and not set(text) & set('"\\') else repr(text)


def recipe_for(
    name: str, folder: Path, source: str, rows: list[dict[str, Any]], prompt: str | None, answer: str | None,
    kind: str | None, split: str,
) -> NewRecipe:
    """Return the recipe for these rows; columns and kind that are None are guessed. ValueError for unusable rows."""
    if len(rows) == 1:
        raise ValueError(ONE_ROW.format(source))
    if not rows:
        columns = Columns(prompt or "", answer or "", "named", "named")
        return NewRecipe(name, folder, source, columns, kind or "text", split=split, is_sure=kind is not None)
    columns = find_columns(rows, prompt, answer, source)
    used = {columns.prompt, (columns.answer or "").partition(".")[0], columns.system, *columns.more, *columns.tests}
    others, marks, is_sure = tuple(column for column in rows[0] if column not in used), "", True
    if columns.answer:
        answers = texts_of(rows, columns.answer)
        kind = kind or ("code" if columns.tests else kind_of(answers))
        marks = marks_of(kind, answers)
        questions = [str(value_at(row, columns.prompt)).strip() for row in rows]
        if kind == "number" and mostly(questions, lambda text: QUESTION.fullmatch(text) is not None):
            kind = "example"  # the embedded tiny model was trained on problems of this kind
    elif kind is None:
        kind, is_sure = "none" if columns.answer is None else "text", columns.answer is None
    return NewRecipe(name, folder, source, columns, kind, others, split, is_sure, marks)


def texts_of(rows: list[dict[str, Any]], column: str) -> list[str]:
    """Return every answer in a column; a list of answers is flattened."""
    answers = [answer_of(row, column) for row in rows]
    return [text for said in answers if said for text in (said if isinstance(said, list) else [said])]


def kind_of(answers: list[str]) -> str:
    """Return the kind of most answers, such as "number"; if no kind fits, "text" for short answers, else "long"."""
    suits: dict[str, Callable[[str], bool]] = {
        "marked": lambda answer: "####" in answer and read_number(answer.rpartition("####")[2]) is not None,
        "code": holds_tests, "json": is_json, "number": is_number,
        "choice": lambda answer: re.fullmatch("[A-Z]", answer) is not None,
    }
    if kind := next((kind for kind, suit in suits.items() if mostly(answers, suit)), None):
        return kind
    if mostly(answers, has_latex, 0.05) and mostly(answers, is_math, MATHS):
        return "math"
    words, characters = SHORT
    return "text" if mostly(answers, lambda text: len(text.split()) <= words and len(text) <= characters) else "long"


def marks_of(kind: str, answers: list[str]) -> str:
    """Return the marks of choices (A, B, ... or 0, 1, ...) if the answers are such marks, else ""."""
    if kind == "choice":
        return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    if kind == "number" and set(answers) <= set("0123456789"):
        return "0123456789" if "0" in answers else "123456789"
    return ""


def mostly(texts: list[str], suits: Callable[[str], bool], share: float = MOSTLY) -> bool:
    return sum(map(suits, texts)) >= share * len(texts)


def is_json(answer: str) -> bool:
    try:
        return answer[:1] in "{[" and isinstance(json.loads(answer), dict | list)
    except (ValueError, RecursionError):
        return False


def is_number(answer: str) -> bool:
    """Return whether the answer is one number. LaTeX is excluded, because math_match reads it better."""
    return read_number(answer) is not None and not has_latex(answer)


def has_latex(answer: str) -> bool:
    return boxed(answer) is not None or LATEX.search(answer) is not None


def is_math(answer: str) -> bool:
    return boxed(answer) is not None or is_number(answer) or (has_latex(answer) and len(answer) <= 2 * SHORT[1])
