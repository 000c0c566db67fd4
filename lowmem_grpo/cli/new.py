"""`lowmem-grpo new`: writes a commented recipe for the user's data, without asking questions."""

import errno
import json
import keyword
import os
import pkgutil
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from lowmem_grpo import recipes
from lowmem_grpo.data.files import ONE_ROW, first_rows, has_one_row, is_file_name, refuse_unreadable
from lowmem_grpo.recipes.tasks.arithmetic import problems
from lowmem_grpo.runs.files import free_bytes
from lowmem_grpo.runs.views.terminal import UserPath, echo, plain_errors

if TYPE_CHECKING:
    from lowmem_grpo.recipes.new_recipe import NewRecipe

LOOKED = 1000  # the most rows that are inspected
LONGEST = 100  # characters of a recipe's name
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
UNWRITABLE = "nothing can be written to {}: {}; choose another folder with --out FOLDER"
EXAMPLES = 256  # example rows that are written without --data
KINDS = ("number", "marked", "choice", "text", "math", "code", "json", "long")  # from new_recipe.KINDS (slow import)
ABOUT_DATA = ("data", "prompt_column", "answer_column", "answers")


@click.command(short_help="Write a recipe for your own data.")
@click.argument("name")
@click.option("--data", metavar="FILE", type=os.path.expanduser, help="A jsonl, json, csv or parquet file, or "
              "a hub dataset: OWNER/NAME or OWNER/NAME:CONFIG. Without --data, example rows are written too.")
@click.option("--prompt-column", metavar="COLUMN", help="Column with the questions.  [default: guessed]")
@click.option("--answer-column", metavar="COLUMN", help="Column with the right answers.  [default: guessed]")
@click.option("--answers", type=click.Choice(KINDS), help="Kind of answers.  [default: guessed from the data]")
@click.option("--agent", is_flag=True, help="A recipe with an environment: the model acts in several turns.")
@click.option("--split", default="train", show_default=True, help="Split of a hub dataset.")
@click.option("--out", type=UserPath(), default=Path(),
              help="Folder for the recipe.  [default: the current one]")
@click.option("--overwrite", is_flag=True, help="Replace an existing NAME.py. Data is never replaced.")
def new(name: str, agent: bool, out: Path, overwrite: bool, **chosen: Any) -> None:
    """Write NAME.py, a short commented recipe for your own data, ready for `lowmem-grpo run ./NAME.py`.

    It reads the columns and the first rows of --data, and says which columns it takes as questions and answers. With
    --agent, the recipe has an environment in place of data, which you change into your own."""
    with plain_errors():
        check_name(name, out)
        recipe = out / f"{name}.py"
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out {out} is no folder")
        if free_bytes(out) == 0:
            raise ValueError(UNWRITABLE.format(out, os.strerror(errno.ENOSPC)))
        if recipe.exists() and (not overwrite or not recipe.is_file()):
            raise ValueError(f"{recipe} is there already; choose another name, or replace it with --overwrite")
        write = write_agent if agent else write_example if chosen["data"] is None else write_for_data
        echo("\n".join(write(name, out, **chosen)))


def check_name(name: str, out: Path) -> None:
    """Raise ValueError for a name that is not valid for a Python module, or would hide another module."""
    plain = re.sub(r"\W", "_", Path(name).name.removesuffix(".py"))
    if not name.isidentifier() or len(name) > LONGEST:
        fix = f"; write {plain}" if plain.isidentifier() and len(plain) <= LONGEST else ""
        place = ", and its folder as --out FOLDER" if Path(name).name != name else ""
        raise ValueError(f"{name[:LONGEST]!r} cannot be a recipe's name, which has letters, digits and _, and no digit "
                         f"first{fix}{place}")
    for is_taken, why in (
        (keyword.iskeyword(name), f"{name!r} is a word of Python itself"),
        (name in {module.name for module in pkgutil.iter_modules(recipes.__path__)},
         f"{name!r} is a recipe of the package, or a part of one"),
        (name in sys.stdlib_module_names or is_installed(name, out),
         f"{name}.py would hide the Python module {name!r} from your recipe"),
    ):
        if is_taken:
            raise ValueError(f"{why}; choose another name, for example my_{name}")


def is_installed(name: str, out: Path) -> bool:
    """Return whether a module of that name can be imported from outside the recipe's folder."""
    spec = None if keyword.iskeyword(name) else find_spec(name)
    places = [spec.origin] if spec and spec.origin else list(spec.submodule_search_locations or []) if spec else []
    return any(not Path(place).resolve().is_relative_to(out.resolve()) for place in places)


def write_agent(name: str, out: Path, **chosen: Any) -> list[str]:
    """Write a recipe with an environment; return the lines to print. ValueError for data options."""
    if option := next((option for option in ABOUT_DATA if chosen[option] is not None), ""):
        raise ValueError(f"--agent writes an environment that makes its own tasks, so --{option.replace('_', '-')} has "
                         "nothing to say; leave it out. Rows can be tasks, too: give them as Lesson(train=...) in the "
                         "file, and their columns arrive in reset")
    from lowmem_grpo.recipes.new_recipe import fill_template

    recipe, text = out / f"{name}.py", fill_template("agent.txt", name=name)
    save(recipe, text)
    return [f"{recipe}: a recipe of {len(text.splitlines())} lines with an environment, made to be read and changed",
            "", f"  lowmem-grpo generate --recipe {command_name(recipe)}   # watch an episode",
            f"  lowmem-grpo run {command_name(recipe)}                 # train, minutes on a CPU"]


def write_example(name: str, out: Path, **chosen: Any) -> list[str]:
    """Write a recipe and rows that the tiny model can learn; return the lines to print. ValueError for data options."""
    if option := next((option for option in ABOUT_DATA if chosen[option] is not None), ""):
        raise ValueError(f"--{option.replace('_', '-')} is about --data FILE, which is not given")
    from lowmem_grpo.data.layouts import Columns
    from lowmem_grpo.recipes.new_recipe import NewRecipe

    pairs = zip(problems("train", seed=0), range(EXAMPLES), strict=False)
    rows = "".join(json.dumps({"question": problem.question, "answer": problem.answer}) + "\n" for problem, _ in pairs)
    path = out / f"{name}.jsonl"
    if path.exists() and (not path.is_file() or path.read_bytes() != rows.encode()):
        raise ValueError(f"{path} is there already, and is not replaced; a recipe for it: lowmem-grpo new {name} "
                         f"--data {quote(str(path))}")
    columns = Columns("question", "answer", "what the model is asked", "what is right")
    told = [f"{path}: {EXAMPLES} example rows. For your own: lowmem-grpo new NAME --data FILE"]
    return write_recipe(NewRecipe(name, out, str(path), columns, "example"), told, rows)


def write_for_data(name: str, out: Path, data: str, split: str, **chosen: Any) -> list[str]:
    """Write a recipe for the user's data; return the lines to print. OSError or ValueError for unusable data."""
    is_file = is_file_name(data)
    if is_file:
        refuse_unreadable(Path(data))
        if has_one_row(Path(data)):
            raise ValueError(ONE_ROW.format(data))
    elif not HUB_NAME.fullmatch(data):
        raise ValueError(f"there is no file {data!r}; --data takes a jsonl, json, csv or parquet file, or a dataset of "
                         "the hub (OWNER/NAME)")

    rows: list[dict[str, Any]] = []
    told = []
    if not is_file:
        echo(f"looking at {data} on the hub ...", err=True)
    try:
        rows = first_rows(data, split, LOOKED)
    except OSError as error:
        if is_file:
            raise
        told = [f"{data} could not be looked at: {error}"]
    from lowmem_grpo.recipes.new_recipe import recipe_for  # imports torch, so only after the checks of the file

    named = chosen["prompt_column"], chosen["answer_column"], chosen["answers"]
    recipe = recipe_for(name, out, data, rows, *named, split)
    return write_recipe(recipe, told + guesses(recipe))


def guesses(recipe: "NewRecipe") -> list[str]:
    """Return lines to print: the guessed columns and kind of answers, and the options that change them."""
    from lowmem_grpo.recipes.new_recipe import KINDS as ABOUT

    columns, others, lines = recipe.columns, ", ".join(recipe.others[:12]), []
    for option, column, why in (("prompt", columns.prompt, columns.why_prompt),
                                ("answer", columns.answer, columns.why_answer)):
        if column:
            lines.append(f"{option}s: column {column!r} ({why}); another: --{option}-column NAME")
        elif column is None:
            lines.append(f"{option}s: {why}")
        else:
            has = f"; it has {others}" if others else ""
            lines.append(f"{option}s: it cannot be told which column holds them{has}. Name it: --{option}-column NAME")
    if columns.more:
        lines.append(f"asked with the prompts: {', '.join(columns.more)}; change that in make_row")
    if others and columns.known:
        lines.append(f"not used: {others}" + (" ..." if recipe.others[12:] else ""))
    if recipe.kind == "example":
        lines.append("these are problems of the kind that the embedded tiny model knows: on a CPU the recipe trains it")
    if columns.answer is not None:
        taken = "" if recipe.is_sure else "taken for "
        lines.append(f"answers are {taken}{ABOUT[recipe.kind][0]}; others: --answers {'|'.join(KINDS)}")
    return lines


def write_recipe(recipe: "NewRecipe", told: list[str], rows: str = "") -> list[str]:
    """Write a recipe and its example `rows`; return the lines to print: its path, the lines `told`, and commands."""
    path, text = recipe.folder / f"{recipe.name}.py", recipe.text()
    save(path, text, rows)
    start, how_long = command_name(path), ", a minute on a CPU" if recipe.kind == "example" else ""
    fill = [] if recipe.columns.known else [f"FILL IN the names of columns in {path}; then:"]
    return [f"{path}: a recipe of {len(text.splitlines())} lines, made to be read and changed", *told, *fill, "",
            f"  lowmem-grpo run {start} check=true    # what the rewards pay for 64 completions",
            f"  lowmem-grpo run {start}               # train{how_long}"]


def save(recipe: Path, text: str, rows: str = "") -> None:
    """Write the example rows and the recipe. ValueError if the folder cannot be written to."""
    try:
        recipe.parent.mkdir(parents=True, exist_ok=True)
        if rows:
            recipe.with_suffix(".jsonl").write_text(rows, "utf-8")
        recipe.write_text(text, "utf-8")
    except OSError as error:
        raise ValueError(UNWRITABLE.format(recipe.parent, error.strerror or error)) from error


def command_name(recipe: Path) -> str:
    return quote(str(recipe) if recipe.is_absolute() else f"./{recipe.as_posix()}")
