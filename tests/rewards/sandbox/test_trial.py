"""A verdict for each test: what is right passes, what is wrong does not, and no code can forge its own verdict."""

import mmap
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sandboxed import ASSERT, CALL, LIMITS, RIGHT, outcome
from tables import every_row

from lowmem_grpo.rewards.sandbox import trial
from lowmem_grpo.rewards.sandbox.cases import read_cases
from lowmem_grpo.rewards.sandbox.limits import MIB, Limits
from lowmem_grpo.rewards.sandbox.trial import Sandbox, Trial, Verdict, run_tests

LOOSE = "def check(f):\n    assert f(1, 1) == 2\n    assert sorted([f(2, 2), 1]) == [1, 4]\ncheck(add)"


@every_row(("code", "expected"), [
    (RIGHT, "passed"), ("def add(a, b):\n    return a - b\n", "failed"),
    ("def add(a, b):\n    return str(a + b)\n", "failed"), ("def add(a):\n    return a\n", "error"),
    ("def plus(a, b):\n    return a + b\n", "error"), ("def add(a, b) return a + b", "error"), ("1 / 0", "error"),
])
def test_each_kind_of_test_gets_its_verdict(sandbox: Sandbox, code: str, expected: str) -> None:
    tests = [ASSERT, CALL, {"call": "add", "kwargs": {"a": 0, "b": 1}, "expected": 1},
             {"call": "add", "args": [0.5, 0.25], "expected": 0.75}, LOOSE]
    assert outcome(sandbox, code, *tests) == [expected] * 5


def test_the_reason_names_the_line_or_the_values(sandbox: Sandbox) -> None:
    wrong = run_tests("def add(a, b):\n    return a * b\n", read_cases([
        ASSERT, "assert add(1, 1) == 2, 'one and one'", CALL, "x = add(2, 2)\nassert x == 4\nassert x == 5",
    ]), sandbox)
    assert [verdict.reason for verdict in wrong] == [
        ASSERT, "assert add(1, 1) == 2, 'one and one': one and one", "add gave 6, expected 5", "assert x == 5",
    ]
    (error,) = run_tests("def add(a, b):\n    return a // 0\n", read_cases([ASSERT]), sandbox)
    assert error == Verdict("error", "ZeroDivisionError: integer division or modulo by zero")


@every_row(("code", "verdict"), [
    ("a, b = map(int, input().split())\nprint(a + b)", "passed"),
    ("print(sum(map(int, open(0).read().split())))", "passed"),
    ("import sys\nprint(5, end=' \\n\\n')\nsys.exit(0)", "passed"), ("print(6)", "failed"),
    ("print(5); print(5)", "failed"),
    ("print(5)\nraise SystemExit(3)", "error"), ("print(5)\n1 / 0", "error"), ("", "refused"),
    ("x = bytearray(10**9)", "memory"), ("while True: print('5' * 99)", "output"),
    ("import os\nprint(5, flush=True)\nos.kill(os.getppid(), 9)", "error"), ("import os\nos._exit(0)", "failed"),
])
def test_a_program_is_judged_by_what_it_prints(sandbox: Sandbox, code: str, verdict: str) -> None:
    assert outcome(sandbox, code, {"input": "2 3\n", "output": "5\n"}) == [verdict]


def test_a_program_that_never_ends_is_ended(sandbox: Sandbox) -> None:
    quick = Sandbox(sandbox.isolation, replace(LIMITS, seconds=0.3))
    assert outcome(quick, "while True: pass", {"input": "", "output": "5"}) == ["timeout"]


def test_methods_exceptions_and_every_plain_type_cross_the_border(sandbox: Sandbox) -> None:
    code = (
        "class Solution:\n    def double(self, x):\n        return 2 * x\n"
        "def echo(x):\n    return x\n"
        "def count(n):\n    yield from range(n)\n"
        "def fail():\n    raise ValueError('no')\n"
    )
    raises = "try:\n    fail()\nexcept ValueError as error:\n    assert 'no' in str(error)\nelse:\n    assert False"
    values = "for x in (None, True, 1, 10**400, -0.0, 1e999, 'é\\ud800', b'\\x00', 1j, (1, (2,)), {3},\n" \
             "          frozenset({4}), {(1, 2): [{}, ()]}, [], ''):\n" \
             "    assert echo(x) == x and type(echo(x)) is type(x)"
    verdicts = run_tests(code, read_cases([
        {"call": "Solution.double", "args": [4], "expected": 8}, raises, values, "assert list(count(3)) == [0, 1, 2]",
        {"call": "count", "args": [2], "expected": [0, 1]}, "import math\nassert math.isnan(echo(math.nan))",
    ]), sandbox)
    assert verdicts == [Verdict("passed")] * 6


def test_a_test_that_ends_the_process_leaves_the_next_tests_their_chance(sandbox: Sandbox) -> None:
    code = (
        "import os\n"
        "def add(a, b):\n"
        "    if a == 0:\n        os._exit(0)\n"
        "    if a == 1:\n        return [0] * 10**9\n"
        "    while a == 4:\n        pass\n"
        "    return a + b\n"
    )
    with closing(Trial(code, sandbox)) as tried:
        for test, expected in (
            ("assert add(0, 0) == 0", "error"), (ASSERT, "passed"), ("assert add(1, 0) == 1", "memory"),
            ("assert add(4, 0) == 4", "timeout"), (CALL, "passed"),
        ):
            tried.limits = replace(sandbox.limits, seconds=0.3) if expected == "timeout" else sandbox.limits
            assert tried.verdict(*read_cases([test])).outcome == expected


def test_tests_that_come_too_late_are_not_begun(sandbox: Sandbox) -> None:
    quick = Sandbox(sandbox.isolation, Limits(seconds=0.3, total_seconds=0.5, memory_bytes=128 * MIB))
    verdicts = run_tests("def add(a, b):\n    while True: pass", read_cases([ASSERT] * 20), quick)
    assert {verdict.outcome for verdict in verdicts} == {"timeout"}
    assert verdicts[-1].reason == "not begun within 0.5 s of all tests"


@pytest.fixture
def slow_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine so busy that a start takes longer than all tests may: by the clock of trials, which leaps ahead."""
    late, start = [0.0], Sandbox.start

    def slow(sandbox: Sandbox, *order: Any, **more: Any) -> Any:
        late[0] += sandbox.limits.total_seconds
        return start(sandbox, *order, **more)

    monkeypatch.setattr(Sandbox, "start", slow)
    monkeypatch.setattr(trial, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late[0]))


@pytest.mark.usefixtures("slow_starts")
def test_the_time_of_a_start_is_not_the_codes(sandbox: Sandbox) -> None:
    assert outcome(sandbox, RIGHT, ASSERT, CALL) == ["passed", "passed"]
    assert outcome(sandbox, "print(5)", {"input": "", "output": "5"}, {"input": "1", "output": "5"}) == ["passed"] * 2


@pytest.mark.usefixtures("slow_starts")
def test_a_code_that_ends_its_process_pays_for_the_next_start(sandbox: Sandbox) -> None:
    verdicts = run_tests("import os\ndef add(a, b):\n    os._exit(0)", read_cases([CALL] * 9), sandbox)
    assert "not begun within 120 s of all tests" in verdicts[-1].reason


@every_row(("code", "stdin"), [
    ("print(1)", "a" * 70_000), ("print(1)\n#" + "a" * 70_000, ""), ("print(1)\n#" + "a" * 40_000, "é" * 20_000),
])
def test_a_program_too_large_for_its_scratch_directory_is_refused(sandbox: Sandbox, code: str, stdin: str) -> None:
    small = Sandbox(sandbox.isolation, Limits(scratch_bytes=64 * 1024))
    (verdict,) = run_tests(code, read_cases([{"input": stdin, "output": "1"}]), small)
    assert verdict.outcome == "refused" and "the scratch directory 65536" in verdict.reason


def test_a_program_that_just_fits_runs(sandbox: Sandbox) -> None:
    small = Sandbox(sandbox.isolation, replace(sandbox.limits, scratch_bytes=16 * mmap.PAGESIZE))
    stdin = "a" * 15 * mmap.PAGESIZE
    assert outcome(small, "print(len(input()))", {"input": stdin, "output": str(len(stdin))}) == ["passed"]


def test_code_that_does_not_load_is_loaded_once(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = Sandbox.start, []
    monkeypatch.setattr(Sandbox, "start", lambda *given, **more: started.append(given[1]) or start(*given, **more))
    quick = Sandbox(sandbox.isolation, replace(LIMITS, seconds=0.3))
    for code in ("while True: pass", "1 / 0", "def add(", "import os\nos._exit(0)"):
        verdicts = run_tests(code, read_cases([CALL, ASSERT, CALL]), quick)
        assert len(set(verdicts)) == 1 and not verdicts[0].passed
    assert started == ["serve"] * 4


@every_row(("code", "reason"), [
    ("", "no code"), (" \n", "no code"), ("x = 1 #" + "x" * 100_000, "allowed are 100000"), ("x = '\0'", "NUL"),
    ("x = '\ud800'", "not valid Unicode"),
])
def test_what_cannot_be_code_is_not_run(code: str, reason: str) -> None:
    nowhere = Sandbox("no such isolation", LIMITS)  # it would raise if it were started
    (verdict,) = run_tests(code, read_cases([ASSERT]), nowhere)
    assert verdict.outcome == "refused" and reason in verdict.reason


# forged verdicts


def test_the_code_under_test_never_sees_what_is_expected(sandbox: Sandbox) -> None:
    """Every string and number that the process can reach is searched for the expected value."""
    code = (
        "import gc, sys\n"
        "def attempt(*args):\n"
        "    seen = set()\n    waiting = list(gc.get_objects()) + [vars(m) for m in list(sys.modules.values())]\n"
        "    for _ in range(3):\n"
        "        waiting = [o for o in gc.get_referents(*waiting) if id(o) not in seen and not seen.add(id(o))]\n"
        "        if any(type(o) in (str, bytes) and ''.join(['never', 'more']) in str(o) for o in waiting):\n"
        "            return 'found'\n"
        "    return 'hidden'\n"
    )
    tests = [{"call": "attempt", "args": [], "expected": "nevermore"}, "assert attempt() == 'nevermore'"]
    verdicts = run_tests(code, read_cases(tests), sandbox)
    assert verdicts[0].reason == "attempt gave 'hidden', expected 'nevermore'"
    assert verdicts[1].outcome == "failed"


def test_keys_that_collide_do_not_slow_the_parent(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """No set of them is made here: only what was expected is decoded. The code writes to every file that is open,
    whatever the number of the one that answers go to."""
    decoded: list[Any] = []
    monkeypatch.setattr(trial, "decode", decoded.append)
    code = (
        "import os, stat\n"
        "keys = ','.join(str(n * (2**61 - 1)) for n in range(2300))\n"
        "LINE = b'{\"loaded\": true}\\n' + ('{\"value\": {\"set\": [' + keys + ']}}\\n').encode()\n"
        "for n in range(3, 1024):\n"
        "    try:\n        os.write(n, LINE)\n    except OSError:\n        pass\n"
        "def add(a, b):\n    return 0\n"
    )
    (verdict,) = run_tests(code, read_cases([{"call": "add", "args": [1, 2], "expected": "x"}]), sandbox)
    assert verdict.outcome == "failed" and decoded == ["x"]


NEVER_CALLED = [
    "def check(candidate):\n    assert candidate(1, 1) == 2", "assert add", "assert callable(add)", "assert True",
    "import unittest\nclass Sums(unittest.TestCase):\n    def sum(self):\n        self.assertEqual(add(1, 1), 2)",
    "for a, b in []:\n    assert add(a, b) == 0",
]


def test_a_test_that_never_calls_the_code_passes_none(sandbox: Sandbox) -> None:
    verdicts = run_tests(RIGHT, read_cases([*NEVER_CALLED, NEVER_CALLED[0] + "\ncheck(add)"]), sandbox)
    assert verdicts == [Verdict("error", "the test never called the code")] * 6 + [Verdict("passed")]
