"""Do public notebooks run here? Each one in a folder, with only imports, model, dataset and number of steps replaced.

    python -m bench.notebooks.bench FOLDER

FOLDER holds notebooks as their authors publish them. Each runs in a process and a temporary folder of its own.
`rules.py` says what is replaced: install and import lines; the model, by the one in the package; the dataset, by made
rows with the same columns (`made_rows.py`); the number of steps, by two; and without a card the device, by the CPU.
`changed` counts these. Of a notebook that stops, the verdict says in which cell (the first is 0) and why.
"""

import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.common import child, options, tables
from bench.common.rows import leave, machine, run_now
from bench.notebooks.section import line, ran

RESULTS = Path(__file__).resolve().parents[1] / "results" / "notebooks.jsonl"
console = Console(width=150)


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", default="", help="Only notebooks whose name contains this.")
@click.option("--seconds", default=600.0, show_default=True, help="The most that one notebook may take.")
@options.output(RESULTS)
@options.AS_JSON
def main(folder: Path, only: str, seconds: float, output: Path, as_json: bool) -> None:
    """Run every notebook in FOLDER, and append a row for each."""
    chosen = [path for path in sorted(folder.glob("*.ipynb")) if only in path.name]
    if not chosen:
        raise click.UsageError(f"{folder} has no .ipynb file" + (f" with {only!r} in its name" if only else ""))
    found, about = [], {"run": run_now(), **machine()}
    for path in chosen:
        found.append({"notebook": path.stem} | tried(path, seconds))
        leave(found[-1] | about, output, as_json)
        if not as_json:
            console.print(tables.line(line(found[-1])), markup=False, highlight=False, soft_wrap=True)
    if not as_json:
        console.print(f"{sum(map(ran, found))} of {len(found)} notebooks ran to their end")


def tried(path: Path, seconds: float) -> dict[str, Any]:
    """What came of a notebook. A process that says nothing itself failed with `error`."""
    with tempfile.TemporaryDirectory(prefix="notebook-", ignore_cleanup_errors=True) as folder:
        found = child.run("bench.notebooks.provider", str(path), folder, seconds=seconds)
    return {"steps": [], "error": found["missing"]} if found.get("failed") else found


if __name__ == "__main__":
    main()
