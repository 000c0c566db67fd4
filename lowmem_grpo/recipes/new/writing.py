"""Writes the text of a new recipe: the template, filled with the parts that depend on the user's data."""

import os
from dataclasses import dataclass
from pathlib import Path
from string import Template

from lowmem_grpo.data.files import listed
from lowmem_grpo.data.layouts import CHOICES, Columns
from lowmem_grpo.recipes.new.kinds import EXAMPLE, KINDS, Kind, math_verifier

TEMPLATES = Path(__file__).parents[2] / "assets" / "new_recipe"
EXAMPLE_CPU = '''    "cpu": Preset("tiny", 128, 16, 32, {  # the embedded model, which makes mistakes in this arithmetic
        "max_steps": 20, "learning_rate": 3e-3, "max_completion_length": 64, "per_device_train_batch_size": 64,
        "gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "warmup_ratio": 0.0,
    }),'''
LOOK_CPU = '''    "cpu": Preset("tiny", 2048, 16, 32, {  # the embedded model: shows that the recipe works
        "max_steps": 5, "max_completion_length": 64, "gradient_accumulation_steps": 2,
    }),'''


@dataclass(frozen=True)
class Wanted:
    """What a recipe is written from."""

    name: str
    folder: Path
    """The folder of the recipe."""
    source: str
    """The user's file, a dataset of the hub, or the file of example rows beside the recipe."""
    is_file: bool
    columns: Columns
    others: list[str]
    """The columns that the recipe does not use."""
    kind: str
    sure: bool = True
    """Whether the kind is known from the answers or from the user."""
    marks: str = ""
    """The marks before several choices; empty for none."""
    split: str = "train"
    unseen: str = ""
    """Why the data could not be looked at; empty if it was."""

    @property
    def example(self) -> bool:
        """Whether the recipe is for rows that the embedded tiny model can learn, such as the example rows."""
        return self.kind == EXAMPLE


def recipe_text(wanted: Wanted) -> str:
    """The recipe's source."""
    kind, columns, asked = KINDS[wanted.kind], wanted.columns, asked_code(wanted)
    label = f"{{name: row[name] for name in {columns.tests}}}" if columns.tests[1:] else kind.label
    label = "None" if columns.answer is None else label
    read = [name for name in ("answer_of", "prompt_of", "value_at") if f"{name}(" in f"prompt_of({asked}{label}"]
    return Template((TEMPLATES / "recipe.txt").read_text("utf-8")).substitute(
        name=wanted.name,
        data_name="your rows in " + shown(wanted.source),
        how_long="a minute on a CPU, with the embedded tiny model" if wanted.example
        else "the card decides the model and settings",
        eval_line=f"    lowmem-grpo eval runs/{wanted.name} --recipe ./{wanted.name}.py   # before and after, on rows "
        "held out\n" if has_right(kind) else "",
        imports="".join(f"import {name}\n" for name in kind.uses) + ("from pathlib import Path\n" if wanted.is_file
                                                                     and not absolute(wanted) else "")
        + "from typing import Any\n\n",
        names_of_own_data="" if wanted.example else "KNOWS_ARITHMETIC_ALONE, ",
        question_text="from lowmem_grpo.recipes.question_text import question_text\n" if columns.more else "",
        asked=asked, label=label, read=", ".join(read), columns=columns_code(wanted), system=system_code(wanted, kind),
        begin=f"row[{literal(columns.system)}] or SYSTEM_PROMPT" if columns.system else "SYSTEM_PROMPT",
        data=f"DATA = OwnData({', '.join(data_arguments(wanted))})",
        rewards=rewards_code(wanted, kind), cpu=EXAMPLE_CPU if wanted.example else LOOK_CPU,
        exam="EXAM = DATA.exam(CORRECT, max_tokens=512)  # for `lowmem-grpo eval`\n" if has_right(kind) else "",
        lesson=lesson_code(wanted, kind),
    )


def agent_text(name: str) -> str:
    """The source of a recipe with an environment, which the user replaces by another one."""
    return Template((TEMPLATES / "agent.txt").read_text("utf-8")).substitute(name=name)


def has_right(kind: Kind) -> bool:
    """Whether an answer of this kind is either right or wrong."""
    return "CORRECT" in kind.rewards


def shown(source: str) -> str:
    """A source as the docstring names it: its last part, or "a file" if that has odd characters."""
    name = source if source.count("/") == 1 else Path(source).name
    return name if name.replace("/", "").isprintable() and not set(name) & set('"\\$') else "a file"


def literal(text: str) -> str:
    """A text as Python source, in double quotes unless that needs escapes."""
    return f'"{text}"' if text.isprintable() and not set(text) & set('"\\') else repr(text)


def columns_code(wanted: Wanted) -> str:
    """The constants that name the columns, with the reason for each."""
    found = wanted.columns
    lines = [column_line("PROMPT_COLUMN", found.prompt, found.why_prompt)]
    if found.answer is not None:
        lines.append(column_line("ANSWER_COLUMN", found.answer, found.why_answer))
    if found.more:
        lines.append(f"MORE_COLUMNS = ({', '.join(map(literal, found.more))},)  # go into the prompt, guessed from "
                     f"{'its name' if len(found.more) == 1 else 'their names'}")
        if marked(wanted):
            lines.append(f"MARKS = {literal(wanted.marks)}  # before each of several choices")
    others = [name for name in wanted.others if name.isprintable()]
    about = f"# The other columns: {listed(others)}\n" if others else ""
    return about + "\n".join(lines)


def asked_code(wanted: Wanted) -> str:
    """The expression for the user's message."""
    prompt = "value_at(row, PROMPT_COLUMN)" if "." in wanted.columns.prompt else "row[PROMPT_COLUMN]"
    if not wanted.columns.more:
        return prompt
    return (f"question_text({prompt}, *(row[name] for name in MORE_COLUMNS)"
            + (", marks=MARKS)" if marked(wanted) else ")"))


def marked(wanted: Wanted) -> bool:
    """Whether there are choices that the answers name by a mark."""
    return bool(wanted.marks) and any(name.strip().lower() in CHOICES for name in wanted.columns.more)


def column_line(constant: str, name: str, why: str) -> str:
    """A line with a constant; if the user has to fill it in, it says so."""
    return f"{constant} = {literal(name)}  # {why}" if name else f'{constant} = ""  # FILL IN the name of a column'


def system_code(wanted: Wanted, kind: Kind) -> str:
    """The line of the system prompt; empty for the example."""
    if wanted.example:
        return 'SYSTEM_PROMPT = ""  # none: the embedded tiny model was trained without one\n'
    return f"SYSTEM_PROMPT = {literal(kind.system)}\n"


def absolute(wanted: Wanted) -> bool:
    """Whether a file is named by its whole path, because it is not in the recipe's folder."""
    return relative(wanted) is None


def relative(wanted: Wanted) -> str | None:
    """A file's path from the recipe's folder; None if it is not in that folder."""
    path = os.path.relpath(Path(wanted.source).resolve(), wanted.folder.resolve())
    return None if path.startswith("..") or Path(path).is_absolute() else Path(path).as_posix()


def data_arguments(wanted: Wanted) -> list[str]:
    """The arguments of OwnData."""
    if not wanted.is_file:
        place = literal(wanted.source)
    elif (path := relative(wanted)) is not None:
        place = f"Path(__file__).parent / {literal(path)}"
    else:
        place = literal(str(Path(wanted.source).resolve()))
    split = [f"split={literal(wanted.split)}"] if not wanted.is_file else []
    needed = ["reads=()"] if wanted.columns.answer is None else []
    return [place, "make_row", *split, "held_out=0.125", *needed]


def rewards_code(wanted: Wanted, kind: Kind) -> str:
    """The verifier, an example of the user's own function, and the list of rewards."""
    right, comment = math_verifier() if wanted.kind == "math" else (kind.right, kind.comment)
    if not wanted.sure:
        comment += "\n# The answers could not be looked at. If they are not short texts, write this file again "
        comment += "with --answers KIND."
    comment = comment if comment.startswith("#") else f"# {comment}"
    if right:
        ready = f"{comment}\nCORRECT = {right}.reward(right=1.0, wrong=0.0)\n\n"
        return f"{ready}{kind.own}\n\nREWARDS = {kind.rewards}"
    chosen = "CORRECT = same_json\n" if has_right(kind) else ""
    return f"{comment}\n\n{kind.own}\n\n{chosen}REWARDS = {kind.rewards}"


def lesson_code(wanted: Wanted, kind: Kind) -> str:
    """The lines in `run` that make the lesson."""
    lines = [] if wanted.example else ['    note = KNOWS_ARITHMETIC_ALONE if setup.is_tiny else ""']
    note = "" if wanted.example else ", note=note"
    tested = ", DATA.test(options.eval_problems), CORRECT" if has_right(kind) else ""
    return "\n".join([*lines, f'    lesson = Lesson("{wanted.name}", DATA.train(), REWARDS{tested}{note})'])
