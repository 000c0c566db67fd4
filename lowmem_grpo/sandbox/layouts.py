"""Reads the layouts in which public datasets keep a row's tests, and gives the single tests that `cases` takes.

    {"inputs": [...], "outputs": [...], "fn_name": ...}          APPS, TACO, PRIME, verl; programs without a fn_name
    [{"input": "1\\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}]      LiveCodeBench
    {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": ..., "output": ...}]}        open-r1
    {"input": [...], "output": [...]}, also below public_tests, private_tests and generated_tests        code_contests
    {"test": "def check(candidate): ...", "entry_point": "Solution().add"}                HumanEval, LeetCodeDataset

Each may be JSON text, and so may its parts; PrimeIntellect writes Python literals, and LiveCodeBench packs its private
tests. Sources: the dataset cards, and the scorers of APPS, LiveCodeBench, verl (prime_code), open-r1 and rllm.
"""

import ast
import base64
import io
import json
import pickle
import zlib
from collections.abc import Callable
from typing import Any

HOLDERS = (
    "tests", "test", "test_list", "test_cases", "unit_tests", "public_tests", "private_tests", "generated_tests",
    "public_test_cases", "private_test_cases", "input_output", "verification_info", "ground_truth", "reward_model",
    "functional", "assert_case",
)
FUNCTIONS = ("fn_name", "func_name", "entry_point")
PROGRAMS, CALLS = ("stdin", "stdin_stdout"), ("functional", "function_call")
PYTHON = ("python", "python3", "py")
PACKED = "eJ"  # how base64 of zlib's data begins


def tests_in(given: Any, function: str | None = None) -> list[Any]:
    """Return the tests of a row one by one. `function` names what they test, where the row holds that apart from them.

    What has no known layout is returned as it is. Raises ValueError for a layout that is known, but not kept.
    """
    given = parsed(given)
    if isinstance(given, dict):
        return tests_of({key: value for key, value in given.items() if value is not None}, given, function)
    if isinstance(given, list | tuple):
        return [test for one in given for test in (tests_in(one, function) if one else [one])]
    if isinstance(given, str) and given and function:
        return [{"code": given, "function": function}]
    return [given] if given or not isinstance(given, str) else []


def tests_of(found: dict[str, Any], given: dict[str, Any], function: str | None) -> list[Any]:
    """Return the tests of an object, of which `found` leaves out what is None."""
    function = function_in(found) or function
    if (language := str(found.get("language", PYTHON[0]))).lower() not in PYTHON:
        raise ValueError(f"tests are for {language!r}; only Python runs here: leave the row out")
    if "inputs" in found and "outputs" in found:
        return in_pairs(found["inputs"], found["outputs"], lambda given, output: one_of(given, output, found, function))
    if "input" in found and "output" in found:
        both = isinstance(found["input"], list) and isinstance(found["output"], list)
        if both and not kind_of(found) and function is None:
            return in_pairs(found["input"], found["output"], lambda given, output: one_of(given, output, found, None))
        extra = set(found) - {"input", "output", "type", "testtype", "metadata", *FUNCTIONS}
        return [given if extra else one_of(found["input"], found["output"], found, function)]
    held = [key for key in HOLDERS if key in found]
    return [test for key in held for test in tests_in(found[key], function)] if held else [given]


def in_pairs(inputs: Any, outputs: Any, make: Callable[[Any, Any], Any]) -> list[Any]:
    """Return a test for each input and its output."""
    inputs, outputs = parsed(inputs), parsed(outputs)
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple) or len(inputs) != len(outputs):
        counts = [len(many) if isinstance(many, list | tuple) else f"{many!r:.50}" for many in (inputs, outputs)]
        raise ValueError(f"tests have the inputs {counts[0]} and the outputs {counts[1]}; there must be two lists of "
                         "one length: correct the row, or leave it out")
    return [make(*pair) for pair in zip(inputs, outputs, strict=True)]


def one_of(given: Any, output: Any, found: dict[str, Any], function: str | None) -> dict[str, Any]:
    """Return one test of a program, or of the function where one is named; `found` may say which of the two it is."""
    kind = kind_of(found)
    if kind not in (*PROGRAMS, *CALLS, ""):
        raise ValueError(f"a test has the type {kind!r}; allowed are {', '.join((*PROGRAMS, *CALLS))}: correct the row")
    if kind in CALLS and function is None:
        raise ValueError(f"a test of type {kind!r} does not name its function; give it as fn_name, in its metadata as "
                         "func_name, or with code_passes_tests(function=COLUMN)")
    if function is None or kind in PROGRAMS:
        return {"input": text_of(given), "output": text_of(output)}
    return call_of(function, given, output, kind)


def call_of(function: str, given: Any, output: Any, kind: str) -> dict[str, Any]:
    """Return the test of a call. Where the arguments are text, so is the result: one argument a line, or a list."""
    if not isinstance(given, str):
        args, expected = (list(given) if isinstance(given, list | tuple) else [given]), output
    else:
        lines = [given] if kind == "function_call" else given.strip("\n").split("\n")
        args = [value_of(line) for line in lines] if given.strip() else []
        args = args[0] if kind == "function_call" and args and isinstance(args[0], list) else args
        expected = value_of(output) if isinstance(output, str) else output
    if len(args) == 1 and isinstance(args[0], dict):
        args = [with_numbers(args[0])]
    wrapped = kind != "functional" and isinstance(expected, list)  # most of APPS keeps each result in a list of one
    return {"call": function, "args": args, "expected": expected, "json": True, "wrapped": wrapped}


def with_numbers(found: dict[Any, Any]) -> dict[Any, Any]:
    """Return an argument with whole numbers for keys where all are written so: JSON made text of them."""
    return {int(key): value for key, value in found.items()} if all(str(key).isdecimal() for key in found) else found


def value_of(text: str) -> Any:
    """Return what JSON, or else a Python literal, says. Text that is neither means itself."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError):
            continue
    return text


def text_of(value: Any) -> Any:
    """Return lines as one text."""
    many = isinstance(value, list | tuple) and all(isinstance(line, str) for line in value)
    return "\n".join(value) if many else value


def kind_of(found: dict[str, Any]) -> str:
    """Return the type of a test; "" where it does not say."""
    return str(found.get("testtype", found.get("type", "")))


def function_in(found: Any) -> str | None:
    """Return the function that an object names, also in its `metadata`, or that a text is."""
    found = parsed(found)
    if isinstance(found, dict):
        named = [found[key] for key in FUNCTIONS if found.get(key)]
        return str(named[0]) if named else function_in(found["metadata"]) if found.get("metadata") else None
    return found.strip() or None if isinstance(found, str) and "\n" not in found else None


def parsed(given: Any) -> Any:
    """Return the object or list that a text holds; anything else as it is, and blank text as ""."""
    given = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(given, str):
        return given
    text = unpacked(given) if given.startswith(PACKED) else given.strip()
    found = value_of(text) if text[:1] in ("[", "{") else None
    return found if isinstance(found, list | dict) else given if text else ""


def unpacked(text: str) -> str:
    """Return the JSON text that LiveCodeBench pickles, compresses and writes in base64; another text as it is."""
    try:
        found = TextAlone(io.BytesIO(zlib.decompress(base64.b64decode(text, validate=True)))).load()
    except (ValueError, EOFError, zlib.error, pickle.UnpicklingError):
        return text
    return found if isinstance(found, str) else text


class TextAlone(pickle.Unpickler):
    """Loads plain data only: a class or a function could run code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not plain data")
