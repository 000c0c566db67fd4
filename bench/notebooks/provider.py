"""One notebook in a process of its own: python -m bench.notebooks.provider NOTEBOOK FOLDER.

What came of it is the last line that is printed.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import torch
from IPython.core.interactiveshell import InteractiveShell

from bench.common.long_copy import long_copy
from bench.notebooks.rules import rewritten
from lowmem_grpo.train.loop import Trainer


def main(notebook: str, folder: str) -> None:
    """Run the cells in `folder` until one fails, and say how far it came."""
    cells = [cell.source for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
    os.chdir(folder)
    texts, counts = rewritten(cells, long_copy("tiny", Path(folder) / "tiny"), torch.cuda.is_available())
    script = "\n\n".join(f"# %% [{at}]\n{text}" for at, text in enumerate(texts))
    Path("notebook.py").write_text(script, encoding="utf-8")  # for whoever looks for what was changed
    began = time.perf_counter()
    found = run(texts)
    found |= {"cells": len(texts), "seconds": round(time.perf_counter() - began, 1), "changes": dict(counts)}
    sys.stdout.flush()
    print("\n" + json.dumps(found))


def run(texts: list[str]) -> dict[str, Any]:
    """The steps of each trainer, and the first error: its cell, counted from 0, and its last line."""
    shell = InteractiveShell.instance()
    trainers: dict[int, Any] = {}
    for at, text in enumerate(texts):
        outcome = shell.run_cell(text)
        trainers |= {id(value): value for value in shell.user_ns.values() if isinstance(value, Trainer)}
        if error := outcome.error_before_exec or outcome.error_in_exec:
            why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            return {"steps": steps_of(trainers), "failed_cell": at, "error": why[:400]}
    return {"steps": steps_of(trainers)}


def steps_of(trainers: dict[int, Any]) -> list[int]:
    """How many steps each trainer made, in the order in which they were made."""
    return [trainer.state.global_step for trainer in trainers.values()]


if __name__ == "__main__":
    main(sys.argv[1], str(Path(sys.argv[2]).resolve()))
    sys.stdout.flush()
    os._exit(0)  # an engine's threads may outlive the notebook
