"""Run public notebooks one by one, changed in a few counted places, and make a table of the outcomes.

`bench/notebooks.py` says what it changes. Everything else stays as its author wrote it.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from bench.common.rows import newest

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
            said = f"{type(error).__name__}: {error}".strip().splitlines()[0][:400]
            return {"error": said, "failed_cell": place}
    return {}


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
