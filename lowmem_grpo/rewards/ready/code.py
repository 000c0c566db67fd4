"""The verifier of Python code by a row's tests. The code runs in a sandbox, and cannot forge its verdict.

    tests = rewards.code_passes_tests()              # a verifier; `tests` is the dataset's column
    reward_funcs = [tests.reward(), tests.share()]   # 1 if all tests pass; the share of tests that pass

Make both rewards from one verifier: it keeps its last verdicts, so that each completion runs only once. docs/rewards.md
has the layouts of tests, and `lowmem_grpo.rewards.sandbox` says what the sandbox prevents.
"""

import logging
import os
import re
import time
from collections import Counter
from typing import Any

from lowmem_grpo.data.code_tests import function_in
from lowmem_grpo.rewards.calling.background import run_side_by_side
from lowmem_grpo.rewards.reading import Finder, in_tag
from lowmem_grpo.rewards.reward import AMOUNT, FINDER, MeanOf, Reward, Verdict, VerifiedReward, Verifier
from lowmem_grpo.rewards.sandbox.cases import AssertCase, Case, read_cases
from lowmem_grpo.rewards.sandbox.limits import Limits
from lowmem_grpo.rewards.sandbox.trial import OUTCOMES, SandboxError, open_sandbox, run_tests
from lowmem_grpo.rewards.sandbox.trial import Verdict as TestVerdict
from lowmem_grpo.rewards.sandbox.worker import CannotStart
from lowmem_grpo.rewards.texts import values_of
from lowmem_grpo.utils import as_python, at_least, number, require

BATCH_SECONDS = 45.0  # with the time of the last completion, this stays below the trainer's reward_timeout of 60
FENCED = re.compile(  # with possessive quantifiers, so that a long first line is scanned only once
    r"^([ \t]*+)(`{3,}+)[ \t]*+([\w+-]*+)[^\n`]*+\n(.*?)(?:^[ \t]*+\2`*+[ \t\r]*+$|\2\s*+\Z|\Z)",
    re.DOTALL | re.MULTILINE,
)
PYTHON = ("python", "py", "python3")
logger = logging.getLogger(__name__)


def python_code(text: str) -> str | None:
    """Return the code of a completion: its last ```python block, else its last block without a language, else the
    content of <code>, else the whole text. A block may lack the closing fence, which may have been a stop string."""
    blocks = [(language.lower(), re.sub(f"(?m)^[ \t]{{1,{len(indent)}}}", "", code) if indent else code)
              for indent, _, language, code in FENCED.findall(text)]
    for languages in (PYTHON, ("",)):
        if named := [block for language, block in blocks if language in languages]:
            return named[-1]
    return in_tag("code")(text) or text


def code_passes_tests(
    column: str = "tests", isolation: str | None = None, limits: Limits | None = None, workers: int | None = None,
    where: Finder = python_code, batch_seconds: float = BATCH_SECONDS, function: str | None = None,
) -> "CodeVerifier":
    """Return a verifier of Python: right if every test of the row passes, wrong if a test fails, else None: the row has
    no tests, or a test gives no verdict.

    `function` is the column that names the tested function if the tests do not: HumanEval's entry_point,
    LiveCodeBench's metadata. `isolation`: None is bubblewrap; "process" protects less. `limits` apply to each
    completion. `workers` completions run at a time, by default one per CPU. Completions that have not begun after
    `batch_seconds` of a call get None, with a warning.

    SandboxError, with the fix, if the isolation does not work here; ValueError for an invalid setting.
    """
    return CodeVerifier(column, isolation, limits, workers, where, batch_seconds, function)


class CodeVerifier(Verifier):
    """The verifier that `code_passes_tests` returns. `judge` returns the result of each test, with the reason."""

    def __init__(self, column: str, isolation: str | None, limits: Limits | None, workers: int | None, where: Finder,
                 batch_seconds: float, function: str | None = None) -> None:
        if workers is not None:
            require("workers", workers, at_least(1, int), ", or None for one per CPU")
        require("batch_seconds", batch_seconds, number("above 0", lambda seconds: seconds > 0))
        require("where", where, FINDER)
        self.name, self.columns = "code_passes_tests", (column,) if function is None else (column, function)
        self.sandbox = open_sandbox(isolation, limits)
        self.workers = workers or len(os.sched_getaffinity(0))
        self.where, self.batch_seconds = where, batch_seconds
        self._last: dict[tuple[str, str], list[TestVerdict] | None] = {}  # the last call's results, for `share`
        self.said: set[str] = set()  # the reasons for no verdict that have been logged

    def verdicts(self, completions: list[str], **columns: list[Any]) -> list[Verdict]:
        return [verdict_of(tests) for tests in self.judge(completions, *self.split_columns(columns))]

    def split_columns(self, columns: dict[str, list[Any]]) -> tuple[list[Any], list[Any] | None]:
        """Return (tests, names of the tested functions) of N rows; the names are None if no column holds them."""
        tests, *functions = (columns[name] for name in self.columns)
        return tests, functions[0] if functions else None

    def judge(
        self, completions: list[str], tests: list[Any], functions: list[Any] | None = None, skip_faulty: bool = False
    ) -> list[list[TestVerdict] | None]:
        """Return each completion's verdicts on its tests; None for a row without tests, or if the code did not begin in
        time. ValueError for unreadable tests (None with `skip_faulty`), SandboxError if the sandbox stops working."""
        rows = [None if is_absent(row) else (as_python(row), function_in(name)) for row, name in
                zip(tests, functions or [None] * len(tests), strict=True)]
        known = {repr(row): row for row in rows if row is not None}
        faulty = {name for name, row in known.items() if skip_faulty and unreadable(*row)}
        cases = {name: read_cases(*row) for name, row in known.items() if name not in faulty}
        pairs = [(self.where(text) or "", repr(row)) if repr(row) in cases else None
                 for text, row in zip(completions, rows, strict=True)]
        distinct, last = list(dict.fromkeys(filter(None, pairs))), self._last
        if not set(distinct) <= last.keys():
            unknown = [pair for pair in distinct if last.get(pair) is None]
            ran = dict(zip(unknown, self._run_all(unknown, cases), strict=True))
            self._last = last = {pair: ran[pair] if pair in ran else last[pair] for pair in distinct}
        return [None if pair is None else last[pair] for pair in pairs]

    def _run_all(self, pairs: list[tuple[str, str]], cases: dict[str, list[Case]]) -> list[list[TestVerdict] | None]:
        """Run distinct pairs (code, key of its tests in `cases`), `workers` at a time."""
        until = time.monotonic() + self.batch_seconds

        def run(pair: tuple[str, str]) -> list[TestVerdict] | None:
            code, row = pair
            if time.monotonic() > until:
                return None
            try:
                return run_tests(code, cases[row], self.sandbox)
            except CannotStart:  # once more, since the machine may lack a resource only for a moment
                return run_tests(code, cases[row], self.sandbox)

        try:
            results = run_side_by_side(run, pairs, self.workers)
        except CannotStart as error:
            raise SandboxError(f"{self.sandbox.isolation} worked before and no longer does: {error}") from error
        if late := results.count(None):
            logger.warning("%d of %d codes did not run within %g s and get no reward: raise workers (%d), or "
                           "batch_seconds with GRPOConfig(reward_timeout=...), or lower limits.seconds (%g)",
                           late, len(pairs), self.batch_seconds, self.workers, self.sandbox.limits.seconds)
        return results

    def reward(self, right: float = 1.0, wrong: float = 0.0, name: str | None = None) -> VerifiedReward:
        """Return a reward: `right` if all tests pass, else `wrong`. It logs each outcome's share as `tests/OUTCOME`."""
        return CodeReward(self, right, wrong, name or self.name)

    def share(self, amount: float = 1.0, name: str = "code_tests_passed") -> "ShareReward":
        """Return a reward of `amount` times the share of tests that pass."""
        return ShareReward(self, amount, name)


class OfTests(Reward):
    """A reward from the verdicts on a row's tests. Each reason for a test without a verdict is logged once."""

    verifier: CodeVerifier

    def fault_of_row(self, row: dict[str, Any]) -> str | None:
        tests, *functions = (row.get(name) for name in self.columns)
        if is_absent(tests):
            return None
        function = function_in(functions[0]) if functions else None
        if fault := unreadable(tests, function):
            return fault
        faults = [case.fault for case in read_cases(tests, function) if isinstance(case, AssertCase) and case.fault]
        return f"no code can pass a test: {faults[0]}" if faults else None

    def judge(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[Any]:
        """Return the result of `CodeVerifier.judge`, and log the outcomes and faults of the tests."""
        judged = self.verifier.judge(texts, *self.verifier.split_columns(columns), skip_faulty=True)
        log = call.get("log_metric")
        outcomes = Counter(test.outcome for tests in judged for test in tests or [] if not test.untestable)
        if outcomes and callable(log) and isinstance(self, CodeReward):
            for outcome in OUTCOMES:
                log(f"tests/{outcome}", MeanOf(outcomes[outcome] / outcomes.total(), outcomes.total()))
        rows = [{name: columns[name][place] for name in self.columns} for place in range(len(texts))]
        faults = [untestable(tests) if tests else self.fault_of_row(row)
                  for row, tests in zip(rows, judged, strict=True)]
        if reasons := [fault for fault in faults if fault]:
            if callable(log):
                log("tests/no_verdict", MeanOf(len(reasons) / len(faults), len(faults)))
            self.say(reasons, rows[faults.index(reasons[0])], len(faults))
        return judged

    def say(self, faults: list[str], row: dict[str, Any], total: int) -> None:
        if new := [fault for fault in dict.fromkeys(faults) if fault not in self.verifier.said]:
            self.verifier.said |= set(new)
            logger.warning("%s has no verdict on %d of %d completions: %s (the row's tests: %.200r). Correct these "
                           "rows, or leave them out", self.__name__, len(faults), total, new[0], row[self.columns[0]])


class CodeReward(OfTests, VerifiedReward):
    """Pays for verdicts; logs the outcomes of the tests, and for each completion the first test that did not pass."""

    verifier: CodeVerifier

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        judged = self.judge(texts, columns, call)
        if callable(log := call.get("log_extra")):
            log("code_verdict", [first_fault(tests) for tests in judged])
        return self.paid([verdict_of(tests) for tests in judged], call)


class ShareReward(OfTests):
    """Pays for the share of passed tests, among the row's tests that have a verdict."""

    def __init__(self, verifier: CodeVerifier, amount: float, name: str) -> None:
        super().__init__(name, verifier.columns)
        require("amount", amount, AMOUNT)
        self.verifier, self.amount = verifier, float(amount)

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        told = [[test.passed for test in tests or [] if not test.untestable]
                for tests in self.judge(texts, columns, call)]
        return [self.amount * sum(passed) / len(passed) if passed else None for passed in told]


def is_absent(tests: Any) -> bool:
    """Return whether a row has no tests: None, or pandas' NaN."""
    return not isinstance(tests, list | tuple | dict | str) and not values_of(tests)


def unreadable(tests: Any, function: str | None = None) -> str | None:
    """Return the reason why a row's tests cannot be read; None if they can."""
    try:
        read_cases(tests, function)
    except ValueError as error:
        return str(error)
    return None


def verdict_of(tests: list[TestVerdict] | None) -> Verdict:
    """Return the verdict on a completion: False if a test failed, True if all tests passed, else None."""
    if tests is None or (untestable(tests) and all(test.passed or test.untestable for test in tests)):
        return None
    return all(test.passed for test in tests)


def untestable(tests: list[TestVerdict] | None) -> str | None:
    """Return why the first test without a verdict has none; None if every test has a verdict."""
    return next((f"a test has no verdict: {test.reason}" for test in tests or [] if test.untestable), None)


def first_fault(tests: list[TestVerdict] | None) -> str:
    if tests is None:
        return "not run"
    for place, test in enumerate(tests, 1):
        if not test.passed:
            return f"test {place} of {len(tests)}: {test.outcome}: {test.reason}"
    return f"passed {len(tests)}"
