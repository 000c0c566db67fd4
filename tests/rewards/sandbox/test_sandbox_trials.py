"""The line on the code sandbox in `lowmem-grpo doctor`: true, one line, and never in the way of the other looks."""

import threading
from typing import Any

import pytest

from lowmem_grpo.rewards.sandbox import isolation
from lowmem_grpo.rewards.sandbox.isolation import BY_DEFAULT, SandboxTrials, why_not


def broken() -> str:
    raise RecursionError("too deep")


@pytest.mark.parametrize(("bubblewrap", "process", "wanted"), [
    (lambda: None, lambda: "not\nfound", "bubblewrap (process: not found)"),
    (lambda: "no user namespaces", lambda: None,
     "none by default, process if asked for (bubblewrap: no user namespaces; process: works)"),
    (broken, lambda: "c", "none (bubblewrap: RecursionError: too deep; process: c)"),
])
def test_the_line_names_the_sandbox_that_the_rewards_take(
    bubblewrap: Any, process: Any, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"bubblewrap": bubblewrap, "process": process}
    monkeypatch.setattr(isolation, "why_not", lambda name: answers[name]())
    assert SandboxTrials().line(wait=60) == wanted


def test_a_sandbox_that_hangs_does_not_hold_up_the_other_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    end, looked = threading.Event(), threading.Event()
    monkeypatch.setattr(isolation, "why_not", lambda name: str(end.wait(60)) if name == BY_DEFAULT else looked.set())
    trials = SandboxTrials()
    assert looked.wait(60)
    found = trials.line(wait=0.2)
    end.set()
    assert found == "none by default, process if asked for (bubblewrap: no answer yet; process: works)"


def test_it_says_the_same_as_the_sandbox_itself() -> None:
    works = [name for name in [BY_DEFAULT] if why_not(name) is None]
    assert SandboxTrials().line(wait=120).startswith(f"{works[0]} (" if works else "none")
