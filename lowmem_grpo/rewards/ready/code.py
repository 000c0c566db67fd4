"""Code that must pass a row's tests: the model's Python runs in a sandbox, and cannot decide its own verdict.

    tests = rewards.code_passes_tests()              # a verifier; `tests` is the dataset's column
    reward_funcs = [tests.reward(), tests.share()]   # 1 where all pass; the share that passes

A row's tests are a list (or JSON text of one) of asserts, calls or programs, see `sandbox.cases`:

    "assert add(1, 2) == 3"    {"call": "add", "args": [1, 2], "expected": 3}    {"input": "1 2", "output": "3"}

What the sandbox holds and what it does not is said in `lowmem_grpo.sandbox`. Give `.reward()` and `.share()` of one
verifier to one run rather than two verifiers: verdicts of the same completions are kept for the next question.
"""

import logging
import os
import re
import threading
import time
from collections import Counter
from typing import Any

from lowmem_grpo.rewards.calling.threads import run_side_by_side
from lowmem_grpo.rewards.ready.reading import Place, in_tag
from lowmem_grpo.rewards.reward import MeanOf, Reward
from lowmem_grpo.rewards.verifier import Verdict, VerifiedReward, Verifier
from lowmem_grpo.sandbox.cases import Case, read_cases
from lowmem_grpo.sandbox.isolation import SandboxError, open_sandbox
from lowmem_grpo.sandbox.limits import Limits
from lowmem_grpo.sandbox.trial import OUTCOMES, run_tests
from lowmem_grpo.sandbox.trial import Verdict as TestVerdict
from lowmem_grpo.sandbox.worker import CannotStart

BATCH_SECONDS = 45.0  # with the last completion's own time, below the trainer's reward_timeout of 60
FENCED = re.compile(  # possessive: a long first line is read once
    r"^[ \t]*+```[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+```[ \t]*+$|\Z)", re.DOTALL | re.MULTILINE
)
PYTHON = ("python", "py", "python3")
logger = logging.getLogger(__name__)


def python_code(text: str) -> str | None:
    """The code of a completion: its last ```python block, else its last block of no language, else what <code> holds,
    else all of it. A block that the text's end cuts off counts: a stop string may be the closing fence."""
    blocks = [(found[1].lower(), found[2]) for found in FENCED.finditer(text)]
    for languages in (PYTHON, ("",)):
        if named := [block for language, block in blocks if language in languages]:
            return named[-1]
    return in_tag("code")(text) or text


def code_passes_tests(
    column: str = "tests", isolation: str | None = None, limits: Limits | None = None, workers: int | None = None,
    where: Place = python_code, batch_seconds: float = BATCH_SECONDS,
) -> "CodeVerifier":
    """A verifier of Python: right where the code passes every test of its row, None where the row has none.

    `isolation`: None takes bubblewrap or nsjail, whichever works here; "process" is an opt-in to less protection.
    `limits` are of one completion, `workers` is how many run at a time (the CPUs by default). After `batch_seconds`
    no other completion of a call is begun: the rest get None, and a warning says so.

    Raises SandboxError where no sandbox works (with what to do), ValueError for an unknown isolation, fewer than one
    worker, or no time.
    """
    return CodeVerifier(column, isolation, limits, workers, where, batch_seconds)


class CodeVerifier(Verifier):
    """See `code_passes_tests`; `judge` says what came of each test, and why."""

    def __init__(
        self, column: str, isolation: str | None, limits: Limits | None, workers: int | None, where: Place,
        batch_seconds: float,
    ) -> None:
        if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
            raise ValueError(f"workers is {workers!r}; it must be at least 1, or None for one per CPU")
        if not batch_seconds > 0:
            raise ValueError(f"batch_seconds is {batch_seconds!r}; it must be above 0")
        self.name, self.columns = "code_passes_tests", (column,)
        self.sandbox = open_sandbox(isolation, limits)
        self.workers = workers or len(os.sched_getaffinity(0))
        self.where, self.batch_seconds = where, batch_seconds
        self._last = Memory()

    def verdicts(self, completions: list[str], **columns: list[Any]) -> list[Verdict]:
        judged = self.judge(completions, columns[self.columns[0]])
        return [None if tests is None else all(test.passed for test in tests) for tests in judged]

    def judge(self, completions: list[str], tests: list[Any]) -> list[list[TestVerdict] | None]:
        """A verdict for each test of each of N completions; None for a row without tests, or one that was not begun.

        A code that comes twice with the same tests runs once. Never raises for what a completion holds; ValueError
        for tests that cannot be read, SandboxError where the sandbox stops working.
        """
        rows = {repr(row): row for row in tests if row is not None}
        cases = {name: read_cases(row) for name, row in rows.items()}
        pairs = [None if row is None else (self.where(text) or "", repr(row))
                 for text, row in zip(completions, tests, strict=True)]
        return self._last.recall(pairs, lambda unknown: self._run_all(unknown, cases))

    def _run_all(
        self, pairs: list[tuple[str, str]], cases: dict[str, list[Case]]
    ) -> list[list[TestVerdict] | None]:
        """Run distinct pairs of a code and its tests' name, some at a time."""
        until = time.monotonic() + self.batch_seconds

        def run(pair: tuple[str, str]) -> list[TestVerdict] | None:
            code, row = pair
            if time.monotonic() > until:
                return None
            try:
                return run_tests(code, cases[row], self.sandbox)
            except CannotStart:  # the machine may be short of something for a moment
                return run_tests(code, cases[row], self.sandbox)

        try:
            found = run_side_by_side(run, pairs, self.workers)
        except CannotStart as error:
            raise SandboxError(f"{self.sandbox.isolation} worked before and no longer does: {error}") from error
        if late := found.count(None):
            logger.warning(
                "%d of %d codes were not run within %g s, and get no reward: raise workers (%d), or batch_seconds with "
                "GRPOConfig(reward_timeout=...), or lower limits.seconds (%g)", late, len(pairs), self.batch_seconds,
                self.workers, self.sandbox.limits.seconds,
            )
        return found

    def reward(self, right: float = 1.0, wrong: float = 0.0, name: str | None = None) -> VerifiedReward:
        """Pays `right` where all tests pass, else `wrong`; the outcomes' shares are logged as `tests/OUTCOME`."""
        return CodeReward(self, right, wrong, name or self.name)

    def share(self, amount: float = 1.0, name: str = "code_tests_passed") -> "ShareReward":
        """Pays `amount` times the share of the tests that pass."""
        return ShareReward(self, amount, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_last"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _last=Memory())


class CodeReward(VerifiedReward):
    """A verifier's verdicts as numbers, with what came of the tests and the first reason against each completion."""

    verifier: CodeVerifier

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        judged = self.verifier.judge(texts, columns[self.columns[0]])
        outcomes = Counter(test.outcome for tests in judged for test in tests or [])
        if outcomes and callable(log := call.get("log_metric")):
            for outcome in OUTCOMES:
                log(f"tests/{outcome}", MeanOf(outcomes[outcome] / outcomes.total(), outcomes.total()))
        if callable(log := call.get("log_extra")):
            log("code_verdict", [first_fault(tests) for tests in judged])
        return super().pay(texts, columns, call)


class ShareReward(Reward):
    """The share of a row's tests that pass."""

    def __init__(self, verifier: CodeVerifier, amount: float, name: str) -> None:
        super().__init__(name, verifier.columns)
        self.verifier, self.amount = verifier, float(amount)

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        judged = self.verifier.judge(texts, columns[self.columns[0]])
        return [None if tests is None else self.amount * sum(test.passed for test in tests) / len(tests)
                for tests in judged]


class Memory:
    """What was found of the last call's pairs: the next reward of the same completions asks the same again."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list[TestVerdict] | None] = {}
        self.lock = threading.Lock()

    def recall(self, pairs: list[tuple[str, str] | None], run: Any) -> list[list[TestVerdict] | None]:
        """The verdicts of each pair; `run` gets the distinct ones that are not known yet."""
        with self.lock:
            distinct = list(dict.fromkeys(pair for pair in pairs if pair is not None))
            if not set(distinct) <= set(self.found):
                unknown = [pair for pair in distinct if self.found.get(pair) is None]
                self.found |= zip(unknown, run(unknown), strict=True)
                self.found = {pair: self.found[pair] for pair in distinct}
            return [None if pair is None else self.found[pair] for pair in pairs]


def first_fault(tests: list[TestVerdict] | None) -> str:
    """The first test that did not pass, in a line."""
    if tests is None:
        return "not run"
    for number, test in enumerate(tests, 1):
        if not test.passed:
            return f"test {number} of {len(tests)}: {test.outcome}: {test.reason}"
    return f"passed {len(tests)}"
