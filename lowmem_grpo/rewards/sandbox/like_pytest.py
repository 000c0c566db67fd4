"""A substitute for pytest, which the sandbox lacks: raises, approx, fail, param, mark, fixture, and the fixtures
capsys, monkeypatch and tmp_path."""

import contextlib
import io
import math
import re
import sys
from collections.abc import Callable, Iterator
from types import CoroutineType, FunctionType, GeneratorType, ModuleType, SimpleNamespace
from typing import Any

from lowmem_grpo.rewards.sandbox.remote import run_coroutine


class Raises:
    """The context manager of `with pytest.raises(ValueError, match="no") as info:`."""

    def __init__(self, kinds: Any, match: str | None = None) -> None:
        self.kinds, self.pattern, self.value = kinds, match, None

    def __enter__(self) -> "Raises":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        assert error is not None, f"did not raise {self.kinds}"
        self.value, self.type = error, kind
        return isinstance(error, self.kinds) and (self.pattern is None or self.match(self.pattern))

    def match(self, pattern: str) -> bool:
        """Return True; AssertionError if the pattern does not match within the exception's text."""
        assert re.search(pattern, str(self.value)), f"{self.value} does not match {pattern!r}"
        return True


def raises(kinds: Any, *call: Any, match: str | None = None, **kwargs: Any) -> Any:
    """Return a context manager that expects an exception, or call a function that must raise one."""
    if not call:
        return Raises(kinds, match)
    with Raises(kinds) as info:
        call[0](*call[1:], **kwargs)
    return info


class approx:  # noqa: N801, pytest's name
    """A number, or a sequence or dictionary of numbers, that equals others within a tolerance."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self.expected = expected
        self.options: dict[str, Any] = {"rel": rel, "abs": abs, "nan_ok": nan_ok}

    def __eq__(self, got: Any) -> bool:
        expected = self.expected
        if isinstance(expected, dict | list | tuple):
            many, keys = isinstance(expected, dict), range(len(expected))
            alike = isinstance(got, (dict,) if many else (list, tuple)) and len(got) == len(expected)
            return alike and all((not many or key in got) and approx(expected[key], **self.options) == got[key]
                                 for key in (expected if many else keys))
        if isinstance(expected, bool | str | None) or not isinstance(got, int | float | type(expected)):
            return bool(got == expected)
        rel, least = self.options["rel"], self.options["abs"]
        rel = 1e-6 if rel is None and least is None else rel or 0.0
        near = expected == got or abs(expected - got) <= max(rel * abs(expected), 1e-12 if least is None else least)
        return bool((near and not math.isinf(abs(expected - got))) or expected == got
                    or (self.options["nan_ok"] and math.isnan(expected) and math.isnan(got)))


def fail(reason: str = "", **_: Any) -> None:
    raise AssertionError(reason)


def param(*values: Any, **_: Any) -> Any:
    """Return the values of one case of `mark.parametrize`."""
    return values if len(values) != 1 else values[0]


class Mark:
    """`pytest.mark`: parametrize stores its cases on the function; other marks have no effect."""

    def parametrize(self, names: Any, cases: Any, **_: Any) -> Callable[[Any], Any]:
        split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        rows = [dict(zip(split, case if len(split) > 1 else [case], strict=True)) for case in cases]

        def decorate(test: Any) -> Any:
            test.cases = [row | other for row in rows for other in getattr(test, "cases", [{}])]
            return test

        return decorate

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **_: args[0] if args and isinstance(args[0], FunctionType) else lambda test: test


mark = Mark()


def fixture(function: Any = None, **_: Any) -> Any:
    if function is None:
        return fixture
    function.is_fixture = True
    return function


@contextlib.contextmanager
def fixtures(module: ModuleType, function: Any, case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a test by name: from its case, the module's fixtures, and pytest's own fixtures."""
    import inspect  # slow to import, and only functions need it

    patched = [patch for patch in getattr(function, "patchings", []) if repr(patch.new) == "sentinel.DEFAULT"]
    with contextlib.ExitStack() as stack:  # unittest.mock.patch passes its arguments first
        yield {name: case[name] if name in case else made(module, name, stack)
               for name in list(inspect.signature(function).parameters)[len(patched):]}


def made(module: ModuleType, name: str, stack: contextlib.ExitStack) -> Any:
    """Return the value of a fixture. LookupError for an unknown one."""
    own = getattr(module, name, None)
    if getattr(own, "is_fixture", False):
        assert own is not None
        value = own(**stack.enter_context(fixtures(module, own, {})))
        yields = isinstance(value, GeneratorType)
        return stack.enter_context(contextlib.contextmanager(lambda: value)()) if yields else value
    if name == "monkeypatch":
        from unittest.mock import patch  # slow to import, and rarely needed

        return SimpleNamespace(setattr=lambda target, name, *value: stack.enter_context(
            patch.object(target, name, value[0]) if value else patch(target, name)))
    if name == "tmp_path":
        from pathlib import Path
        from tempfile import mkdtemp

        return Path(mkdtemp(dir="."))
    if name != "capsys":
        raise LookupError(f"there is no fixture {name}")
    streams = [stack.enter_context(redirect(io.StringIO()))
               for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr)]
    return SimpleNamespace(readouterr=lambda: SimpleNamespace(out=taken(streams[0]), err=taken(streams[1])))


def taken(stream: io.StringIO) -> str:
    text = stream.getvalue()
    stream.seek(0)
    stream.truncate()
    return text


def run_all(module: ModuleType) -> None:
    """Run the tests that a module defines, found as by pytest, and propagate the error of the first that fails."""
    for name, member in list(vars(module).items()):
        if name.startswith("test") and isinstance(member, FunctionType) and not getattr(member, "is_fixture", False):
            run(module, member)
        elif name.startswith("Test") and isinstance(member, type) and not hasattr(member, "runTest") and not (
                hasattr(member, "assertEqual")):
            run_class(module, member)
    if "unittest" in sys.modules:
        import unittest

        unittest.defaultTestLoader.loadTestsFromModule(module).debug()


def run_class(module: ModuleType, kind: type) -> None:
    for name in [name for name in dir(kind) if name.startswith("test")]:
        instance = kind()
        for step in ("setup_class", "setup_method", name, "teardown_method", "teardown_class"):
            if (method := getattr(instance, step, None)) is not None:
                run(module, method)


def run(module: ModuleType, test: Any) -> None:
    for case in getattr(test, "cases", [{}]):
        with fixtures(module, test, case) as arguments:
            result = test(**arguments)
            if isinstance(result, CoroutineType):
                run_coroutine(result)
