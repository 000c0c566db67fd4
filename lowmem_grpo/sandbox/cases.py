"""Reads the tests of a dataset row into three kinds. A row that cannot be read is an error of the dataset."""

import ast
import builtins
import json
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.sandbox.plain import encode

ALLOWED = (
    'allowed are test code ("assert add(1, 2) == 3"), {"call": "add", "args": [1, 2], "expected": 3} and '
    '{"input": "1 2", "output": "3"}'
)


@dataclass(frozen=True)
class AssertCase:
    """Python code that passes if it runs to its end. `names` are those that it uses from the code under test."""

    source: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class CallCase:
    """A function (or "Solution.method") with encoded arguments, and the encoded result that it must return."""

    name: str
    args: Any
    kwargs: Any
    expected: Any


@dataclass(frozen=True)
class ProgramCase:
    """What the code reads and must print as a script. White space at the ends of lines does not count."""

    stdin: str
    stdout: str


Case = AssertCase | CallCase | ProgramCase


def read_cases(tests: Any) -> list[Case]:
    """The cases of a row: a list of tests, a single test, or the JSON text of a list. ValueError for anything else."""
    if isinstance(tests, str) and tests.lstrip().startswith("[") and (parsed := from_json(tests)) is not None:
        tests = parsed
    listed = [tests] if isinstance(tests, str | dict) else tests
    if not isinstance(listed, list | tuple) or not listed:
        raise ValueError(f"tests are {tests!r:.100}; {ALLOWED}, at least one of them in a list")
    return [read_case(test) for test in listed]


def from_json(text: str) -> list[Any] | None:
    """The list in a JSON text; None if it holds something else."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def read_case(test: Any) -> Case:
    """One test. Keys that are None count as absent, because datasets add them. The ValueError names what is allowed."""
    if isinstance(test, str) and test.strip():
        return AssertCase(test, free_names(test))
    given = {key: value for key, value in test.items() if value is not None} if isinstance(test, dict) else {}
    if set(given) == {"input", "output"} and all(isinstance(text, str) for text in given.values()):
        check_unicode(test)
        return ProgramCase(given["input"], given["output"])
    if "call" in given and set(given) <= {"call", "args", "kwargs", "expected"} and isinstance(given["call"], str):
        args, kwargs = given.get("args", []), given.get("kwargs", {})
        if isinstance(args, list | tuple) and isinstance(kwargs, dict) and "expected" in test:
            return CallCase(given["call"], encode(tuple(args)), encode(kwargs), encode(test["expected"]))
    raise ValueError(f"a test is {test!r:.100}; {ALLOWED}")


def check_unicode(test: dict[str, Any]) -> None:
    """Raises ValueError if no file can hold a program's input or output."""
    try:
        f"{test['input']}{test['output']}".encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a test is {test!r:.100}; it is not valid Unicode: {error}") from error


def free_names(source: str) -> tuple[str, ...]:
    """The names that test code uses and that neither it nor Python defines. ValueError if it does not parse.

    Only these come from the code under test, so it cannot replace `abs` or `sorted`.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"test code {source!r:.100} is not Python: {error}") from error
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    imported = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    bound |= {(alias.asname or alias.name).partition(".")[0] for alias in imported}
    return tuple(sorted(used - bound - set(dir(builtins)) - {"__name__", "__file__"}))
