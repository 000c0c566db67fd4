"""Python code that must pass a row's tests. It runs in a sandbox and cannot decide its own verdict.

    tests = rewards.code_passes_tests()              # a verifier; `tests` is the dataset's column
    reward_funcs = [tests.reward(), tests.share()]   # 1 if all tests pass; the share of tests that pass

A row's tests are a list (or its JSON text) of asserts, calls or programs, see `sandbox.cases`:

    "assert add(1, 2) == 3"    {"call": "add", "args": [1, 2], "expected": 3}    {"input": "1 2", "output": "3"}

`lowmem_grpo.sandbox` says what the sandbox prevents and what it does not. For several rewards in one run, use
`.reward()` and `.share()` of one verifier, not two verifiers: it keeps its last verdicts, so each code runs once.
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

BATCH_SECONDS = 45.0  # plus the time of the last completion, this stays below the trainer's reward_timeout of 60
FENCED = re.compile(  # possessive: a long first line is read once
    r"^[ \t]*+```[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+```[ \t]*+$|\Z)", re.DOTALL | re.MULTILINE
)
PYTHON = ("python", "py", "python3")
logger = logging.getLogger(__name__)


def python_code(text: str) -> str | None:
    """The code of a completion: its last ```python block, else its last block without a language, else what <code>
    holds, else all of it. A block without its closing fence counts, because that may have been a stop string."""
    blocks = [(found[1].lower(), found[2]) for found in FENCED.finditer(text)]
    for languages in (PYTHON, ("",)):
        if named := [block for language, block in blocks if language in languages]:
            return named[-1]
    return in_tag("code")(text) or text


def code_passes_tests(
    column: str = "tests", isolation: str | None = None, limits: Limits | None = None, workers: int | None = None,
    where: Place = python_code, batch_seconds: float = BATCH_SECONDS,
) -> "CodeVerifier":
    """A verifier of Python: right if the code passes every test of its row, None if the row has no tests.

    `isolation`: None takes bubblewrap or nsjail, whichever works here; "process" is an opt-in to less protection.
    `limits` hold for one completion. `workers` is how many completions run at a time (one per CPU by default). After
    `batch_seconds` no further completion of a call begins: the rest get None, and a warning says so.

    Raises SandboxError, with what to do, if no sandbox works, and ValueError for an unknown isolation, fewer than one
    worker, or no time.
    """
    return CodeVerifier(column, isolation, limits, workers, where, batch_seconds)


class CodeVerifier(Verifier):
    """See `code_passes_tests`. `judge` gives the result of each test, with the reason."""

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
        """The verdicts on N completions, one for each test; None for a row without tests, or if it did not begin.

        A code that comes twice with the same tests runs once. No completion can make this raise an error. Raises
        ValueError for tests that cannot be read and SandboxError if the sandbox stops working.
        """
        rows = {repr(row): row for row in tests if row is not None}
        cases = {name: read_cases(row) for name, row in rows.items()}
        pairs = [None if row is None else (self.where(text) or "", repr(row))
                 for text, row in zip(completions, tests, strict=True)]
        return self._last.recall(pairs, lambda unknown: self._run_all(unknown, cases))

    def _run_all(self, pairs: list[tuple[str, str]], cases: dict[str, list[Case]]) -> list[list[TestVerdict] | None]:
        """Run distinct pairs of a code and the name of its tests, some at a time."""
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
                "%d of %d codes did not run within %g s and get no reward: raise workers (%d), or batch_seconds with "
                "GRPOConfig(reward_timeout=...), or lower limits.seconds (%g)", late, len(pairs), self.batch_seconds,
                self.workers, self.sandbox.limits.seconds,
            )
        return found

    def reward(self, right: float = 1.0, wrong: float = 0.0, name: str | None = None) -> VerifiedReward:
        """Pays `right` if all tests pass, else `wrong`. The share of each outcome is logged as `tests/OUTCOME`."""
        return CodeReward(self, right, wrong, name or self.name)

    def share(self, amount: float = 1.0, name: str = "code_tests_passed") -> "ShareReward":
        """Pays `amount` times the share of tests that pass."""
        return ShareReward(self, amount, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_last"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _last=Memory())


class CodeReward(VerifiedReward):
    """Pays for the verdicts; logs the outcomes of the tests, and for each completion the first test that failed."""

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
    """Pays for the share of a row's tests that pass."""

    def __init__(self, verifier: CodeVerifier, amount: float, name: str) -> None:
        super().__init__(name, verifier.columns)
        self.verifier, self.amount = verifier, float(amount)

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        judged = self.verifier.judge(texts, columns[self.columns[0]])
        return [None if tests is None else self.amount * sum(test.passed for test in tests) / len(tests)
                for tests in judged]


class Memory:
    """The verdicts of the last call, because the next reward asks for those of the same completions again."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list[TestVerdict] | None] = {}
        self.lock = threading.Lock()

    def recall(self, pairs: list[tuple[str, str] | None], run: Any) -> list[list[TestVerdict] | None]:
        """The verdicts of each pair; `run` gets those distinct pairs that are not known yet."""
        with self.lock:
            distinct = list(dict.fromkeys(pair for pair in pairs if pair is not None))
            if not set(distinct) <= set(self.found):
                unknown = [pair for pair in distinct if self.found.get(pair) is None]
                self.found |= zip(unknown, run(unknown), strict=True)
                self.found = {pair: self.found[pair] for pair in distinct}
            return [None if pair is None else self.found[pair] for pair in pairs]


def first_fault(tests: list[TestVerdict] | None) -> str:
    """The first test that did not pass, in one line."""
    if tests is None:
        return "not run"
    for number, test in enumerate(tests, 1):
        if not test.passed:
            return f"test {number} of {len(tests)}: {test.outcome}: {test.reason}"
    return f"passed {len(tests)}"
