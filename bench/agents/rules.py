"""What is changed in a program of ART before it runs: imports, backend, model and number of steps.

`imports`: ART by this package, its LocalBackend by ours; lines of a shell. `backend`: statements that copy a run to or
from S3. `model`: the name of the base model. `steps`: the end of the training loop. Everything else stays as its author
wrote it. What a program imports for logging (dotenv, weave, openpipe) it finds in the folder stand_ins.
"""

import ast
from collections import Counter
from collections.abc import Iterator

from bench.notebooks.rules import HUB_NAME, Edit, applied, called, without_shell

STEPS = 2
S3 = ("_experimental_pull_from_s3", "_experimental_push_to_s3", "BACKUP_BUCKET")
DOOR = "lowmem_grpo.agents"


def rewritten(text: str, model: str) -> tuple[str, Counter[str]]:
    """A module or a cell as it will run, and how many changes of each kind were made."""
    text, dropped = without_shell(text)
    edits = list(edits_of(text, model))
    return applied(text, edits), Counter({"imports": dropped}) + Counter(edit.kind for edit in edits)


def edits_of(text: str, model: str) -> Iterator[Edit]:
    """All changes; none where it is no Python, which the run will say."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
    for node in ast.walk(tree):
        for kind, place, new in changes(node, text, model):
            begin = starts[place.lineno - 1] + place.col_offset
            yield Edit(kind, begin, starts[(place.end_lineno or 1) - 1] + (place.end_col_offset or 0), new)


def changes(node: ast.AST, text: str, model: str) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """(kind, what is replaced, by what) of one node."""
    match node:
        case ast.Import(names=[ast.alias(name="art", asname=None)]):
            yield "imports", node, "from lowmem_grpo import agents as art"
        case ast.ImportFrom(module="art.local" | "art.local.backend"):
            yield "imports", node, f"from {DOOR}.local import {', '.join(name.name for name in node.names)}"
        case ast.ImportFrom(module="art.rewards" | "art.types" as module):
            names = ", ".join(name.name for name in node.names)
            yield "imports", node, f"from {DOOR}.{module.partition('.')[2]} import {names}"
        case ast.Expr() if any(word in (ast.get_source_segment(text, node) or "") for word in S3):
            yield "backend", node, "pass"
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(value))) \
                if "BASE_MODEL" in name and HUB_NAME.fullmatch(value):
            yield "model", node.value, repr(model)
        case ast.keyword(arg="base_model", value=ast.Constant()):
            yield "model", node.value, repr(model)
        case ast.Call(args=[first, last]) if called(node) == "range" and "get_step" in ast.unparse(first):
            yield "steps", last, str(STEPS)
