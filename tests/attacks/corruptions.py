"""Files of a stopped run damaged in every way, one at a time: resuming passes over them or refuses, and names them.

    python -m tests.attacks.corruptions

The package holds if the resumed run ends as the run that was never stopped, or if it is refused by an error of ours
that names the file and leaves every file as it was. Where only lines of the records were lost, the run must say so. A
changed digit within a record cannot be noticed: no line has a sum.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from lowmem_grpo.runs.lock import FILE as OWNER
from lowmem_grpo.runs.records import COMPLETIONS, FINAL, METRICS, NONFINITE, REPORT, SUMMARY
from lowmem_grpo.runs.saved_adapter import FILES, fingerprint
from lowmem_grpo.runs.views.terminal import quiet
from tests.attacks.attack import Verdict, attack_and_exit
from tests.attacks.kills import LONGEST, Scenario, ended, prepare
from tests.attacks.small_run import differences

NEWEST = "checkpoint-2"
OURS = ("CheckpointError", "RecordError")
DEEP = "[" * 100_000


@dataclass(frozen=True)
class Case:
    """One way to damage a run."""

    damage: str
    name: str
    act: Callable[[Path], None]  # on the folder of the run
    quiet: bool = False  # nothing needs to be said: the file is written anew, or its damage cannot be seen
    kept: bool = True  # whether the run can end as the undisturbed one although nothing was refused

    def __str__(self) -> str:
        return f"{self.name} {self.damage}"


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def bit_flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x80
    path.write_bytes(data)


def missing(path: Path) -> None:
    path.unlink()


def a_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "file").write_text("mine")


def a_file(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.write_text("mine")


def too_deep(path: Path) -> None:
    path.write_text(DEEP)


def not_an_object(path: Path) -> None:
    path.write_text("5\n")


def first_line(text: str, path: Path) -> None:
    """Put another line in place of the first one."""
    path.write_text(text + "\n" + path.read_text().partition("\n")[2])


def state_changed(change: Callable[[dict[str, Any]], Any], path: Path) -> None:
    """Change state.json, and renew its sum: whoever does so by hand can."""
    state = json.loads(path.read_text())
    change(state)
    resigned(json.dumps(state), path)


def resigned(text: str, path: Path) -> None:
    """Write a file of a checkpoint, with its sum."""
    path.write_text(text)
    manifest = path.parent / "manifest.json"
    listed = json.loads(manifest.read_text())
    listed["files"][path.name] = fingerprint(path)
    manifest.write_text(json.dumps(listed))


SIMPLE = (truncated, emptied, bit_flipped, missing, a_folder)
STATE: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{f"without {key}": (lambda state, key=key: state.pop(key))  # type: ignore[misc]
       for key in ("state", "optimizer", "scheduler", "random", "format")},
    **{f"without state.{key}": (lambda state, key=key: state["state"].pop(key))  # type: ignore[misc]
       for key in ("trainer", "source", "config", "scaler")},
    "without a step": lambda state: state["state"]["trainer"].pop("global_step"),
    "with a step that is no number": lambda state: state["state"]["trainer"].update(global_step="two"),
    "with a list for the source": lambda state: state["state"].update(source=[]),
    "with a tensor that is not there": lambda state: state["optimizer"].update(content={"tensor": "none"}),
    "with a random state of another kind": lambda state: state["random"].update(python=5),
}


def cases() -> Iterator[Case]:
    """Every attack."""
    for name in (*FILES, "manifest.json"):
        for act in (*SIMPLE, *([too_deep, not_an_object] if name.endswith("json") else [])):
            yield Case(words(act), f"{NEWEST}/{name}", act)
    for damage, change in STATE.items():
        yield Case(damage, f"{NEWEST}/state.json", partial(state_changed, change))
    yield Case("too deep, with its sum", f"{NEWEST}/state.json", partial(resigned, DEEP))
    for act in (truncated, emptied, missing):
        yield from (Case(words(act), name, act, kept=False) for name in (METRICS, COMPLETIONS))
    for name in (METRICS, COMPLETIONS):
        yield Case("bit flipped", name, bit_flipped, quiet=True, kept=False)
        for act in (a_folder, not_an_object, too_deep):
            yield Case(words(act), name, act, kept=act is a_folder)
        for text in ('{"reward": 1}', '{"step": "one"}', "{}", '{"step": 1', '"step"', "\0\0\0\0"):
            yield Case(f"whose first line is {text!r}", name, partial(first_line, text))
    for act in (*SIMPLE, too_deep, not_an_object):
        yield Case(words(act), SUMMARY, act, quiet=act in (missing, bit_flipped))
    yield Case("a file", NEWEST, a_file)
    yield Case("a file", "checkpoint-3", a_file)
    yield Case("a folder", "checkpoint-3", a_folder)
    yield Case("a file", FINAL, a_file, quiet=True)
    for name in (REPORT, f".{SUMMARY}.tmp"):
        yield Case("a folder", name, a_folder)
    yield Case("a folder", NONFINITE, a_folder, quiet=True)
    for name in (".checkpoint-3.tmp-1", ".checkpoint-9.old-1", f".{FINAL}.tmp-1"):
        yield Case("a file", name, a_file, quiet=True)
    yield Case("a folder", OWNER, a_folder)
    for act in (too_deep, not_an_object):
        yield Case(words(act), OWNER, act, quiet=True)
    yield Case("truncated in each checkpoint", "state.json", truncate_all)


def truncate_all(path: Path) -> None:
    for found in path.parent.glob("checkpoint-*/state.json"):
        truncated(found)


def words(act: Any) -> str:
    return act.__name__.replace("_", " ")


CASES = list(cases())


def stopped_run(root: Path) -> Scenario:
    """A scenario whose folder `stopped` has a run that stopped after two of its three steps."""
    scenario = prepare("grpo", root, max_steps=3)
    scenario.watch.stop = 2
    ended(scenario.start(), LONGEST)
    scenario.watch.stop = None
    scenario.folder.rename(scenario.folder.with_name("stopped"))
    return scenario


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def attempt(scenario: Scenario, case: Case) -> Verdict:
    """Damage a copy of the stopped run, and resume it."""
    folder = scenario.folder
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(folder.with_name("stopped"), folder)
    case.act(folder / case.name)
    before = contents(folder)
    status = ended(scenario.start(), LONGEST)
    return Verdict(case.name.rpartition("/")[2], str(case), found(scenario, case, status, before))


def found(scenario: Scenario, case: Case, status: int | None, before: dict[str, bytes]) -> str:
    """What is wrong with how a resumed run ended; empty if nothing is."""
    said, name = scenario.said, case.name.rpartition("/")[2]
    last = said.rstrip().rpartition("\n")[2]
    if status not in (0, 1):
        return f"the process ended with {status}"
    if status == 1 and not any(f"{kind}: " in last for kind in OURS):
        return f"a raw error: {last[:200]}"
    if status == 1 and contents(scenario.folder) != before:
        return "it was refused, and files are changed all the same"
    if name not in said and not case.quiet:
        return "nothing names the file"
    if status == 0 and (wrong := differences(scenario.folder, scenario.expected)) and (
            case.kept or any(name not in text for text in wrong)):
        return "; ".join(wrong)
    return ""


def attack(folder: Path) -> Iterator[Verdict]:
    """Damage the checkpoint of one stopped run in every way, each time on a copy."""
    scenario = stopped_run(folder)
    return (attempt(scenario, case) for case in CASES)


@click.command(help=(__doc__ or "").split("\n")[0])
def main() -> None:
    """Attack, and print the table."""
    quiet()
    attack_and_exit(attack, f"{len(CASES)} ways to damage a checkpoint")


if __name__ == "__main__":
    main()
