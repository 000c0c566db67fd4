"""How many small faults in the package the test suite finds, one fault at a time.

    python -m bench.faults.bench --list
    python -m bench.faults.bench --out before.jsonl
    python -m bench.faults.bench --out after.jsonl --expect before.jsonl

The faults are of fixed kinds and drawn with a seed (`places.py`). First run the tests that mirror the faulted file or
name it, then those of its folder, then of further folders; those marked slow come last. The first that fails has found
the fault, if it passes without it. `--limit` bounds the processor seconds of a fault: one that no test has found by
then was not found. What `--out` holds already is not run again. With `--expect` the test that found a fault before is
tried first, alone; where it is slow now, a quick one is looked for as well.
"""

import os
import re
import subprocess
import tempfile
import time
import traceback
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import click

from bench.common.rows import append_row, read_rows
from bench.faults.copies import Copy, Ended, adopt, load
from bench.faults.places import FOLDERS, PACKAGE, Fault, chosen

FURTHER = {  # where else faults of a folder may be found
    "losses": "against_trl train rollout config service/tinker",
    "models": "offload engines train against_trl memory rollout kernels",
    "kernels": "models offload engines train against_trl bench/test_kernels.py",
    "memory": "planning preflight offload models commands engines train bench/test_memory.py",
    "rollout": "train against_trl engines environments recipes views agents",
    "train": "runs rollout against_trl export preflight service/tinker agents commands data",
    "rewards": "recipes against_trl rollout train agents commands docs/test_rewards.py docs/test_judge.py",
    "runs": "train views commands export service jobs rollout",
}
LEFT_OUT = ("tests/engines/vllm/", "tests/on_card/")
SLOW = "slow and not vllm and not gpu"


def order_for(fault: Fault, root: Path) -> list[list[str]]:
    """Test files: those that mirror or name the faulted file, the others of its folder, then of further folders."""
    module = fault.path.removeprefix(f"{PACKAGE}/").removesuffix(".py")
    parent, _, stem = module.rpartition("/")
    folder = module.split("/")[0]
    names = re.compile(rf"\b{parent}\.{stem}\b|\b{parent} import .*\b{stem}\b".replace("/", r"\."))
    own, further = f"tests/{folder}/", [f"tests/{one}" for one in FURTHER[folder].split()]
    found: list[list[tuple[bool, int, str]]] = [[], [], []]
    for file in sorted((root / "tests").rglob("test_*.py")):
        path, text = str(file.relative_to(root)), file.read_text()
        mirrors = path.startswith(own) and file.stem.startswith(f"test_{stem}")
        places = [number for number, one in enumerate(further) if path.startswith(one)]
        stage = 0 if mirrors or names.search(text) else 1 if path.startswith(own) else 2
        if not path.startswith(LEFT_OUT) and (stage < 2 or places):
            apart = not re.search(rf"\b{fault.inside or stem}\b", text) if stage else not mirrors
            found[stage].append((apart, min(places, default=-1), path))
    return [[path for *_, path in sorted(stage)] for stage in found]


def search(copy: Copy, fault: Fault, expected: str, limit: float) -> Ended:
    """The test that finds the fault: the expected one, else the first; a slow one only if no other does."""
    copy.left = limit
    before = copy.fails(fault, [expected]) if expected else Ended()
    known = before.test == expected != ""
    if known and not before.slow:
        return before
    stages, copy.left = order_for(fault, copy.folder), limit
    for tests, marks in [*((tests, f"not ({SLOW})") for tests in stages), ([*chain(*stages)], SLOW)]:
        found = copy.fails(fault, [*tests, "-m", marks]) if tests else Ended()
        if found.test or not found.whole or (known and marks == SLOW):
            break
    return before if known and (found.slow or not found.test) else found


def git(*arguments: str) -> str:
    here = Path(__file__).parent
    return subprocess.run(["git", *arguments], cwd=here, check=True, capture_output=True, text=True).stdout.strip()


def work(copy: Copy, faults: list[Fault], known: dict[Any, str], limit: float, out: Path) -> None:
    """Search for one fault after the other, in a forked process: it never returns."""
    status = 1
    try:
        adopt()
        commit = git("-C", str(copy.folder), "rev-parse", "--short=12", "HEAD")
        for fault in faults:
            began = time.monotonic()
            found = search(copy, fault, known.get(fault.lasting, ""), limit)
            seconds = round(time.monotonic() - began, 1)
            row = {"name": fault.name, **asdict(fault), **asdict(found), "seconds": seconds, "commit": commit}
            append_row(out, row)
            click.echo(f"{seconds:6.1f} s  {fault.name}  {found.test or 'NOT FOUND'}")
        status = 0
    except BaseException:  # noqa: BLE001 - nothing may get out of the fork
        traceback.print_exc()
    finally:
        os._exit(status)


def tests_of(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], str]:
    """The test that found each fault; empty where none did."""
    return {(row["path"], row["before"], row["after"]): row["test"] for row in rows}


def report(rows: list[dict[str, Any]]) -> None:
    """Print what was not found, and for each folder: faults, those found, those found without slow tests."""
    for row in rows:
        if not row["test"]:
            click.echo(f"not found{'' if row['whole'] else ' in time'}: {row['name']}\n    {row['before'].strip()}\n"
                       f"    {row['after'].strip()}")
    for folder in [*FOLDERS, ""]:
        own = [row for row in rows if row["path"].startswith(f"{PACKAGE}/{folder}")]
        quick = sum(bool(row["test"]) and not row["slow"] for row in own)
        click.echo(f"{folder or 'all':8} {len(own):4} {sum(bool(row['test']) for row in own):4} {quick:4}")


@click.command(help=(__doc__ or "").split("\n")[0])
@click.option("--list", "listed", is_flag=True, help="Print the faults and run nothing.")
@click.option("--commit", default="HEAD", show_default=True, help="Whose package and tests.")
@click.option("--count", default=15, show_default=True, help="Faults in each folder.")
@click.option("--seed", default=0, show_default=True)
@click.option("--only", default="", help="Only faults whose name contains this.")
@click.option("--jobs", default=2, show_default=True, help="Copies of the tree that tests run in at a time.")
@click.option("--limit", default=40.0, show_default=True, help="Processor seconds for a fault.")
@click.option("--expect", type=click.Path(exists=True, path_type=Path), help="Rows of another commit.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/faults.jsonl"), show_default=True)
def main(
    listed: bool, commit: str, count: int, seed: int, only: str, jobs: int, limit: float, expect: Path | None,
    out: Path,
) -> None:
    """List the faults, or search for them and print the table."""
    with ExitStack() as stack:
        stack.callback(git, "worktree", "prune")  # as the copies are gone by then
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults_")))
        made = [Copy(top / str(number)) for number in range(jobs)]
        for copy in made:
            git("worktree", "add", "--quiet", "--detach", str(copy.folder), commit)
        done, known = tests_of(read_rows(out)), tests_of(read_rows(expect)) if expect else {}
        faults = [fault for fault in chosen(made[0].folder, count, seed) if only in fault.name]
        if listed:
            for fault in faults:
                click.echo(f"{fault.name}\n    {fault.before.strip()}\n    {fault.after.strip()}")
            return
        load()
        left, workers = [fault for fault in faults if fault.lasting not in done], []
        for number, copy in enumerate(made):
            if not (worker := os.fork()):
                work(copy, left[number::jobs], known, limit, out.resolve())
            workers.append(worker)
        failed = [worker for worker in workers if os.waitpid(worker, 0)[1]]
    report(read_rows(out))
    if failed:
        raise click.ClickException("a process that searched ended with an error")


if __name__ == "__main__":
    main()
