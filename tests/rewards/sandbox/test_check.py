"""The line on the code sandbox in `lowmem-grpo doctor`: true, one line, and never in the way of the other looks."""

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from lowmem_grpo.rewards.sandbox.check import SandboxTrials


class Isolations:
    """Stands in for sandbox.isolation: for each name an answer, or what gives it."""

    BY_DEFAULT = "bubblewrap"

    def __init__(self, **answers: str | Callable[[], str | None] | None) -> None:
        self.answers, self.ISOLATIONS = answers, tuple(answers)

    def why_not(self, name: str) -> str | None:
        answer = self.answers[name]
        return answer() if callable(answer) else answer


def line(**answers: Any) -> str:
    return SandboxTrials(lambda: Isolations(**answers)).line(wait=60)


def broken() -> str:
    raise RecursionError("too deep")


@pytest.mark.parametrize(("answers", "wanted"), [
    ({"bubblewrap": None, "process": "not\nfound"}, "bubblewrap (process: not found)"),
    ({"bubblewrap": "no user namespaces", "process": None},
     "none by default, process if asked for (bubblewrap: no user namespaces; process: works)"),
    ({"bubblewrap": broken, "process": "c"}, "none (bubblewrap: RecursionError: too deep; process: c)"),
])
def test_the_line_names_the_sandbox_that_the_rewards_take(answers: dict[str, Any], wanted: str) -> None:
    assert line(**answers) == wanted


def test_a_sandbox_that_hangs_does_not_hold_up_the_other_looks() -> None:
    end, looked = threading.Event(), threading.Event()
    trials = SandboxTrials(lambda: Isolations(bubblewrap=lambda: str(end.wait(60)), process=looked.set))
    assert looked.wait(60)
    found = trials.line(wait=0.2)
    end.set()
    assert found == "none by default, process if asked for (bubblewrap: no answer yet; process: works)"


@pytest.mark.parametrize("error", [ImportError("no module"), OSError("broken"), SyntaxError("bad")])
def test_a_broken_sandbox_does_not_end_the_other_looks(error: Exception) -> None:
    def load() -> Any:
        raise error

    assert SandboxTrials(load).line() == f"unknown ({type(error).__name__}: {error})"


def test_it_says_the_same_as_the_sandbox_itself() -> None:
    isolation = import_module("lowmem_grpo.rewards.sandbox.isolation")
    works = [name for name in [isolation.BY_DEFAULT] if isolation.why_not(name) is None]
    assert SandboxTrials(lambda: isolation).line(wait=120).startswith(f"{works[0]} (" if works else "none")
