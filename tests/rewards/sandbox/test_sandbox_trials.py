"""The line on the code sandbox in `lowmem-grpo doctor`: true, one line, and never in the way of the other looks."""

import threading
from typing import Any

import pytest

from lowmem_grpo.rewards.sandbox.isolation import BY_DEFAULT, SandboxTrials, why_not


def line(**answers: Any) -> str:
    def tried(name: str) -> str | None:
        answer: str | None = answers[name]() if callable(answers[name]) else answers[name]
        return answer

    return SandboxTrials(tuple(answers), tried).line(wait=60)


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
    answers: dict[str, Any] = {"bubblewrap": lambda: str(end.wait(60)), "process": looked.set}
    trials = SandboxTrials(tuple(answers), lambda name: answers[name]())
    assert looked.wait(60)
    found = trials.line(wait=0.2)
    end.set()
    assert found == "none by default, process if asked for (bubblewrap: no answer yet; process: works)"


def test_it_says_the_same_as_the_sandbox_itself() -> None:
    works = [name for name in [BY_DEFAULT] if why_not(name) is None]
    assert SandboxTrials().line(wait=120).startswith(f"{works[0]} (" if works else "none")
