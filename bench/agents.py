"""Run public programs of ART here, with only their import, backend, model and number of steps replaced.

    python -m bench.agents FOLDER

FOLDER is `examples` of a checkout of OpenPipe/ART; nothing of it is kept here. Each program runs in a process and a
temporary folder of its own, on the tiny model of the package. `changed` counts what is replaced: ART by this package,
its LocalBackend by ours, lines of a shell (`imports`); statements that copy a run to or from S3 (`backend`); the name
of the base `model`; the end of the training loop (`steps`). Loggers are replaced by stubs.
"""

import ast
import json
import os
import runpy
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import nbformat

from bench.common import public_code as public

PROGRAMS = ("2048/2048.py", "tic_tac_toe/tic-tac-toe.py", "rock-paper-tool-use.ipynb", "prisoners-dilemma.ipynb")
S3 = ("_experimental_pull_from_s3", "_experimental_push_to_s3", "BACKUP_BUCKET")
HOMES = {"art.local": "local", "art.local.backend": "local", "art.rewards": "rewards", "art.types": "types"}
STEPS = "2"
COLUMNS = ("program", "steps", "trajectories trained", "changed", "time", "verdict")


class ProgramChanges(public.Changes):
    """The changes to a program of ART; `model` is the small model to use instead of its own."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model

    def visit_Import(self, node: ast.Import) -> Any:  # noqa: N802 - the names of ast.NodeTransformer
        is_art = [(name.name, name.asname) for name in node.names] == [("art", None)]
        return self.statements("imports", "from lowmem_grpo import agents as art") if is_art else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:  # noqa: N802
        if node.module not in HOMES:
            return node
        names = ", ".join(ast.unparse(name) for name in node.names)
        return self.statements("imports", f"from lowmem_grpo.agents.{HOMES[node.module]} import {names}")

    def visit_Expr(self, node: ast.Expr) -> Any:  # noqa: N802
        copies = any(word in ast.unparse(node) for word in S3)
        return self.statements("backend", "pass") if copies else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:  # noqa: N802
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(value))) \
                    if "BASE_MODEL" in name and public.HUB_NAME.fullmatch(value):
                node.value = self.expression("model", repr(self.model))
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> Any:
        if node.arg == "base_model" and isinstance(node.value, ast.Constant):
            node.value = self.expression("model", repr(self.model))
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:  # noqa: N802
        if public.called(node) == "range" and len(node.args) == 2 and "get_step" in ast.unparse(node.args[0]):
            node.args[1] = self.expression("steps", STEPS)
        return self.generic_visit(node)


def quieten() -> None:
    """Replace dotenv, weave and openpipe by stubs that read no secrets, trace nothing and, without a key, report
    nothing."""
    def client(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(api_key=None)

    clients = {"OpenPipe": client, "AsyncOpenPipe": client}
    for name, members in {
        "dotenv": {"load_dotenv": lambda *args, **options: False}, "openpipe": clients, "openpipe.client": clients,
        "weave": {"init": lambda *args, **options: None,
                  "op": lambda function=None, **options: (lambda inner: inner) if function is None else function},
    }.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(members)


def run(examples: str, file: str, folder: str) -> public.Row:
    """Run a program or notebook of the examples in a copy of its folder; return how far it got."""
    program = Path(folder, "examples", file)
    changes = ProgramChanges(public.long_copy("tiny-games", Path(folder, "tiny")))
    shutil.copytree(Path(examples, file).parent, program.parent, dirs_exist_ok=True)
    quieten()
    os.chdir(program.parent)
    sys.path.insert(0, str(program.parent))
    sys.argv = [program.name]
    began = time.perf_counter()
    if program.suffix == ".py":
        for path in program.parent.glob("*.py"):
            path.write_text(changes.rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")
        try:
            found = {}
            runpy.run_path(str(program), run_name="__main__")
        except Exception as error:  # noqa: BLE001, whatever a program raises is the result
            found = public.failed(error)
    else:
        code = [cell.source for cell in nbformat.read(program, as_version=4).cells if cell.cell_type == "code"]
        found = public.run_cells(map(changes.rewrite, code))
    seconds = round(time.perf_counter() - began, 1)
    return found | {"seconds": seconds, "changes": dict(changes.counts), **trained(program.parent)}


def trained(folder: Path) -> public.Row:
    """Return what the runs below a folder recorded."""
    lines = [json.loads(line) for path in sorted(folder.rglob("metrics.jsonl")) for line in path.open()]
    steps = [line for line in lines if "loss" in line]
    sums = {name: int(sum(line[f"trajectories/{name}"] for line in steps)) for name in ("total", "trained")}
    return {"steps": len(steps), **sums}


def shown(row: public.Row) -> list[str]:
    """Return a program's cells for the table."""
    return public.cells(row, "program", str(row["steps"]), f"{row.get('trained', 0):,} of {row.get('total', 0):,}")


def agents_table(rows: list[public.Row]) -> list[str]:
    """Return the section of RESULTS.md with the newest row of each program."""
    return public.section(rows, "program", "programs of ART with import, backend, model and steps",
                          "`backend`: statements that copy a run to S3, left out.", COLUMNS, shown)


@click.command(help=__doc__)
@public.options_for("agents", "programs", 1800.0)
def main(folder: Path, only: str, seconds: float, output: Path, as_json: bool) -> None:
    chosen = {name: {"examples": folder.resolve(), "file": name} for name in PROGRAMS
              if only in name and (folder / name).exists()}
    if not chosen:
        raise click.UsageError(f"{folder} has none of {', '.join(PROGRAMS)}" + (f" with {only!r}" if only else ""))
    public.run_each("program", "bench.agents:run", chosen, seconds, output, as_json, shown, steps=0)


if __name__ == "__main__":
    main()
