"""Model-written code in a sandbox, for tests: small limits, and short ways to run a code and see what came of it."""

import os
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo.rewards.ready.code import CodeVerifier, code_passes_tests
from lowmem_grpo.rewards.sandbox.cases import read_cases
from lowmem_grpo.rewards.sandbox.limits import MIB, Limits
from lowmem_grpo.rewards.sandbox.plain import decode, encode
from lowmem_grpo.rewards.sandbox.trial import ISOLATIONS, Sandbox, Trial, run_tests, why_not

LIMITS = Limits(seconds=2, total_seconds=30, memory_bytes=128 * MIB, scratch_bytes=MIB, files=40, output_bytes=50_000)
RIGHT = "def add(a, b):\n    return a + b\n"
ASSERT, CALL = "assert add(2, 3) == 5", {"call": "add", "args": [2, 3], "expected": 5}


def working_isolation() -> str:
    """The first isolation that works here; the test is skipped if none does."""
    working = [name for name in ISOLATIONS if why_not(name) is None]
    if not working:
        pytest.skip("; ".join(f"{name}: {why_not(name)}" for name in ISOLATIONS))
    return working[0]


def working_verifier(**options: Any) -> CodeVerifier:
    return code_passes_tests(isolation=working_isolation(), **options)


def descendants() -> list[str]:
    """Command lines of processes that run our sandbox for this test process: its own children, and orphans."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "cmdline").read_bytes()
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if b"lowmem_grpo.rewards.sandbox.inside" in words and parent in ("0", "1", str(os.getpid())):
            found.append(f"{entry.name} {words[:80]!r}")
    return found


def answer(sandbox: Sandbox, code: str, *args: Any) -> Any:
    """What the code's function `attempt` returns inside the sandbox."""
    trial = Trial(code, sandbox)
    try:
        reply = trial.ask({"call": "attempt", "args": encode(args), "kwargs": encode({})}, None)
    finally:
        trial.close()
    return decode(reply["value"])


def attempts(sandbox: Sandbox, imports: str, bodies: list[str], *args: Any) -> dict[str, Any]:
    """What each body came to, one after the other in one process: what it returned, or the name of what it raised."""
    parts = [wrapped(body).replace("attempt", f"attempt_{number}") for number, body in enumerate(bodies)]
    calls = ", ".join(f"attempt_{number}(*args)" for number in range(len(bodies)))
    code = f"import {imports}\n{''.join(parts)}def attempt(*args):\n    return [{calls}]\n"
    return dict(zip(bodies, answer(sandbox, code, *args), strict=True))


def outcome(sandbox: Sandbox, code: str, *tests: Any) -> list[str]:
    return [verdict.outcome for verdict in run_tests(code, read_cases(list(tests)), sandbox)]


def wrapped(body: str) -> str:
    """`body` as a function that returns what it returns, or the name of what it raises."""
    lines = "\n".join("        " + line for line in body.strip().splitlines())
    return f"def attempt(*args):\n    try:\n{lines}\n    except BaseException as error:\n" \
           "        return type(error).__name__\n"
