"""Do public programs of ART run here? Each one with only its import, backend, model and number of steps replaced.

    python -m bench.agents.bench FOLDER

FOLDER is `examples` of a checkout of OpenPipe/ART; nothing of it is kept here. Each program runs in a process
and a temporary folder of its own, on the tiny model of the package. `rules.py` says what is replaced, and `changed`
counts it; stand_ins/ holds empty modules in place of what the programs log to.
"""

import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.agents.section import line, ran
from bench.common import child, options, tables
from bench.common.rows import leave, machine, run_now

RESULTS = Path(__file__).resolve().parents[1] / "results" / "agents.jsonl"
PROGRAMS = (
    "2048/2048.py", "tic_tac_toe/tic-tac-toe.py", "rock-paper-tool-use.ipynb", "prisoners-dilemma.ipynb",
)
console = Console(width=150)


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", default="", help="Only programs whose path contains this.")
@click.option("--seconds", default=1800.0, show_default=True, help="The most that one program may take.")
@options.output(RESULTS)
@options.AS_JSON
def main(folder: Path, only: str, seconds: float, output: Path, as_json: bool) -> None:
    """Run the programs of ART in FOLDER, and append a row for each."""
    chosen = [name for name in PROGRAMS if only in name and (folder / name).exists()]
    if not chosen:
        raise click.UsageError(f"{folder} has none of {', '.join(PROGRAMS)}" + (f" with {only!r}" if only else ""))
    found, about = [], {"run": run_now(), **machine()}
    for name in chosen:
        found.append({"program": name} | tried(folder, name, seconds))
        leave(found[-1] | about, output, as_json)
        if not as_json:
            console.print(tables.line(line(found[-1])), markup=False, highlight=False, soft_wrap=True)
    if not as_json:
        console.print(f"{sum(map(ran, found))} of {len(found)} programs ran to their end")


def tried(folder: Path, name: str, seconds: float) -> dict[str, Any]:
    """What came of a program. A process that says nothing itself failed with `error`."""
    with tempfile.TemporaryDirectory(prefix="agents-", ignore_cleanup_errors=True) as place:
        found = child.run("bench.agents.provider", str(folder.resolve()), name, place, seconds=seconds)
    return {"steps": 0, "error": found["missing"]} if found.get("failed") else found


if __name__ == "__main__":
    main()
