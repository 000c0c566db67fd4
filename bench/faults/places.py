"""Small faults in the package's code: each changes one place in one line.

    sign         + to -, - to +                         constant    0 to 1, any other number to twice of it
    comparison   < to <=, > to >=, == to !=, and back   index       the next number, or `+ 1` at a bound of a slice
    and          `and` to `or`                          dropped     an assignment or a call replaced by `pass`
    not          `not` removed                          smallest    min to max, and the like, and back

Strings, annotations, imports, decorators, what is logged or raised and Triton's kernels stay as they are. Of names,
only arguments and those that are bound twice lose an assignment: everything would fail without the only one.
"""

import ast
import random
import re
from collections import Counter
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

PACKAGE = "lowmem_grpo"
FOLDERS = {  # what in them gets faults
    "losses": "*.py", "models": "pack*.py sequences.py attention.py head_groups.py", "kernels": "*.py",
    "memory": "*.py", "rollout": "*.py", "train": "*.py", "rewards": "**/*.py", "runs": "*.py"}
KINDS = ("sign", "comparison", "and", "not", "constant", "index", "dropped", "smallest")
OPERATORS: dict[type, tuple[str, str, str]] = {
    ast.Add: ("sign", "+", "-"), ast.Sub: ("sign", "-", "+"), ast.And: ("and", "and", "or"),
    ast.Lt: ("comparison", "<", "<="), ast.LtE: ("comparison", "<=", "<"), ast.Gt: ("comparison", ">", ">="),
    ast.GtE: ("comparison", ">=", ">"), ast.Eq: ("comparison", "==", "!="), ast.NotEq: ("comparison", "!=", "=="),
    ast.IsNot: ("not", "is not", "is"), ast.NotIn: ("not", "not in", "in")}
PAIRS = (("min", "max"), ("amin", "amax"), ("minimum", "maximum"), ("clamp_min", "clamp_max"))
SWAPS = dict(PAIRS) | {second: first for first, second in PAIRS}
LEFT_OUT = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
FIELDS_LEFT_OUT = ("annotation", "returns", "decorator_list", "bases")
LOGS = ("log", "logger", "logging", "warnings")
ON_A_CARD = re.compile(r"\b(tl|triton|Launch|Variant|capability)\b|_(triton|kernel|launch)\b")  # in what runs there


@dataclass(frozen=True)
class Fault:
    """A changed line."""

    path: str
    line: int
    column: int
    kind: str
    inside: str  # the function or class it is in; empty at the top
    before: str  # the whole line, as `after`
    after: str

    @property
    def name(self) -> str:
        """The place and the kind."""
        return f"{self.path}:{self.line}:{self.column}:{self.kind}"

    @property
    def lasting(self) -> tuple[str, str, str]:
        """What it is known by while lines above it come and go."""
        return self.path, self.before, self.after

    def put_into(self, text: str) -> str:
        """The text of the file with the fault."""
        lines = text.split("\n")
        lines[self.line - 1] = self.after
        return "\n".join(lines)


class Finder:
    """Finds all faults of a file."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.lines, self.found = path, text.split("\n"), list[Fault]()
        self.inside, self.kept = "", set[str]()
        self.look(ast.parse(text))

    def look(self, node: ast.AST, index: bool = False) -> None:
        """Find the faults of a node and of all below it; `index`: it lies in an index."""
        if self.stays(node):
            return
        was = self.inside, self.kept
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.inside, self.kept = node.name, kept(node)
        if self.inside or "/kernels/" not in self.path:  # sizes of tiles stand outside of functions
            self.change(node, index)
            self.drop(node)
        for field, value in ast.iter_fields(node):
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, ast.AST) and field not in FIELDS_LEFT_OUT:
                    self.look(one, index or (isinstance(node, ast.Subscript) and field == "slice"))
        self.inside, self.kept = was

    def stays(self, node: ast.AST) -> bool:
        """Whether nothing in a node is changed."""
        match node:
            case ast.If():
                return ast.unparse(node.test) == "TYPE_CHECKING"
            case ast.Call() | ast.Expr(ast.Call()):
                return ast.unparse(node).split(".")[0] in LOGS
            case ast.FunctionDef():
                return "/kernels/" in self.path and bool(ON_A_CARD.search(ast.unparse(node)))
        return isinstance(node, LEFT_OUT)

    def change(self, node: ast.AST, index: bool) -> None:
        """Find the faults in a node's own operators, numbers and names."""
        match node:
            case ast.BinOp(first, op, second) | ast.AugAssign(first, op, second):
                if not any(isinstance(side, ast.List | ast.JoinedStr) or is_text(side) for side in (first, second)):
                    self.between(first, op, second)
            case ast.Compare(first, operators, others):
                for left, op, right in zip([first, *others], operators, others, strict=False):
                    self.between(left, op, right)
            case ast.BoolOp(op, [first, second, *_]):
                self.between(first, op, second)
            case ast.UnaryOp(ast.USub()):
                self.add("sign", node.lineno, node.col_offset, "-", "+")
            case ast.UnaryOp(ast.Not()):
                self.add("not", node.lineno, node.col_offset, "not ", "")
            case ast.Constant(int() | float() as value) if not isinstance(value, bool):
                kind, new = ("index", value + 1) if index else ("constant", value * 2 or value + 1)
                self.add(kind, node.lineno, node.col_offset, self.written(node), repr(new))
            case ast.Slice(lower, upper):
                for bound in (lower, upper):
                    if isinstance(bound, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
                        self.add("index", bound.end_lineno, bound.end_col_offset, "", " + 1")
            case ast.Call(ast.Name(name) | ast.Attribute(_, name)) if name in SWAPS:
                end = node.func.end_col_offset or 0
                self.add("smallest", node.func.end_lineno, end - len(name), name, SWAPS[name])

    def drop(self, node: ast.AST) -> None:
        """Find the fault of leaving out a statement of one line in a function."""
        match node:
            case ast.Assign([target]) if {name.id for name in bound(target)} - self.kept:
                return
            case ast.Assign() | ast.AugAssign() | ast.Expr(ast.Call()) if self.inside:
                if node.lineno == node.end_lineno:
                    self.add("dropped", node.lineno, node.col_offset, self.written(node), "pass")

    def between(self, first: ast.expr, op: ast.AST, second: ast.expr) -> None:
        """Find the fault in the operator between two expressions."""
        line = self.lines[second.lineno - 1]
        if type(op) in OPERATORS and first.end_lineno == second.lineno and line.isascii():
            kind, old, new = OPERATORS[type(op)]
            self.add(kind, second.lineno, line.index(old, first.end_col_offset, second.col_offset), old, new)

    def written(self, node: ast.expr | ast.stmt) -> str:
        return self.lines[node.lineno - 1][node.col_offset : node.end_col_offset]

    def add(self, kind: str, line: int | None, column: int | None, old: str, new: str) -> None:
        """Keep the fault of putting `new` for `old`, unless columns, which ast counts in bytes, are no characters."""
        before = self.lines[(line or 0) - 1]
        if line is not None and column is not None and before.isascii():
            after = before[:column] + new + before[column + len(old) :]
            self.found.append(Fault(self.path, line, column, kind, self.inside, before, after))


def kept(node: ast.AST) -> set[str]:
    """The names in a function with a value where one assignment is left out: arguments, and what is bound twice."""
    names = Counter(name.id for name in bound(node))
    return {name for name in names if names[name] > 1} | {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}


def bound(node: ast.AST) -> list[ast.Name]:
    return [one for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def faults_in(path: str, text: str) -> list[Fault]:
    """All faults of a file, from its first place to its last."""
    return sorted(Finder(path, text).found, key=lambda one: (one.line, one.column))


def drawn(faults: list[Fault], count: int, seed: int) -> list[Fault]:
    """A few of them, kind by kind in turn. Whether one is drawn hardly depends on the others, so that the choice stays
    where code changes."""
    order = sorted(faults, key=lambda one: random.Random(f"{seed} {one.lasting}").random())
    by_kind = [[one for one in order if one.kind == kind] for kind in KINDS]
    return [one for one in chain(*zip_longest(*by_kind)) if one is not None][:count]


def chosen(root: Path, count: int, seed: int) -> list[Fault]:
    """`count` faults in each folder of a tree."""
    found = []
    for folder, patterns in FOLDERS.items():
        paths = sorted({path for one in patterns.split() for path in (root / PACKAGE / folder).glob(one)})
        faults = [fault for path in paths for fault in faults_in(str(path.relative_to(root)), path.read_text())]
        found += drawn(faults, count, seed)
    return found
