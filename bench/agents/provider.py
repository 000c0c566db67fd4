"""One program of ART in a process of its own: python -m bench.agents.provider EXAMPLES FILE FOLDER.

What came of it is the last line that is printed.
"""

import json
import os
import runpy
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import nbformat
from IPython.core.interactiveshell import InteractiveShell

from bench.agents.rules import rewritten
from bench.common.long_copy import long_copy

STAND_INS = Path(__file__).parent / "stand_ins"


def main(examples: str, file: str, folder: str) -> None:
    """Run a program or notebook of the folder of examples in a copy of its own, and say how far it came."""
    home = Path(folder) / "examples"
    shutil.copytree(Path(examples) / Path(file).parent, home / Path(file).parent, dirs_exist_ok=True)
    model = long_copy("tiny-games", Path(folder) / "tiny")
    program = home / file
    counts: Counter[str] = Counter()
    if program.suffix == ".py":
        for path in program.parent.glob("*.py"):
            text, changed = rewritten(path.read_text(encoding="utf-8"), model)
            path.write_text(text, encoding="utf-8")
            counts += changed
    os.chdir(program.parent)
    sys.path[:0] = [str(program.parent), str(STAND_INS)]
    sys.argv = [program.name]
    began = time.perf_counter()
    if program.suffix == ".py":
        found = ran_script(program)
    else:
        found, changed = ran_notebook(program, model)
        counts += changed
    found |= {"seconds": round(time.perf_counter() - began, 1), "changes": dict(counts), **trained(program.parent)}
    sys.stdout.flush()
    print("\n" + json.dumps(found))


def ran_script(program: Path) -> dict[str, Any]:
    try:
        runpy.run_path(str(program), run_name="__main__")
    except Exception as error:  # noqa: BLE001, whatever a program raises is the result
        return failed(error)
    return {}


def ran_notebook(program: Path, model: str) -> tuple[dict[str, Any], Counter[str]]:
    """Run the cells until one fails."""
    shell, counts = InteractiveShell.instance(), Counter[str]()
    cells = [cell.source for cell in nbformat.read(program, as_version=4).cells if cell.cell_type == "code"]
    for at, cell in enumerate(cells):
        text, changed = rewritten(cell, model)
        counts += changed
        outcome = shell.run_cell(text)
        if error := outcome.error_before_exec or outcome.error_in_exec:
            return failed(error) | {"failed_cell": at}, counts
    return {}, counts


def failed(error: BaseException) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:400]}


def trained(folder: Path) -> dict[str, Any]:
    """What the runs below a folder recorded."""
    lines = [json.loads(line) for path in sorted(folder.rglob("metrics.jsonl")) for line in path.open()]
    steps = [line for line in lines if "loss" in line]
    sums = {name: int(sum(line[f"trajectories/{name}"] for line in steps)) for name in ("total", "trained")}
    return {"steps": len(steps), **sums}


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # an engine's threads may outlive the program
