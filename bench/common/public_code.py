"""Run public programs and notebooks one by one, changed in a few counted places, and make a table of the outcomes.

`bench/notebooks.py` and `bench/agents.py` say what they change. Everything else stays as its author wrote it.
"""

import ast
import json
import re
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import packaging.version
from IPython.core.interactiveshell import InteractiveShell
from rich.console import Console

from bench.common import child, options, tables
from bench.common.rows import leave, machine, newest, run_now

CONTEXT = 32768  # tokens; programs and notebooks ask for more than an embedded model's own 2,048
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SHELL = re.compile(r"^(\s*)[!%].*?(?:(?<!\\)\n|\Z)", re.MULTILINE | re.DOTALL)  # to the end of a continued line
KEPT_MAGIC = ("%%capture", "%%time")  # a cell with another %% is not Python
Row = dict[str, Any]


class Changes(ast.NodeTransformer):
    """A transformer of code that counts its changes by kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def statements(self, kind: str, text: str) -> list[ast.stmt]:
        """Return the statements that replace one, and count the change."""
        self.counts[kind] += 1
        return ast.parse(text).body

    def expression(self, kind: str, text: str) -> ast.expr:
        """Return the expression that replaces one, and count the change."""
        self.counts[kind] += 1
        return ast.parse(text, mode="eval").body

    def rewrite(self, text: str) -> str:
        """Return a module or cell as it will run: changed, and without shell lines and magics. Text that is not Python
        stays, and fails when it is run."""
        first = text.lstrip().partition("\n")[0]
        if first.startswith("%%") and not first.startswith(KEPT_MAGIC):
            self.counts["imports"] += 1
            return ""
        text, dropped = SHELL.subn(lambda line: f"{line[1]}pass\n", text)
        self.counts += Counter({"imports": dropped})
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return text
        before = self.counts.total()
        changed = ast.fix_missing_locations(self.visit(tree))
        return ast.unparse(changed) if self.counts.total() > before else text


def long_copy(model: str, folder: Path) -> str:
    """Return the path of a copy of an embedded model that takes CONTEXT tokens, also with transformers."""
    shutil.copytree(str(files("lowmem_grpo") / "assets" / model), folder)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def Version(name: str) -> Any:  # noqa: N802 - unsloth_zoo's name
    """Return the version of a package or, as unsloth_zoo's function of this name does, that a text names."""
    try:
        return packaging.version.Version(version(name))
    except PackageNotFoundError:
        return packaging.version.Version(name)


def called(node: ast.Call) -> str:
    """Return the last part of the called name, "" if there is none."""
    match node.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def run_cells(texts: Iterable[str], after: Callable[[dict[str, Any]], None] = lambda names: None) -> Row:
    """Run cells until one fails; return its error, else {}. `after` gets the notebook's names after each cell."""
    shell = InteractiveShell.instance()
    for place, text in enumerate(texts):
        outcome = shell.run_cell(text)
        after(shell.user_ns)
        if error := outcome.error_before_exec or outcome.error_in_exec:
            return failed(error) | {"failed_cell": place}
    return {}


def failed(error: BaseException) -> Row:
    """Return an error's words, and the module that raised it."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400], "raised_in": (frames or [""])[-1]}


def run_each(key: str, function: str, programs: dict[str, dict[str, Any]], seconds: float, output: Path, as_json: bool,
             shown: Callable[[Row], list[str]], **empty: Any) -> None:
    """Run each program, `function` with what is given and a temporary `folder`, in a separate process; record a row of
    each with its name as `key`. A program that fails without a result gets the fields of `empty`."""
    rows: list[Row] = []
    console, about = Console(width=150), {"run": run_now(), **machine()}
    for name, given in programs.items():
        with tempfile.TemporaryDirectory(prefix=f"{key}-", ignore_cleanup_errors=True) as folder:
            found = child.call(function, given | {"folder": folder}, seconds=seconds)
        rows.append({key: name} | (empty | {"error": found["missing"]} if found.get("failed") else found))
        leave(rows[-1] | about, output, as_json)
        if not as_json:
            console.print(tables.line(shown(rows[-1])), markup=False, highlight=False, soft_wrap=True)
    if not as_json:
        console.print(f"{sum(map(ran, rows))} of {len(rows)} {key}s ran to their end")


def options_for(name: str, what: str, seconds: float) -> Callable[[Any], Any]:
    """Return a decorator that adds the options of such a bench, whose rows go to NAME.jsonl."""
    shared = (click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path)),
              click.option("--only", default="", help=f"Only {what} whose path contains this."),
              click.option("--seconds", default=seconds, show_default=True, help="The most that one may take."),
              options.output(name), options.AS_JSON)
    return lambda command: reduce(lambda inner, option: option(inner), reversed(shared), command)


def section(rows: list[Row], key: str, title: str, note: str, columns: Sequence[str],
            shown: Callable[[Row], list[str]]) -> list[str]:
    """Return a section of RESULTS.md with the newest row of each program, by name."""
    last = latest(rows, key)
    return ["", f"## Public {title} replaced", "", f"{sum(map(ran, last))} of {len(last)} ran to their end. {note}", "",
            *tables.markdown(columns, map(shown, last))]


def latest(rows: list[Row], key: str) -> list[Row]:
    """Return the newest row of each program, by name."""
    return sorted(newest(rows, key).values(), key=lambda row: str(row[key]))


def ran(row: Row) -> bool:
    """Return whether the program ran to its end and trained at least one step."""
    steps = row["steps"]
    return "error" not in row and (sum(steps) if isinstance(steps, list) else steps) > 0


def cells(row: Row, key: str, *own: str) -> list[str]:
    """Return a program's cells: its name, the `own` ones, the changes, the time and the verdict."""
    where = f"cell {row['failed_cell']}: " if "failed_cell" in row else ""
    verdict = "runs" if ran(row) else where + row.get("error", "it trains nothing").replace("|", "/")[:160]
    changed = ", ".join(f"{count} {kind}" for kind, count in sorted(row.get("changes", {}).items()))
    return [row[key], *own, changed, f"{row['seconds']:.0f} s" if "seconds" in row else "", verdict]
