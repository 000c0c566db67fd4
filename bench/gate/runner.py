"""Run one piece of the gate in a separate process, stop it when its time is over, and judge how it ended."""

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.common.rows import read_rows
from bench.gate.pretend import ALWAYS, CACHED, UNCACHED
from bench.gate.stages import BENCH, CARD, CPU, PATIENT, PRETEND, Piece, Setup

PASSED, FAILED, SKIPPED, NOT_RUN, CUT_OFF = "passed", "failed", "skipped", "not run", "cut off"
SHORTEST = 30  # seconds; without a real card, a piece with less time left is not begun
TAIL = 4000  # characters at the end of a log that are searched for a reason
# the gate has no network, and vLLM must live in the process whose weights it borrows
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
               "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
WORKS = "works"  # result of a probe in environment.py
UNITS = {"card_gib": "the card has {have:.1f} GiB, {want} are needed",
         "host_gib": "{have:.1f} GiB of host memory are free, {want} are needed",
         "disk_gib": "{have:.1f} GiB of disk are free, {want} are needed"}
SLACK = 0.92  # a card sold as 16 GiB shows a little less


@dataclass(frozen=True)
class Outcome:
    """The outcome of a piece; a line of gate.jsonl."""

    name: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    run: str = ""
    commit: str = ""
    form: str = ""


def attempt(piece: Piece, setup: Setup, left: float, commit: str) -> Outcome:
    """Run a piece, unless something it needs is missing or too little time is left; return its outcome."""
    def outcome(status: str, seconds: float = 0.0, reason: str = "") -> Outcome:
        return Outcome(piece.name, status, round(seconds, 1), reason, setup.run, commit, setup.form)

    if reason := why_not(piece.needs, setup.facts):
        return outcome(SKIPPED, reason=reason)
    if left < (needed := piece.least if setup.form == CARD else SHORTEST):
        return outcome(NOT_RUN, reason=f"{max(left, 0):.0f} s were left, it takes about {needed}")
    log = setup.out / "logs" / f"{piece.name.replace('/', '-')}.log"
    before = len(rows_of(piece))
    longest = PATIENT if setup.form == PRETEND else piece.seconds
    begin, allowed = time.monotonic(), min(left, longest)
    code = run(piece.command, log, allowed, environment(piece, setup))
    seconds = time.monotonic() - begin
    if code is None:
        status = CUT_OFF if left < longest else FAILED
        return outcome(status, seconds, f"stopped after {allowed:.0f} s; {last_line(log)}")
    status, reason = verdict(piece, setup, code, log)
    made = rows_of(piece)[before:]
    if status == PASSED and made and all(row.get("missing") for row in made):
        status, reason = SKIPPED, f"measured nothing: {made[-1]['missing']}"
    return outcome(status, seconds, reason)


def why_not(needs: tuple[str, ...], facts: dict[str, Any]) -> str | None:
    """Return the first need that is not met, in words; None if all are met, or if no facts are known yet."""
    if not facts:
        return None
    return next((reason for need in needs if (reason := lacking(need, facts))), None)


def lacking(need: str, facts: dict[str, Any]) -> str | None:
    """Return why a need ("bf16", "card_gib:24", or the name of a probe) is not met; None if it is."""
    name, _, amount = need.partition(":")
    if amount:
        have, want = facts.get(name) or 0.0, float(amount)
        return None if have >= SLACK * want else UNITS[name].format(have=have, want=amount)
    if name == "bf16":
        chip = "".join(map(str, facts["capability"] or []))
        return None if facts["bf16"] else f"the card does not support bfloat16 (sm_{chip})"
    said = facts["works"].get(name, "not installed")
    return None if said == WORKS else f"{name}: {said}"


def rows_of(piece: Piece) -> list[dict[str, Any]]:
    """Return the rows in the file to which the piece appends."""
    named = [after for word, after in pairwise(piece.command) if word == "--output" and after.endswith(".jsonl")]
    return read_rows(Path(named[0])) if named else []


def environment(piece: Piece, setup: Setup) -> dict[str, str]:
    """Return variables for a piece's process: on the CPU one thread and no card; on a pretend card zeros instead of
    garbage, except where allocations are measured."""
    if setup.form == PRETEND:
        return ENVIRONMENT | (ALWAYS if piece.weighs else CACHED if piece.sleeps else UNCACHED)
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return ENVIRONMENT | (alone if setup.form == CPU else {})


def run(command: tuple[str, ...], log: Path, seconds: float, settings: dict[str, str]) -> int | None:
    """Run a command; return its exit code, None if time ran out. All processes that it started end with it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        file.write(f"$ python {' '.join(command)}\n")
        file.flush()
        process = subprocess.Popen([sys.executable, *command], stdin=subprocess.DEVNULL, stdout=file,
                                   stderr=subprocess.STDOUT, cwd=BENCH.parent, env=os.environ | settings,
                                   start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a piece's whole process group, with any children it left behind."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            continue


def verdict(piece: Piece, setup: Setup, code: int, log: Path) -> tuple[str, str]:
    """Return PASSED or FAILED, and why."""
    if piece.junit:
        return pytest_verdict(setup.out / f"{piece.name.rpartition('/')[2]}.xml", setup.form,
                              f"exit code {code}: {last_line(log)}")
    return (PASSED, "") if code == 0 else (FAILED, f"exit code {code}: {last_line(log)}")


def pytest_verdict(report: Path, form: str, last: str) -> tuple[str, str]:
    """Return the verdict of pytest's report. On a card, at least one test must run. On a pretend card, whose kernels
    compute nothing, assertions about values cannot hold, so only other errors count."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return FAILED, f"pytest left no report: {last}"
    bad = {f"{case.get('classname')}.{case.get('name')}": message for case in cases if (message := complaint(case))}
    values = [name for name, message in bad.items() if form == PRETEND  # wrong values
              and (message.startswith(OF_VALUES) or any(words in message for words in CHECKS))]
    skipped = sum(case.find("skipped") is not None for case in cases)
    ran = len(cases) - skipped
    counts = f"{ran - len(bad)} passed, {skipped} skipped" + (f", {len(values)} wrong values" if values else "")
    broken = [name for name in bad if name not in values]
    if broken:
        return FAILED, f"{len(broken)} failed ({counts}): {', '.join(broken[:3])}: {bad[broken[0]][:160]}"
    if not ran and form == CARD:
        return FAILED, f"no test ran ({counts})"
    return PASSED, counts


OF_VALUES = ("AssertionError", "assert ", "Failed: DID NOT RAISE", "Failed: DID NOT WARN", "ZeroDivisionError")
CHECKS = ("has other code tables than",  # the package's own check of values
          "Error in dlopen")  # of a library of CUDA that the pretend card does not replace


def complaint(case: ElementTree.Element) -> str:
    """Return the message of a test that failed or broke, else ""."""
    found = case.find("failure")
    found = case.find("error") if found is None else found
    return "" if found is None else " ".join((found.get("message") or "failed").split())


def last_line(log: Path) -> str:
    """Return the last line of a log."""
    lines = [line.strip() for line in log.read_text(errors="replace")[-TAIL:].splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
