"""Functions of a model run in the sandbox under Unsloth's names, and end in time."""

import gc
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sandboxed import descendants, working_isolation
from tables import every_row

import lowmem_grpo
from lowmem_grpo.rewards.ready import written_functions
from lowmem_grpo.rewards.ready.written_functions import (
    check_python_modules,
    create_locked_down_function,
    execute_with_time_limit,
)
from lowmem_grpo.rewards.sandbox.trial import SandboxError
from lowmem_grpo.utils import UnsupportedError

ADD = "def add(a, b):\n    def adder(a):\n        return a + b\n    return adder(b) + b\n"  # of Unsloth's notebook
ENDLESS = "def wait():\n    while True:\n        pass\n"
LONG, SHORT = 600.0, 0.2  # seconds that no machine needs, and that an endless loop passes on each


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After every test: no process of a function, once the frames that pytest's exceptions hold are collected."""
    yield
    if descendants():
        gc.collect()
    deadline = time.monotonic() + 60
    while (left := descendants()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, "these processes did not end in a minute"


def made(code: str) -> Any:
    return create_locked_down_function(code, isolation=working_isolation())


def test_unsloths_names_are_at_the_top() -> None:
    for name in ("create_locked_down_function", "execute_with_time_limit", "check_python_modules"):
        assert getattr(lowmem_grpo, name) is getattr(written_functions, name)
    with pytest.raises(UnsupportedError, match=r"create_locked_down_function\(code\), whose calls run in a sandbox"):
        lowmem_grpo.Benchmarker  # noqa: B018


@every_row(("code", "arguments", "wanted"), [
    (ADD, (10, 20), 60), ("def strategy(board):\n    return 'W'", ([[0, 2], [4, 0]],), "W"),
    ('"""Words."""\ndef root(a: float) -> float:\n    import math\n    return math.sqrt(a)', (2.25,), 1.5),
    ("def turned(rows):\n    rows[0].append(9)\n    return [*zip(*rows)]", ([[1, 2], [3, 4]],), [(1, 3), (2, 4)]),
])
def test_a_call_gives_what_python_gives(code: str, arguments: tuple[Any, ...], wanted: Any) -> None:
    before = repr(arguments)
    assert made(code)(*arguments) == wanted and repr(arguments) == before, "what is passed is a copy"


def test_it_runs_in_another_process_which_answers_many_calls_and_keyword_arguments() -> None:
    one = made("def count(start, *, by=1, seen=[]):\n    import os\n    seen.append(by)\n"
               "    return os.getpid(), start + sum(seen)")
    (first, two), (second, five) = one(1), one(start=1, by=3)
    assert (two, five) == (2, 5) and first == second and (one.__name__, first != os.getpid()) == ("count", True)


@every_row(("body", "kind", "words"), [
    ("np.matmul", NameError, "^name 'np' is not defined$"), ("1 / 0", ZeroDivisionError, "^division by zero$"),
    ("import numpy", ModuleNotFoundError, "numpy"), ("class Own(KeyError): pass\n    raise Own(3)", KeyError, "3"),
    ("raise SystemExit(3)", RuntimeError, "3"), ("raise KeyboardInterrupt", RuntimeError, "."),
    ("raise StopIteration(3)", RuntimeError, "3"), ("raise TimeoutError('I')", RuntimeError, "I"),
    ("b'\\xff'.decode()", RuntimeError, "can't decode"), ("import os; os._exit(0)", RuntimeError, "ended"),
    ("return object()", TypeError, "plain data"), ("import os; os.fork()", PermissionError, "."),
])
def test_what_the_code_raises_is_raised_and_nothing_that_would_end_a_run(body: str, kind: Any, words: str) -> None:
    one = made(f"def f(fails):\n    if not fails:\n        return 7\n    {body}")
    for _ in range(2):
        with pytest.raises(kind, match=words) as caught:
            one(True)
        assert type(caught.value) is kind and one(False) == 7


def test_arguments_that_are_no_plain_data_are_refused_with_what_to_pass() -> None:
    with pytest.raises(TypeError, match=r"add runs in the sandbox, and a object is not plain data: pass numbers"):
        made(ADD)(object(), 2)


@every_row(("code", "why"), [
    ("", "no code"), ("def a", "SyntaxError"), ("x = 1", "must be one function"), (f"{ADD}add(1, 2)", "one function"),
    (ADD + ADD, "one function"), ("async def f(): pass", "one function"), ("lambda: 1", "one function"),
    ("-" * 90_000, "nested too deeply"), ("def f():\n    '\0'", "NUL"), ("#" * 200_000, "bytes"),
])
def test_a_text_that_is_no_function_is_refused(code: str, why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        made(code)


@every_row("in_thread", [False, True])
@every_row("where", ["in the code", "around it"])
def test_what_does_not_end_is_ended(in_thread: bool, where: str) -> None:
    """An endless loop in the sandbox, and one in the trainer's process that calls a quick function for ever."""
    one, caught = made(ENDLESS if where == "in the code" else "def wait():\n    return 1"), list[BaseException]()
    ended = threading.Event()

    @execute_with_time_limit(SHORT)
    def play(one: Any) -> None:
        try:
            while True:
                one()
        finally:
            ended.set()

    def call() -> None:
        with pytest.raises(TimeoutError) as error:
            play(one)
        caught.append(error.value)

    if in_thread:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(LONG)
    else:
        call()
    assert type(caught[0]) is TimeoutError and ended.wait(LONG)
    assert execute_with_time_limit(LONG)(made(ADD))(1, 2) == 6, "the limit has gone with the call"


def test_results_and_errors_pass_through_a_time_limit_in_each_thread() -> None:
    @execute_with_time_limit(LONG)
    def divided(a: int, b: int) -> float:
        """Divides."""
        return a / b

    found: list[Any] = []

    def call() -> None:
        found.append(divided(1, b=2))
        with pytest.raises(ZeroDivisionError) as caught:
            divided(1, 0)
        found.append(caught.type)

    call()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(LONG)
    assert found == [0.5, ZeroDivisionError] * 2 and divided.__doc__ == "Divides."


def test_a_limit_that_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds is 0; it must be above 0"):
        execute_with_time_limit(0)
    for options in ({"backend": "process"}, {"kill_grace": 2.0}):
        with pytest.raises(UnsupportedError, match="leave out backend, start_method and kill_grace"):
            execute_with_time_limit(2, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="builtins_policy is 'none'; allowed are allowlist, full"):
        create_locked_down_function(ADD, builtins_policy="none")


@every_row(("code", "right", "found"), [
    ("import math, os.path\nfrom typing import Any\nfrom __future__ import annotations", True,
     {"stdlib": ["__future__", "math", "os", "typing"], "non_stdlib": [], "relative_imports": 0}),
    ("def f():\n    from numpy.linalg import norm\n    import torch as math", False,
     {"stdlib": [], "non_stdlib": ["numpy", "torch"], "relative_imports": 0}),
    ("from . import one\nfrom .two import three", True, {"stdlib": [], "non_stdlib": [], "relative_imports": 2}),
])
def test_imports_of_code_are_told_without_running_it(code: str, right: bool, found: dict[str, Any]) -> None:
    assert check_python_modules(code) == (right, found)


@every_row("code", ["def a", "-" * 90_000, "a\0b"])
def test_code_that_cannot_be_parsed_has_an_error(code: str) -> None:
    right, told = check_python_modules(code)
    assert not right and told.pop("error").startswith("SyntaxError: ")
    assert told == {"stdlib": [], "non_stdlib": [], "relative_imports": 0}


def test_where_no_sandbox_works_a_reward_that_catches_everything_still_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise SandboxError("no sandbox. What to do: install bubblewrap")

    monkeypatch.setattr(written_functions, "open_sandbox", fails)
    written_functions.say_once.cache_clear()
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            with pytest.raises(SandboxError, match="install bubblewrap"):
                create_locked_down_function(ADD)
    assert caplog.text.count("install bubblewrap") == 1
