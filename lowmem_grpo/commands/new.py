"""`lowmem-grpo new`: write a commented recipe for your own data, without asking questions."""

import json
import keyword
import pkgutil
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from lowmem_grpo import recipes
from lowmem_grpo.data.kinds import is_file_name, refuse_missing
from lowmem_grpo.recipes.problems.arithmetic import problems
from lowmem_grpo.views.terminal import plain_errors

LOOKED = 1000  # rows that are looked at
LONGEST = 100  # characters of a name
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
EXAMPLES = 256  # rows that are written where there is no data yet
KINDS = ("number", "marked", "choice", "text", "math", "code", "json", "long")  # kinds.CHOICES, without imports


@click.command(short_help="Write a recipe for your own data.")
@click.argument("name")
@click.option("--data", metavar="FILE", help="A jsonl, json, csv or parquet file, or a hub dataset: OWNER/NAME or "
              "OWNER/NAME:CONFIG. Without --data, example rows are written too.")
@click.option("--prompt-column", metavar="COLUMN", help="Column with the questions.  [default: guessed]")
@click.option("--answer-column", metavar="COLUMN", help="Column with the right answers.  [default: guessed]")
@click.option("--answers", type=click.Choice(KINDS), help="Kind of answers.  [default: guessed from the data]")
@click.option("--agent", is_flag=True, help="A recipe with an environment: the model acts in several turns.")
@click.option("--split", default="train", show_default=True, help="Split of a hub dataset.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(),
              help="Folder for the recipe.  [default: the current one]")
@click.option("--overwrite", is_flag=True, help="Replace an existing NAME.py. Data is never replaced.")
def new(name: str, data: str | None, agent: bool, out: Path, overwrite: bool, **chosen: Any) -> None:
    """Write NAME.py, a short commented recipe for your own data, ready for `lowmem-grpo run ./NAME.py`.

    It looks at the columns and the first rows of --data, and says what it takes for questions and answers. With --agent
    there is an environment in the place of data, which you change into your own.
    """
    with plain_errors():
        check_name(name, out)
        recipe = out / f"{name}.py"
        check_place(recipe, overwrite)
        lines = write_agent(name, recipe, data, chosen) if agent else write_recipe(name, recipe, data, chosen)
    for line in lines:
        click.echo(line)


def write_recipe(name: str, recipe: Path, data: str | None, chosen: dict[str, Any]) -> list[str]:
    """Write a recipe for data; returns what to tell."""
    if data is None:
        wanted, rows = example(name, recipe.parent, chosen)
    else:
        wanted, rows = from_data(name, data, recipe.parent, chosen), ""
    from lowmem_grpo.recipes.new.writing import recipe_text

    written = recipe_text(wanted)
    save(recipe, written, recipe.with_suffix(".jsonl"), rows)
    return told(wanted, recipe, written, bool(rows))


def write_agent(name: str, recipe: Path, data: str | None, chosen: dict[str, Any]) -> list[str]:
    """Write a recipe with an environment; returns what to tell. ValueError for options that are about data."""
    if given := next((option for option in ("prompt_column", "answer_column", "answers") if chosen[option]),
                     "data" if data else None):
        raise ValueError(f"--agent writes an environment that makes its own tasks, so --{given.replace('_', '-')} has "
                         "nothing to say; leave it out. Rows can be tasks, too: give them as Lesson(train=...) in the "
                         "file, and their columns arrive in reset")
    from lowmem_grpo.recipes.new.writing import agent_text

    written = agent_text(name)
    save(recipe, written, recipe, "")
    start = started(recipe)
    return [f"{recipe}: a recipe of {len(written.splitlines())} lines with an environment, made to be read and changed",
            "", f"  lowmem-grpo generate --recipe {start}   # watch an episode",
            f"  lowmem-grpo run {start}                 # train, minutes on a CPU"]


def check_name(name: str, out: Path) -> None:
    """ValueError for what cannot be the name of a Python module, or would hide another one."""
    plain = re.sub(r"\W", "_", Path(name).name.removesuffix(".py"))
    if not name.isidentifier() or len(name) > LONGEST:
        fix = f"; write {plain}" if plain.isidentifier() and len(plain) <= LONGEST else ""
        place = ", and its folder as --out FOLDER" if Path(name).name != name else ""
        raise ValueError(f"{name[:LONGEST]!r} cannot be a recipe's name, which has letters, digits and _, and no digit "
                         f"first{fix}{place}")
    if keyword.iskeyword(name):
        raise ValueError(f"{name!r} is a word of Python itself; choose another name, for example my_{name}")
    if name in [module.name for module in pkgutil.iter_modules(recipes.__path__)]:
        raise ValueError(f"{name!r} is a recipe of the package, or a part of one; choose another name, for example "
                         f"my_{name}")
    if name in sys.stdlib_module_names or is_installed(name, out):
        raise ValueError(f"{name}.py would hide the Python module {name!r} from your recipe; choose another name, for "
                         f"example my_{name}")


def is_installed(name: str, out: Path) -> bool:
    """Whether an import finds another module of that name than one in the recipe's folder."""
    found = find_spec(name)
    places = [found.origin] if found and found.origin else list(found.submodule_search_locations or []) if found else []
    return any(not Path(place).resolve().is_relative_to(out.resolve()) for place in places)


def check_place(recipe: Path, overwrite: bool) -> None:
    """ValueError where the recipe cannot be written."""
    if recipe.parent.exists() and not recipe.parent.is_dir():
        raise ValueError(f"--out {recipe.parent} is no folder")
    if recipe.exists() and (not overwrite or not recipe.is_file()):
        raise ValueError(f"{recipe} is there already; choose another name, or replace it with --overwrite")


def example(name: str, out: Path, chosen: dict[str, Any]) -> tuple[Any, str]:
    """A recipe for example rows that the embedded model can learn, and the rows. ValueError for data of the user's in
    their place."""
    if given := next((option for option in ("prompt_column", "answer_column", "answers") if chosen[option]), None):
        raise ValueError(f"--{given.replace('_', '-')} is about --data FILE, which is not given")
    from lowmem_grpo.data.layouts import Columns
    from lowmem_grpo.recipes.new.kinds import EXAMPLE
    from lowmem_grpo.recipes.new.writing import Wanted

    source = problems("train", seed=0)
    rows = "".join(json.dumps({"question": problem.question, "answer": problem.answer}) + "\n"
                   for problem, _ in zip(source, range(EXAMPLES), strict=False))
    path = out / f"{name}.jsonl"
    if path.exists() and (not path.is_file() or path.read_bytes() != rows.encode()):
        raise ValueError(f"{path} is there already, and is not replaced; a recipe for it: lowmem-grpo new {name} "
                         f"--data {path}")
    columns = Columns("question", "answer", "what the model is asked", "what is right")
    return Wanted(name, out, str(path), True, columns, [], EXAMPLE), rows


def from_data(name: str, data: str, out: Path, chosen: dict[str, Any]) -> Any:
    """A recipe for the user's data. OSError and ValueError say what is wrong with it."""
    is_file = is_file_name(data)
    if not is_file and not HUB_NAME.fullmatch(data):
        raise ValueError(f"there is no file {data!r}; --data takes a jsonl, json, csv or parquet file, or a dataset of "
                         "the hub (OWNER/NAME)")
    if is_file:
        refuse_missing(Path(data))
    from lowmem_grpo.data.layouts import Columns, answer_of, find_columns, value_at
    from lowmem_grpo.recipes.new.kinds import EXAMPLE, kind_of, marks_of, of_the_tiny_model
    from lowmem_grpo.recipes.new.writing import Wanted

    rows, unseen = look(data, chosen["split"], is_file)
    prompt, answer = chosen["prompt_column"], chosen["answer_column"]
    if not rows:
        columns = Columns(prompt or "", answer or "", "named", "named")
        return Wanted(name, out, data, is_file, columns, [], chosen["answers"] or "text", bool(chosen["answers"]),
                      split=chosen["split"], unseen=unseen)
    if len(rows) == 1:
        raise ValueError(f"{data} has one row, and a recipe needs two or more, to train on and to test with; add rows")
    columns = find_columns(rows, prompt, answer, data)
    if columns.answer:
        found = [said for row in rows if (said := answer_of(row, columns.answer))]
        answers = [text for said in found for text in (said if isinstance(said, list) else [said])]
        kind = chosen["answers"] or ("code" if columns.tests else kind_of(answers))
        marks = marks_of(kind, answers)
        if of_the_tiny_model(kind, [str(value_at(row, columns.prompt)) for row in rows]):
            kind = EXAMPLE
    else:
        marks = ""
        kind = chosen["answers"] or ("none" if columns.answer is None else "text")
    used = {columns.prompt, (columns.answer or "").partition(".")[0], columns.system, *columns.more, *columns.tests}
    others = [column for column in rows[0] if column not in used]
    return Wanted(name, out, data, is_file, columns, others, kind, bool(columns.answer != "" or chosen["answers"]),
                  marks, split=chosen["split"])


def look(data: str, split: str, is_file: bool) -> tuple[list[dict[str, Any]], str]:
    """The first rows; none of a dataset of the hub that cannot be reached, and why."""
    from lowmem_grpo.data.files import first_rows

    if is_file:
        return first_rows(data, split, LOOKED), ""
    click.echo(f"looking at {data} on the hub ...", err=True)
    try:
        return first_rows(data, split, LOOKED), ""
    except OSError as error:
        return [], str(error)


def save(recipe: Path, written: str, data: Path, rows: str) -> None:
    """Write the recipe, and the example rows before it. ValueError where the folder does not take them."""
    try:
        recipe.parent.mkdir(parents=True, exist_ok=True)
        if rows:
            data.write_text(rows, "utf-8")
        recipe.write_text(written, "utf-8")
    except OSError as error:
        raise ValueError(f"nothing can be written to {recipe.parent}: {error.strerror or error}; choose another folder "
                         "with --out FOLDER") from error


def told(wanted: Any, recipe: Path, written: str, with_rows: bool) -> list[str]:
    """What was written, what was guessed and how to change it, what to do next."""
    from lowmem_grpo.recipes.new.kinds import KINDS as ABOUT

    columns = wanted.columns
    lines = [f"{recipe}: a recipe of {len(written.splitlines())} lines, made to be read and changed"]
    if with_rows:
        lines.append(f"{recipe.with_suffix('.jsonl')}: {EXAMPLES} example rows. For your own: lowmem-grpo new NAME "
                     "--data FILE")
    else:
        lines += looked(columns, wanted, ABOUT[wanted.kind].about)
    start = started(recipe)
    if not columns.known:
        lines.append(f"FILL IN the names of columns in {recipe}; then:")
    lines += ["", f"  lowmem-grpo run {start} check=true    # what the rewards pay, in seconds",
              f"  lowmem-grpo run {start}               # train" + (", a minute on a CPU" if wanted.example else "")]
    return lines


def started(recipe: Path) -> str:
    """How a command names the recipe."""
    return str(recipe) if recipe.is_absolute() else f"./{recipe.as_posix()}"


def looked(columns: Any, wanted: Any, about: str) -> list[str]:
    """What was taken for what."""
    lines = []
    if wanted.unseen:
        lines.append(f"{wanted.source} could not be looked at: {wanted.unseen}")
    for option, what, column, why in (("prompt", "prompts", columns.prompt, columns.why_prompt),
                                      ("answer", "answers", columns.answer, columns.why_answer)):
        if column:
            lines.append(f"{what}: column {column!r} ({why}); another: --{option}-column NAME")
        elif column is None:
            lines.append(f"{what}: {why}")
        else:
            there = f"; it has {', '.join(wanted.others[:12])}" if wanted.others else ""
            lines.append(f"{what}: it cannot be told which column holds them{there}. Name it: --{option}-column NAME")
    if columns.more:
        lines.append(f"asked with the prompts: {', '.join(columns.more)}; change that in make_row")
    if wanted.others and columns.known:
        lines.append(f"not used: {', '.join(wanted.others[:12])}" + (" ..." if wanted.others[12:] else ""))
    if wanted.example:
        lines.append("these are problems of the kind that the embedded tiny model knows: on a CPU the recipe trains it")
    if columns.answer is not None:
        lines.append(f"answers are {'' if wanted.sure else 'taken for '}{about}; others: --answers {'|'.join(KINDS)}")
    return lines
