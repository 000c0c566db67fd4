"""The three kinds of tests, and the reader of a dataset row's tests."""

import ast
import builtins
import sys
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.data.code_tests import tests_in
from lowmem_grpo.rewards.sandbox.plain import encode

ALLOWED = (
    'allowed are test code ("assert add(1, 2) == 3"), {"call": "add", "args": [1, 2], "expected": 3}, '
    '{"input": "1 2", "output": "3"}, and the layouts of public datasets in docs/rewards.md'
)
NO_RESULT = object()  # no second result is right
THIRD_PARTY = {  # any other import that the standard library lacks means the code under test
    "numpy", "pandas", "scipy", "sympy", "sklearn", "torch", "tensorflow", "jax", "matplotlib", "seaborn", "networkx",
    "requests", "httpx", "aiohttp", "flask", "django", "fastapi", "pydantic", "sqlalchemy", "yaml", "bs4", "lxml",
    "nltk", "cv2", "PIL", "hypothesis", "parameterized", "freezegun", "faker", "mock",
}
OURS = {"pytest", "__future__"}


@dataclass(frozen=True)
class AssertCase:
    """Python code that passes if it, and the tests that it defines, run without an error."""

    source: str
    names: tuple[str, ...]  # names that it uses from the code under test
    modules: tuple[str, ...] = ()  # module names under which it imports the code under test
    fault: str = ""  # the reason why no code can pass it


@dataclass(frozen=True)
class CallCase:
    """A function (or "Solution.method") with encoded arguments, and the encoded result that it must return."""

    name: str
    args: Any
    kwargs: Any
    expected: Any
    json: bool = False  # the result was written as JSON, which has no tuples, and only text keys
    also: Any = NO_RESULT  # another right result


@dataclass(frozen=True)
class ProgramCase:
    """A run of the code as a script: its standard input and expected output. White space at line ends is ignored."""

    stdin: str
    stdout: str


Case = AssertCase | CallCase | ProgramCase


def read_cases(tests: Any, function: str | None = None) -> list[Case]:
    """Return a row's cases, in any layout of `data.code_tests`; ValueError for another. `function` names the tested
    function if another column holds it: HumanEval's entry_point, LiveCodeBench's metadata."""
    listed = tests_in(tests, function)
    if not listed or (not isinstance(tests, str | dict | list | tuple) and listed[0] is tests):
        raise ValueError(f"tests are {tests!r:.100}; {ALLOWED}, at least one of them in a list")
    wrapped = [test for test in listed if isinstance(test, dict) and test.get("wrapped")]
    each_alone = bool(wrapped) and all(len(test["expected"]) == 1 for test in wrapped)
    return [read_case(test, each_alone) for test in listed]


def read_case(test: Any, each_alone: bool = False) -> Case:
    """Return one test; keys with the value None count as absent. ValueError for an unknown layout. With `each_alone`, a
    test with the key `wrapped` has its expected result in a list, and the value in the list is right too."""
    if isinstance(test, str) and test.strip():
        return read_code(test)
    entries = {key: value for key, value in test.items() if value is not None} if isinstance(test, dict) else {}
    if set(entries) == {"code", "function"}:
        return read_code(entries["code"], entries["function"])
    if set(entries) == {"input", "output"} and all(isinstance(text, str) for text in entries.values()):
        try:
            f"{test['input']}{test['output']}".encode()  # no file can hold half a surrogate pair
        except UnicodeEncodeError as error:
            raise ValueError(f"a test is {test!r:.100}; it is not valid Unicode: {error}") from error
        return ProgramCase(entries["input"], entries["output"])
    known = {"call", "args", "kwargs", "expected", "json", "wrapped"}
    if "call" in entries and set(entries) <= known and isinstance(entries["call"], str):
        args, kwargs = entries.get("args", []), entries.get("kwargs", {})
        if isinstance(args, list | tuple) and isinstance(kwargs, dict) and "expected" in test:
            also = encode(test["expected"][0]) if each_alone and entries.get("wrapped") else NO_RESULT
            return CallCase(entries["call"], encode(tuple(args)), encode(kwargs), encode(test["expected"]),
                            bool(entries.get("json")), also)
    raise ValueError(f"a test is {test!r:.100}; {ALLOWED}")


def read_code(source: str, function: str | None = None) -> AssertCase:
    """Return the case of test code. ValueError if it does not parse, or imports a package that the sandbox lacks."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"test code {source!r:.100} is not Python: {error}") from error
    nodes = list(ast.walk(tree))
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if function and any(node.args.args for node in checks) and "check" not in called:  # HumanEval: its scorer calls it
        return read_code(f"{source}\n\ncheck({function})")
    names, modules = free_names(nodes), code_modules(nodes)
    fault = "" if names or modules else "it uses nothing of the code"
    if not any(map(runs, tree.body)):
        fault = "it defines functions, and nothing calls them; code_passes_tests(function=COLUMN) names the argument " \
                "of a check(candidate)"
    return AssertCase(source, names, modules, fault)


def runs(node: ast.stmt) -> bool:
    """Return whether a statement of test code, or a test that it defines, can check anything."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name.startswith("test")
    if isinstance(node, ast.ClassDef):
        return any(map(runs, node.body)) or bool(node.bases)  # a base may hold its tests
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Pass):
        return False
    return not isinstance(node, ast.Assign | ast.Expr) or any(isinstance(child, ast.Call) for child in ast.walk(node))


def code_modules(nodes: list[ast.AST]) -> tuple[str, ...]:
    """Return the imported modules that stand for the code under test. ValueError for a third-party package."""
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    missing = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names | OURS}
    if foreign := sorted({name.partition(".")[0] for name in missing} & THIRD_PARTY):
        raise ValueError(f"test code imports {foreign[0]}, and the sandbox has only Python's standard library: leave "
                         "the row out, or write its tests without")
    return tuple(sorted(missing))


def free_names(nodes: list[ast.AST]) -> tuple[str, ...]:
    """Return the names that test code uses and that neither it nor Python defines. The code under test provides only
    these, so it cannot replace `abs` or `sorted`."""
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    imported = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    bound |= {(alias.asname or alias.name).partition(".")[0] for alias in imported}
    return tuple(sorted(used - bound - set(dir(builtins)) - {"__name__", "__file__"}))
