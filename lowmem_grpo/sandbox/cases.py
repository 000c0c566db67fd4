"""The tests of a dataset row, read into three kinds. A row that cannot be read is the dataset's fault, and an error."""

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
    """Python that passes where it runs to its end; `names` are what it takes from the code under test."""

    source: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class CallCase:
    """A function (or "Solution.method") with encoded arguments, and the encoded result that it must give."""

    name: str
    args: Any
    kwargs: Any
    expected: Any


@dataclass(frozen=True)
class ProgramCase:
    """What the whole code, run as a script, reads and must print; white space at the ends of lines does not count."""

    stdin: str
    stdout: str


Case = AssertCase | CallCase | ProgramCase


def read_cases(tests: Any) -> list[Case]:
    """The cases of a row: a list of tests, one test, or JSON text of a list. ValueError for what is none of these."""
    if isinstance(tests, str) and tests.lstrip().startswith("[") and (parsed := from_json(tests)) is not None:
        tests = parsed
    listed = [tests] if isinstance(tests, str | dict) else tests
    if not isinstance(listed, list | tuple) or not listed:
        raise ValueError(f"tests are {tests!r:.100}; {ALLOWED}, at least one of them in a list")
    return [read_case(test) for test in listed]


def from_json(text: str) -> list[Any] | None:
    """The list that a JSON text holds, None where it is something else."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def read_case(test: Any) -> Case:
    """One test. Keys that are None count as absent, as datasets fill them in. ValueError names what is allowed."""
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
    """ValueError for a program's input or output that no file can hold."""
    try:
        f"{test['input']}{test['output']}".encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a test is {test!r:.100}; it is not valid Unicode: {error}") from error


def free_names(source: str) -> tuple[str, ...]:
    """Names that test code uses and neither sets itself nor has from Python. ValueError where it does not parse.

    The code under test answers for these alone, so it cannot put itself in the place of `abs` or `sorted`.
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
