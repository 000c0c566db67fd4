"""Code rewards: which code is found in a completion, what its verdicts pay, how often and how long things run."""

import logging
import pickle
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sandboxed import working_verifier
from tables import every_row

from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rewards.ready import code as code_rewards
from lowmem_grpo.rewards.ready.code import CodeVerifier, code_passes_tests, python_code
from lowmem_grpo.rewards.sandbox.limits import MIB, Limits
from lowmem_grpo.rewards.sandbox.trial import OUTCOMES, SandboxError, Verdict, why_not
from lowmem_grpo.rewards.sandbox.worker import CannotStart

QUICK = Limits(seconds=0.5, total_seconds=1, memory_bytes=128 * MIB)
PATIENT = Limits(seconds=60, total_seconds=120, memory_bytes=128 * MIB)  # right codes on a busy machine
RIGHT, WRONG, HALF = (
    f"```python\ndef add(a, b):\n    return {result}\n```" for result in ("a + b", "a * b - 9", "a * b")
)
TESTS = ["assert add(2, 2) == 4", {"call": "add", "args": [1, 2], "expected": 3}]


@pytest.fixture(scope="module")
def verifier() -> CodeVerifier:
    return working_verifier(limits=PATIENT, workers=2)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for the sandbox with the `codes` that were run, in order: one that says "wrong" fails."""
    found = SimpleNamespace(codes=[], act=lambda code: None)

    def run(code: str, cases: list[Any], sandbox: Any) -> list[Verdict]:
        found.codes.append(code)
        found.act(code)
        return [Verdict("failed", "as told") if "wrong" in code else Verdict("passed")] * len(cases)

    monkeypatch.setattr(code_rewards, "run_tests", run)
    return found


# which code


@every_row(("text", "code"), [
    ("```python\nx = 1\n```", "x = 1\n"), ("First ```python\nno\n```", "First ```python\nno\n```"),
    ("```python\nfirst\n```\nthen\n```python\nlast\n```\nend", "last\n"), ("```py\nx\n```", "x\n"),
    ("```Python3\nx\n```", "x\n"), ("```python\nx\n```\n```\noutput\n```", "x\n"), ("```\nplain\n```", "plain\n"),
    ("```bash\npip\n```", "```bash\npip\n```"), ("```python\ncut off", "cut off"), ("```python\n```", ""),
    ("<code>y = 2</code>", "y = 2"), ("<code>no</code>\n```python\nyes\n```", "yes\n"),
    ("print(1)", "print(1)"), ("", ""),
    ("  ```python title='a.py'\n  x = '```'\n  ```", "x = '```'\n"), ("~~~python\nx\n~~~", "~~~python\nx\n~~~"),
    ("```python\r\nx\r\n```\r\nend", "x\r\n"),
    ("1. so:\n   ```python\n   if x:\n       y\n\n   ```", "if x:\n    y\n\n"),
    ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"), ("```python\nx```\n", "x"),
    ("```add(1)``` is 2:\n```python\nx\n```", "x\n"),
])
def test_the_code_is_found_in_its_place(text: str, code: str) -> None:
    assert python_code(text) == code


def test_a_long_completion_is_searched_once() -> None:
    """All of them take a second together; what takes time quadratic in the length would take hours."""
    many = 300_000
    for text in ("```" + "a" * many, "```" + " " * many, "```a" + " a" * many, "```" * many, "`" * many,
                 "<code>" * many, " " * many):
        assert python_code(text) == text
    for text, code in (
        ("```python\n" * many, "```python\n" * (many - 1)), ("```python\n" + "```x\n" * many, "```x\n" * many),
        ("```python\n```" + " " * many + "x", "```" + " " * many + "x"), ("```\n" * many, ""),
    ):
        assert python_code(text) == code


# what it pays


def test_a_completion_earns_what_its_tests_say_also_in_another_process(verifier: CodeVerifier) -> None:
    verifier = pickle.loads(pickle.dumps(verifier))  # noqa: S301, our own bytes
    completions, tests = [RIGHT, WRONG, HALF, "I cannot.", RIGHT], [TESTS, TESTS, TESTS, TESTS, float("nan")]
    assert verifier.verdicts(completions, tests=tests) == [True, False, False, False, None]
    assert verifier.verdicts(completions, tests=[*tests[:4], None]) == [True, False, False, False, None]
    assert verifier.reward()(completions=completions, tests=tests) == [1.0, 0.0, 0.0, 0.0, None]
    assert verifier.reward(2.0, -1.0)(completions=completions, tests=tests) == [2.0, -1.0, -1.0, -1.0, None]
    assert verifier.share()(completions=completions, tests=tests) == [1.0, 0.0, 0.5, 0.0, None]
    chats = [[{"role": "assistant", "content": text}] for text in completions]
    assert verifier.share(2.0)(completions=chats, tests=tests) == [2.0, 0.0, 1.0, 0.0, None]


def test_the_log_says_what_went_wrong(verifier: CodeVerifier) -> None:
    scores = RewardScorer([verifier.reward(), verifier.share()]).score(
        ["p"] * 4, [RIGHT, HALF, "def add(", "```python\n```"], [[1]] * 4, {"tests": [TESTS] * 4}, None
    )
    assert scores.rewards == {"code_passes_tests": [1.0, 0.0, 0.0, 0.0], "code_tests_passed": [1.0, 0.5, 0.0, 0.0]}
    shares = {outcome: scores.metrics[f"tests/{outcome}"] for outcome in OUTCOMES}
    assert shares == {"passed": 3 / 8, "failed": 1 / 8, "error": 2 / 8, "refused": 2 / 8, "timeout": 0.0, "memory": 0.0,
                      "output": 0.0, "files": 0.0}
    assert scores.metrics["verdicts/code_passes_tests"] == 0.25
    assert scores.extras["code_verdict"] == [
        "passed 2", "test 2 of 2: failed: add gave 2, expected 3",
        "test 1 of 2: error: SyntaxError: '(' was never closed (<string>, line 1)", "test 1 of 2: refused: no code",
    ]


def test_model_code_does_not_stop_the_run(verifier: CodeVerifier) -> None:
    bad = [
        "import os\nos._exit(1)", "while True:\n    pass", "raise SystemExit", "x = [0] * 10**10", "\0", "\ud800",
        "(" * 10**5, "import os\nos.kill(os.getppid(), 9)", "while True:\n    print('x' * 999)",
        "def add(a, b):\n    return add(a, b)",
        "class add:\n    def __init__(*a):\n        raise BaseException", "-" * 50_000 + "1",
    ]
    quick = CodeVerifier("tests", verifier.sandbox.isolation, QUICK, 2, python_code, batch_seconds=600)
    assert quick.verdicts(bad, tests=[TESTS] * len(bad)) == [False] * len(bad)


# how often and how long


def test_the_same_code_runs_once(verifier: CodeVerifier, runs: SimpleNamespace) -> None:
    texts = ["one", "two", "one", "one", "wrong"]
    tests = [["assert 1"], ["assert 1"], ["assert 1"], ["assert 2"], ["assert 1"]]
    assert verifier.verdicts(texts, tests=tests) == [True, True, True, True, False]
    assert sorted(runs.codes) == ["one", "one", "two", "wrong"]
    assert verifier.share()(completions=texts, tests=tests) == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert len(runs.codes) == 4
    verifier.verdicts(["three"], tests=[["assert 1"]])
    verifier.verdicts(["one"], tests=[["assert 1"]])
    assert runs.codes[4:] == ["three", "one"]  # what the last call asked is kept, no more


def test_long_arrays_of_tests_that_differ_in_the_middle_are_two_rows(
    verifier: CodeVerifier, runs: SimpleNamespace
) -> None:
    rows = [np.array([f"assert {place + (at == place == 1500)}" for place in range(3000)]) for at in (0, 1500)]
    for tests in (rows, [{"tests": np.array([row, row[:1]], dtype=object)} for row in rows]):
        verifier.verdicts(["code"] * 2, tests=tests)
        verifier.verdicts(["other"], tests=tests[:1])
        assert runs.codes == ["code", "code", "other"]
        runs.codes.clear()


def test_no_more_codes_run_at_a_time_than_asked_for(verifier: CodeVerifier, runs: SimpleNamespace) -> None:
    running: set[str] = set()
    most: list[int] = []
    both = threading.Barrier(2)

    def act(code: str) -> None:
        running.add(code)
        most.append(len(running))
        both.wait(60)
        time.sleep(0.01)  # where more may run, one more begins now
        running.remove(code)

    runs.act = act
    verifier.verdicts([str(number) for number in range(12)], tests=[["assert 1"]] * 12)
    assert max(most) == verifier.workers == 2


def test_slow_codes_do_not_hold_up_the_run(
    verifier: CodeVerifier, runs: SimpleNamespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.05 * len(runs.codes))  # a code takes 0.05 s
    monkeypatch.setattr(code_rewards, "time", clock)
    hurried = CodeVerifier("tests", verifier.sandbox.isolation, QUICK, 1, python_code, batch_seconds=0.12)
    texts = [str(number) for number in range(20)]
    with caplog.at_level(logging.WARNING):
        rewards = hurried.reward()(completions=texts, tests=[["assert 1"]] * 20)
    done = len(runs.codes)
    assert done == 3 and rewards == [1.0] * done + [None] * (20 - done)
    (line,) = [record.getMessage() for record in caplog.records if "not run within" in record.getMessage()]
    assert "raise workers (1)" in line and f"{20 - done} of 20" in line
    assert hurried.share()(completions=texts, tests=[["assert 1"]] * 20) == rewards
    assert len(runs.codes) == done


def test_a_sandbox_that_breaks_down_is_an_error(verifier: CodeVerifier, runs: SimpleNamespace) -> None:
    def act(code: str) -> None:
        if code == "dead" or len(runs.codes) == 1:
            raise CannotStart("out of processes")

    runs.act = act
    assert verifier.verdicts(["x"], tests=[["assert 1"]]) == [True]
    with pytest.raises(SandboxError, match="worked before and no longer does: out of processes"):
        verifier.verdicts(["dead"], tests=[["assert 1"]])


@pytest.mark.parametrize("fault", [CannotStart, KeyboardInterrupt])
def test_after_a_fault_no_other_code_begins(
    verifier: CodeVerifier, runs: SimpleNamespace, fault: type[BaseException]
) -> None:
    go_on = threading.Event()

    def act(code: str) -> None:
        if code == "dead":
            raise fault
        go_on.wait(60)

    runs.act = act
    with pytest.raises((SandboxError, KeyboardInterrupt)):
        verifier.verdicts(["dead", *map(str, range(50))], tests=[["assert 1"]] * 51)
    go_on.set()
    assert len(runs.codes) <= 1 + 1 + 2, "the dead one, once more, and one of each worker"


# bad input


@every_row(("options", "message"), [
    ({"isolation": "docker"}, "isolation is 'docker'"), ({"workers": 0}, "workers is 0"),
    ({"workers": True}, "workers is"), ({"limits": {"seconds": 3}}, "it must be a Limits"),
    ({"batch_seconds": 0}, "batch_seconds is 0"), ({"batch_seconds": None}, "batch_seconds is None"),
    ({"where": "last"}, "where is 'last'; it must be a function"), ({"function": 5}, "column is 5; it must be a text"),
    ({"column": "completions"}, "cannot read a column named completions"),
])
def test_a_setting_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    if why_not("process") and "isolation" not in options:
        pytest.skip("no isolation works here")
    with pytest.raises(ValueError, match=message):
        code_passes_tests(**({"isolation": "process"} | options)).reward()
