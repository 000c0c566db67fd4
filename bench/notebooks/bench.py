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
from bench.common.rows import append_row, machine, run_now

RESULTS = Path(__file__).resolve().parents[1] / "results" / "notebooks.jsonl"
COLUMNS = ("notebook", "steps", "cells", "changed", "time", "verdict")
console = Console(width=150)


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", default="", help="Only notebooks whose name contains this.")
@click.option("--seconds", default=600.0, show_default=True, help="The most that one notebook may take.")
@options.output(RESULTS)
@options.AS_JSON
def main(folder: Path, only: str, seconds: float, output: Path, as_json: bool) -> None:
    """Run every notebook in FOLDER, and append one row with all verdicts."""
    chosen = [path for path in sorted(folder.glob("*.ipynb")) if only in path.name]
    if not chosen:
        raise click.UsageError(f"{folder} has no .ipynb file" + (f" with {only!r} in its name" if only else ""))
    found = []
    for path in chosen:
        found.append({"notebook": path.stem} | tried(path, seconds))
        console.print(tables.line(line(found[-1])), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{sum(map(ran, found))} of {len(found)} notebooks ran to their end")
    row = {"run": run_now(), "notebooks": found, **machine()}
    if as_json:
        console.print_json(data=row)
    else:
        append_row(output, row)


def tried(path: Path, seconds: float) -> dict[str, Any]:
    """What came of a notebook. A process that says nothing itself failed with `error`."""
    with tempfile.TemporaryDirectory(prefix="notebook-", ignore_cleanup_errors=True) as folder:
        found = child.run("bench.notebooks.provider", str(path), folder, seconds=seconds)
    return {"steps": [], "error": found["missing"]} if found.get("failed") else found


def ran(row: dict[str, Any]) -> bool:
    """Whether every cell ran and something was trained."""
    return "error" not in row and sum(row["steps"]) > 0


def line(row: dict[str, Any]) -> list[str]:
    """The cells of a notebook's line in the table."""
    where = f"cell {row['failed_cell']}: " if "failed_cell" in row else ""
    verdict = "runs" if ran(row) else where + row.get("error", "it trains nothing").replace("|", "/")[:160]
    changed = ", ".join(f"{count} {kind}" for kind, count in sorted(row.get("changes", {}).items()))
    return [row["notebook"], " + ".join(map(str, row["steps"])) or "-", str(row.get("cells", "")), changed,
            f"{row['seconds']:.0f} s" if "seconds" in row else "", verdict]


def table(row: dict[str, Any]) -> list[str]:
    """A run's table in Markdown."""
    return tables.markdown(COLUMNS, map(line, row["notebooks"]))


if __name__ == "__main__":
    main()
