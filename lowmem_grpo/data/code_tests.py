"""Convert the tests of a row, in the layouts of public datasets, to the single tests of `rewards/sandbox/cases.py`.

    {"inputs": [...], "outputs": [...], "fn_name": ...}          APPS, TACO, PRIME, verl; programs without a fn_name
    [{"input": "1\\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}]      LiveCodeBench
    {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": ..., "output": ...}]}        open-r1
    {"input": [...], "output": [...]}, also below public_tests, private_tests and generated_tests        code_contests
    {"test": "def check(candidate): ...", "entry_point": "Solution().add"}                HumanEval, LeetCodeDataset

Each layout, and each part of it, may also be JSON text; PrimeIntellect writes Python literals, and LiveCodeBench packs
its private tests. Sources: dataset cards, and the scorers of APPS, LiveCodeBench, verl (prime_code), open-r1, rllm.
"""

import ast
import base64
import io
import json
import pickle
import zlib
from typing import Any

HOLDERS = (
    "tests", "test", "test_list", "test_cases", "unit_tests", "public_tests", "private_tests", "generated_tests",
    "public_test_cases", "private_test_cases", "input_output", "verification_info", "ground_truth", "reward_model",
    "functional", "assert_case",
)
FUNCTIONS = ("fn_name", "func_name", "entry_point")
PROGRAMS, CALLS = ("stdin", "stdin_stdout"), ("functional", "function_call")
PYTHON = ("python", "python3", "py")
PACKED = "eJ"  # the first characters of base64-encoded zlib data


def tests_in(tests: Any, function: str | None = None) -> list[Any]:
    """Return the tests of a row as a flat list. `function` names the tested function if another column of the row holds
    the name. Tests of an unknown layout are returned unchanged. ValueError for a malformed test of a known layout."""
    tests = parsed(tests)
    if isinstance(tests, dict):
        return tests_of({key: value for key, value in tests.items() if value is not None}, tests, function)
    if isinstance(tests, list | tuple):
        return [test for entry in tests for test in (tests_in(entry, function) if entry else [entry])]
    if isinstance(tests, str) and tests and function:
        return [{"code": tests, "function": function}]
    return [tests] if tests or not isinstance(tests, str) else []


def tests_of(present: dict[str, Any], entry: dict[str, Any], function: str | None) -> list[Any]:
    """Return the tests of the object `entry`; `present` is `entry` without keys that map to None."""
    function = function_in(present) or function
    if (language := str(present.get("language", PYTHON[0]))).lower() not in PYTHON:
        raise ValueError(f"tests are for {language!r}; only Python runs here: leave the row out")
    if "inputs" in present and "outputs" in present:
        return in_pairs(present["inputs"], present["outputs"], present, function)
    if "input" in present and "output" in present:
        both = isinstance(present["input"], list) and isinstance(present["output"], list)
        if both and not kind_of(present) and function is None:
            return in_pairs(present["input"], present["output"], present, None)
        extra = set(present) - {"input", "output", "type", "testtype", "metadata", *FUNCTIONS}
        return [entry if extra else one_of(present["input"], present["output"], present, function)]
    held, setup = [key for key in HOLDERS if key in present], present.get("test_setup_code")  # MBPP's
    tests = [test for key in held for test in tests_in(present[key], function)] if held else [entry]
    return [f"{setup}\n{test}" if setup and isinstance(test, str) else test for test in tests]


def in_pairs(inputs: Any, outputs: Any, entry: dict[str, Any], function: str | None) -> list[Any]:
    """Return one test for each pair of input and output. ValueError unless both are lists of the same length."""
    inputs, outputs = parsed(inputs), parsed(outputs)
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple) or len(inputs) != len(outputs):
        counts = [len(many) if isinstance(many, list | tuple) else f"{many!r:.50}" for many in (inputs, outputs)]
        raise ValueError(f"tests have the inputs {counts[0]} and the outputs {counts[1]}; there must be two lists of "
                         "one length: correct the row, or leave it out")
    return [one_of(*pair, entry, function) for pair in zip(inputs, outputs, strict=True)]


def one_of(inputs: Any, output: Any, entry: dict[str, Any], function: str | None) -> dict[str, Any]:
    """Return the test of a program or of a function call, as the type in `entry` says. Without a type, the test is a
    call if `function` is set. ValueError for an unknown type, or a call without a function name."""
    kind = kind_of(entry)
    if kind not in (*PROGRAMS, *CALLS, ""):
        raise ValueError(f"a test has the type {kind!r}; allowed are {', '.join((*PROGRAMS, *CALLS))}: correct the row")
    if kind in CALLS and function is None:
        raise ValueError(f"a test of type {kind!r} does not name its function; give it as fn_name, in its metadata as "
                         "func_name, or with code_passes_tests(function=COLUMN)")
    if function is None or kind in PROGRAMS:
        return {"input": text_of(inputs), "output": text_of(output)}
    return call_of(function, inputs, output, kind)


def call_of(function: str, inputs: Any, output: Any, kind: str) -> dict[str, Any]:
    """Return the test of a function call. If `inputs` is a text, it holds one argument per line, or a list of them."""
    if not isinstance(inputs, str):
        args, expected = (list(inputs) if isinstance(inputs, list | tuple) else [inputs]), output
    else:
        lines = [inputs] if kind == "function_call" else inputs.strip("\n").split("\n")
        args = [value_of(line) for line in lines] if inputs.strip() else []
        args = args[0] if kind == "function_call" and args and isinstance(args[0], list) else args
        expected = value_of(output) if isinstance(output, str) else output
    if len(args) == 1 and isinstance(args[0], dict) and all(str(key).isdecimal() for key in args[0]):
        args = [{int(key): value for key, value in args[0].items()}]  # JSON turned integer keys into text
    wrapped = kind != "functional" and isinstance(expected, list)  # most of APPS keeps each result in a list of one
    return {"call": function, "args": args, "expected": expected, "json": True, "wrapped": wrapped}


def value_of(text: str) -> Any:
    """Return the JSON value or Python literal that a text holds; a text that is neither is returned unchanged."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text


def text_of(value: Any) -> Any:
    many = isinstance(value, list | tuple) and all(isinstance(line, str) for line in value)
    return "\n".join(value) if many else value


def kind_of(entry: dict[str, Any]) -> str:
    return str(entry.get("testtype", entry.get("type", "")))


def function_in(value: Any) -> str | None:
    """Return the function name in an object, in its `metadata`, or in a one-line text that is the name; else None."""
    value = parsed(value)
    if isinstance(value, dict):
        named = [value[key] for key in FUNCTIONS if value.get(key)]
        return str(named[0]) if named else function_in(value["metadata"]) if value.get("metadata") else None
    return value.strip() or None if isinstance(value, str) and "\n" not in value else None


def parsed(value: Any) -> Any:
    """Return the object or list that a text holds. Blank text becomes "", and any other value is returned unchanged."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, str):
        return value
    text = unpacked(value) if value.startswith(PACKED) else value.strip()
    data = value_of(text) if text[:1] in ("[", "{") else None
    return data if isinstance(data, list | dict) else value if text else ""


def unpacked(text: str) -> str:
    """Return the JSON text that LiveCodeBench has pickled, compressed and base64-encoded; other texts unchanged."""
    try:
        data = TextAlone(io.BytesIO(zlib.decompress(base64.b64decode(text, validate=True)))).load()
    except (ValueError, EOFError, zlib.error, pickle.UnpicklingError):
        return text
    return data if isinstance(data, str) else text


class TextAlone(pickle.Unpickler):
    """An unpickler of plain data only: classes and functions, which could run code, are refused."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not plain data")
