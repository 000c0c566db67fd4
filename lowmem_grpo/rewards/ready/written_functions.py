"""Functions that a model wrote, under Unsloth's names. Unsloth runs them in the trainer's own process with fewer names.
Here each call runs in the sandbox, with its arguments and its result as plain data (`rewards.sandbox`)."""

import ast
import builtins
import functools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from lowmem_grpo.rewards.calling.background import start_thread
from lowmem_grpo.rewards.calling.calls import SIGNAL, OverTime, time_limit
from lowmem_grpo.rewards.sandbox.limits import MIB, Limits
from lowmem_grpo.rewards.sandbox.plain import decode, encode
from lowmem_grpo.rewards.sandbox.trial import SandboxError, Trial, open_sandbox, why_refused
from lowmem_grpo.rewards.sandbox.worker import CannotStart, WorkerEnded
from lowmem_grpo.utils import POSITIVE, UnsupportedError, require

LIMITS = Limits(total_seconds=3600.0, output_bytes=16 * MIB)  # a function's process answers many calls
POLICIES = ("allowlist", "full")  # of the names that code may use, in Unsloth
OF_RAISING = (StopIteration, StopAsyncIteration, TimeoutError)  # they mean something else to the caller
UNTIL: ContextVar[float] = ContextVar("until", default=math.inf)  # when `execute_with_time_limit` ends, as monotonic
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class WrittenFunction:
    """A function in the sandbox. A call may last 5 seconds, or within `execute_with_time_limit` as long as that."""

    def __init__(self, name: str, code: str, isolation: str | None) -> None:
        """SandboxError, with the fix, if the sandbox does not work here."""
        try:
            self.trial = Trial(code, open_sandbox(isolation, LIMITS))
        except SandboxError as error:
            say_once(str(error))  # since reward functions often catch every error of a model's code
            raise
        self.__name__, self.lock, self.trial.ends = name, threading.Lock(), math.inf

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result. TimeoutError for a call that takes too long, TypeError for arguments that are not plain
        data, and what the code raises, in the built-in class nearest to it."""
        try:
            request = {"call": self.__name__, "args": encode(args), "kwargs": encode(kwargs)}
        except TypeError as error:
            raise TypeError(f"{self.__name__} runs in the sandbox, and {error}: pass numbers, texts, lists, dicts or "
                            "the like (array.tolist())") from error
        answer = self.answer(request)
        if "value" in answer:
            return decode(answer["value"])
        raise error_of(answer)

    def start(self) -> None:
        """Start the process, if none runs, so that its start does not count as the time of a call."""
        with self.lock, suppress(WorkerEnded, CannotStart):  # a call raises them again
            self.trial.serving()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        until = UNTIL.get()
        with self.lock:
            try:
                return self.trial.ask(request, until if until < math.inf else None)
            except CannotStart as error:
                raise SandboxError(f"the sandbox worked before and no longer does: {error}") from error
            except BaseException as error:
                self.trial.close()  # the next call begins another process
                if not isinstance(error, WorkerEnded):
                    raise
                kind = TimeoutError if error.outcome == "timeout" else RuntimeError
                raise kind(f"{self.__name__}: {error.reason}") from error


def error_of(answer: dict[str, Any]) -> Exception:
    """Return the exception that the code raised. Its process is not trusted: it names only a built-in class."""
    name, text = str(answer.get("error")), str(answer.get("text"))
    kind: Any = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, OF_RAISING):
        return RuntimeError(text)
    try:
        return kind(text.removeprefix(f"{name}: "))
    except Exception:  # noqa: BLE001 - UnicodeDecodeError, for example, takes five values
        return RuntimeError(text)


@functools.cache
def say_once(text: str) -> None:
    logger.error(text)


def create_locked_down_function(
    function: str, *, builtins_policy: str = "allowlist", isolation: str | None = None
) -> WrittenFunction:
    """Return the function of a Python text, whose calls run in the sandbox. RuntimeError for any other text, as in
    Unsloth. Both policies are alike in a sandbox: code may use all built-ins, and import the standard library.
    `isolation` as in `rewards.code_passes_tests`."""
    if builtins_policy not in POLICIES:
        raise ValueError(f"builtins_policy is {builtins_policy!r}; allowed are {', '.join(POLICIES)}")
    if fault := why_refused(function, LIMITS.code_bytes):
        raise RuntimeError(fault)
    try:
        body = [node for node in parsed(function).body
                if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    except SyntaxError as error:
        raise RuntimeError(f"SyntaxError: {error}") from error
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
        raise RuntimeError("the code must be one function, def NAME(...): and nothing beside it")
    return WrittenFunction(body[0].name, function, isolation)


def parsed(code: str) -> ast.Module:
    """Return the syntax tree of code that is never run here; SyntaxError if there is none."""
    try:
        return ast.parse(code[: LIMITS.code_bytes])
    except (MemoryError, RecursionError, ValueError) as error:  # the last for a NUL character
        raise SyntaxError(str(error) or "the code is nested too deeply") from error


def check_python_modules(code: str) -> tuple[bool, dict[str, Any]]:
    """Return whether the code imports only the standard library, and its imports: {"stdlib", "non_stdlib",
    "relative_imports"} (their number), with "error" for code that cannot be parsed."""
    try:
        nodes = [*ast.walk(parsed(code))]
    except SyntaxError as error:
        return False, {"error": f"SyntaxError: {error}", "stdlib": [], "non_stdlib": [], "relative_imports": 0}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [str(node.module) for node in froms if not node.level]
    names = {module.partition(".")[0] for module in modules}
    known = names & sys.stdlib_module_names
    return names == known, {"stdlib": sorted(known), "non_stdlib": sorted(names - known),
                            "relative_imports": sum(node.level > 0 for node in froms)}


def execute_with_time_limit(
    seconds: float, *, backend: str = "signal", **options: Any
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Return a decorator of functions that are to end within so many seconds; TimeoutError otherwise. The function runs
    in this process, in a thread unless it is called in the main thread. No thread can be stopped: there it goes on in
    the background until it ends, or calls a function of `create_locked_down_function`."""
    require("seconds", seconds, POSITIVE)
    if backend not in ("signal", "auto") or options:
        raise UnsupportedError("execute_with_time_limit runs the function in this process, and what "
                               "create_locked_down_function made in a process of its own, which is killed at the "
                               "limit: leave out backend, start_method and kill_grace")

    def decorator(function: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Result:
            for argument in (*args, *kwargs.values()):
                if isinstance(argument, WrittenFunction):
                    argument.start()
            before = UNTIL.set(min(UNTIL.get(), time.monotonic() + seconds))
            try:
                return within(seconds, functools.partial(function, *args, **kwargs))
            except OverTime:
                raise TimeoutError(f"not done within {seconds:g} s") from None
            finally:
                UNTIL.reset(before)

        return limited

    return decorator


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return the result of `call()`. OverTime in the main thread, or else TimeoutError, if it takes longer."""
    if SIGNAL is not None and threading.current_thread() is threading.main_thread():
        with time_limit(seconds):
            return call()
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            future.set_exception(error)

    start_thread("time limit", run)
    try:
        return future.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"not done within {seconds:g} s") from error
