r"""A verifier of mathematical equality by the package math-verify: 1/2 equals \frac{1}{2}, and x+1 equals 1+x."""

import json
import logging
import subprocess
import sys
import tempfile
import threading
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowmem_grpo.rewards.reading import Finder, boxed
from lowmem_grpo.rewards.ready.answers import same_answer, same_text
from lowmem_grpo.rewards.reward import Verdict, Verifier, any_of, check_settings

logger = logging.getLogger(__name__)

SECONDS = 2.0  # CPU time of one comparison
MAX_KILLED = 5  # comparisons of one call that may run out of time; further ones are not made: no verdict
REMEMBERED = 100_000  # cached comparisons: most pairs occur many times in a run


class TooSlowError(RuntimeError):
    """A comparison exceeded its time or memory."""


class MathWorker:
    """The client of a process that compares answers, which is started on first use, and again after it was killed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        self.known: dict[tuple[str, str], bool] = {}

    def ask(self, label: str, answer: str) -> bool:
        """Return whether label and answer are equal. TooSlowError if the comparison takes too much time or memory."""
        with self.lock:
            if (label, answer) not in self.known:
                self.start()
                if len(self.known) >= REMEMBERED:
                    self.known.clear()
                self.known[label, answer] = False  # stays False if the comparison kills the process
                self.known[label, answer] = self.compare(label, answer)
            return self.known[label, answer]

    def start(self) -> None:
        """Start the process unless it is alive. RuntimeError if it does not start."""
        if self.process is not None and self.process.poll() is None:
            return
        worker = Path(__file__).with_name("math_worker.py")
        with tempfile.TemporaryFile() as words:
            self.process = subprocess.Popen(  # -P: do not import from the folder of this file
                [sys.executable, "-P", str(worker), str(SECONDS)], text=True, encoding="utf-8",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words,
            )
            assert self.process.stdout is not None
            if self.process.stdout.readline().strip() != "ready":
                self.close()
                words.seek(0)
                last = words.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
                raise RuntimeError(f"the process that compares mathematics does not start: {last or 'it says nothing'}")

    def compare(self, label: str, answer: str) -> bool:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([label, answer]) + "\n")
            self.process.stdin.flush()
            said = self.process.stdout.readline()
        except BrokenPipeError:
            said = ""
        if not said:
            self.close()
            raise TooSlowError(f"comparing {answer[:60]!r} took more than {SECONDS:g} s or too much memory")
        equal: bool = json.loads(said)
        return equal

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


WORKER = MathWorker()  # one per Python process, since importing math-verify takes a second


def refuse(label: str, answer: str) -> bool:
    """Raise TooSlowError in place of a comparison, after too many comparisons ran out of time."""
    raise TooSlowError(f"{label} and {answer} are not compared")


class MathMatch(Verifier):
    """The verifier that `math_match` returns."""

    def __init__(self, column: str, where: Finder) -> None:
        check_settings(same_text, column, {"where": where})
        self.name, self.columns, self.where = "math_match", (column,), where

    def verdicts(self, completions: list[str], **columns: list[Any]) -> list[Verdict]:
        killed = 0
        verdicts: list[Verdict] = []
        for text, label in zip(completions, columns[self.columns[0]], strict=True):
            try:
                answer, ask = self.where(text), WORKER.ask if killed < MAX_KILLED else refuse
                verdicts.append(any_of(label, partial(same_answer, answer, ask=ask)))
            except TooSlowError as error:
                killed += 1
                verdicts.append(False if killed <= MAX_KILLED else None)
                if killed <= MAX_KILLED:
                    logger.warning("math_match: %s; it counts as wrong", error)
        return verdicts


def math_match(column: str = "answer", where: Finder = boxed) -> MathMatch:
    r"""Return a verifier: the answer, by default in the last \boxed{...}, is mathematically equal to the label.

    Equal texts and numbers are recognised at once. Other pairs are compared by math-verify in a separate process, in a
    few milliseconds for each new pair. If a comparison takes more than 2 s of CPU time, the process is killed, and the
    answer counts as wrong. After 5 such comparisons in one call, answers that need a comparison get None. ImportError
    if math-verify is not installed; a verdict raises RuntimeError if the process does not start.
    """
    if find_spec("math_verify") is None:
        raise ImportError("math_match needs the package math-verify: pip install math-verify; boxed_match compares "
                          "numbers and text without it")
    return MathMatch(column, where)
