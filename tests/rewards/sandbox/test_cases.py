"""The tests of a dataset row, read into cases."""

import json
import re
from typing import Any

import pytest
from tables import every_row

from lowmem_grpo.rewards.sandbox.cases import read_cases


@every_row(("tests", "message"), [
    ([], "at least one"), (None, "tests are None"), (5, "tests are 5"), (["assert ("], "not Python"),
    ([""], "a test is ''"), ([{"input": "1"}], "a test is"), ([{"call": "f", "args": 3, "expected": 1}], "a test is"),
    ([{"call": "f", "args": []}], "a test is"), ([{"call": "f", "expected": 1, "extra": 2}], "a test is"),
    ([{"input": 1, "output": "1"}], "a test is"),
    ([{"input": "\ud800", "output": "1"}], "a test is {'input': '\\ud800', 'output': '1'}; it is not valid Unicode"),
    ([{"input": "1", "output": "\ud800"}], "it is not valid Unicode"),
])
def test_a_row_whose_tests_cannot_be_read_is_named(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_cases(tests)


def test_tests_may_be_json_and_may_have_empty_columns() -> None:
    (call, program, nothing) = read_cases(json.dumps([
        {"call": "f", "args": [1], "expected": None, "input": None}, {"input": "", "output": "x", "call": None},
        "assert True",
    ]))
    assert (call.name, call.expected, program.stdout, nothing.names) == ("f", None, "x", ())  # type: ignore[union-attr]
    assert len(read_cases("assert [f(1)] == [2]")) == 1
    assert len(read_cases("[f(1)]")) == 1  # no JSON: a line of Python that starts with a bracket
