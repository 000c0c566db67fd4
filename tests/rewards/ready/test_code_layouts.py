"""Layouts in which public datasets keep tests of code: right programs pass all of them, wrong ones and fakes none."""

import base64
import json
import logging
import pickle
import zlib
from typing import Any

import numpy as np
import pytest
from sandboxed import working_verifier
from tables import every_row

from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rewards.checking.diagnosis import faulty_rows
from lowmem_grpo.rewards.ready.code import CodeVerifier
from lowmem_grpo.rewards.sandbox.limits import MIB, Limits

PATIENT = Limits(seconds=60, total_seconds=120, memory_bytes=256 * MIB)
ADD = "def add(a, b):\n    return a {} b"
IN_CLASS = "class Solution:\n    def add(self, a: int, b: Optional[int]) -> List[int]:\n        return a {} b"
SCRIPT = "a = int(input())\nb = int(input())\nprint(a {} b)\n{}()"
CALLS: dict[str, Any] = {"fn_name": "add", "inputs": [[1, 2], [5, 6]], "outputs": [3, 11]}
PROGRAM: dict[str, Any] = {"inputs": ["1\n2\n", "5\n6\n"], "outputs": ["3\n", "11\n"]}
LIVE = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
OPEN_R1 = [{"fn_name": None, "input": "1\n2\n", "output": "3\n", "type": "stdin_stdout"}]
OF_CALL = [{"fn_name": "add", "input": [1, 2], "output": [3], "type": "function_call"}]
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(a=5, b=6) == 11\n"
PYTEST = "import pytest\nfrom solution import add\n\ndef test_small():\n    assert add(1, 2) == 3\n\n" \
         "@pytest.mark.parametrize('a, b, result', [(5, 6, 11), (2, 3, 5)])\n" \
         "def test_more(a, b, result):\n    assert add(a, b) == pytest.approx(result)\n"
UNITTEST = "import unittest\nfrom your_module import add\n\nclass TestAdd(unittest.TestCase):\n" \
           "    def setUp(self):\n        self.first = 1\n    def test_it(self):\n" \
           "        self.assertEqual(add(self.first, 2), 3)\n\nif __name__ == '__main__':\n    unittest.main()\n"
IN_TEST_CLASS = "from solution import add\n\nclass TestAdd:\n    def test_it(self):\n        assert add(1, 2) == 3\n"
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(LIVE)))).decode()
METADATA = json.dumps({"func_name": "add"})
LAYOUTS: list[tuple[str, Any, str | None]] = [  # code, tests, what another column names
    (ADD, json.dumps(CALLS), None), (IN_CLASS, json.dumps(CALLS), None), (ADD, CALLS, None),
    (ADD, CALLS | {"outputs": [[3], [11]]}, None),  # APPS and TACO: a result in a list
    (ADD, CALLS | {"inputs": ["1\n2", "5\n6"], "outputs": ["3", "11"]}, None),  # PRIME and verl: text
    (SCRIPT, json.dumps(PROGRAM), None), (SCRIPT, PROGRAM | {"fn_name": None}, None),
    (SCRIPT, {"inputs": [["1", "2"]], "outputs": [["3"]]}, None),  # lines
    (SCRIPT, {"reward_model": {"style": "rule", "ground_truth": json.dumps(PROGRAM)}}, None),
    (SCRIPT, {"input": ["1\n2", "5\n6"], "output": ["3", "11"]}, None),  # code_contests
    (SCRIPT, {"public_tests": {"input": ["1\n2"], "output": ["3"]}, "private_tests": {"input": [], "output": []},
              "generated_tests": {"input": ["5\n6"], "output": ["11"]}}, None),
    (ADD, LIVE, METADATA), (ADD, json.dumps(LIVE), METADATA), (ADD, PACKED, METADATA),
    (ADD, [LIVE[0] | {"metadata": {"func_name": "add"}}], None), (IN_CLASS, LIVE, "add"),
    (SCRIPT, [{"input": "1\n2", "output": "3", "testtype": "stdin"}], "{}"),
    (SCRIPT, {"language": "python", "test_cases": OPEN_R1}, None),
    (SCRIPT, json.dumps({"language": "python", "test_cases": OPEN_R1}), None),
    (ADD, {"language": "python", "test_cases": OF_CALL}, None), (ADD, str({"test_cases": OF_CALL}), None),
    (ADD, CHECK, "add"), (ADD, {"test": CHECK, "entry_point": "add"}, None), (IN_CLASS, CHECK, "Solution().add"),
    (IN_CLASS, "assert Solution().add(1, 2) == 3", None), (ADD, PYTEST, None), (ADD, UNITTEST, None),
    (ADD, IN_TEST_CLASS, None), (ADD, ["import solution\nassert solution.add(1, 2) == 3"], None),
    (ADD, ["from solution import *\nassert add(1, 2) == 3"], None),
    (ADD, {"test_list": ["assert add(1, 2) == 3"], "test_setup_code": ""}, None),
    (ADD, {"test_list": ["assert add(1, b) == 3"], "test_setup_code": "b = 2"}, None),
    (ADD, np.array(["assert add(1, 2) == 3"]), None),
]


@pytest.fixture(scope="module")
def verifier() -> CodeVerifier:
    """Another column names the function."""
    return working_verifier(limits=PATIENT, workers=1, function="names", batch_seconds=600)


@every_row(("code", "tests", "names"), LAYOUTS)
def test_a_layout_is_read(verifier: CodeVerifier, code: str, tests: Any, names: str | None) -> None:
    codes = [code.format("+", "exit"), code.format("-", "exit")]
    assert verifier.verdicts(codes, tests=[tests] * 2, names=[names] * 2) == [True, False]


def test_a_script_may_end_itself_as_it_likes(verifier: CodeVerifier) -> None:
    codes = [SCRIPT.format(sign, end) for sign, end in (("+", "quit"), ("*", "quit"), ("+", "print"), ("*", "print"))]
    assert verifier.verdicts(codes, tests=[PROGRAM] * 4, names=[None] * 4) == [True, False, True, False]


def test_data_in_place_of_the_function_is_wrong_and_not_without_a_verdict(verifier: CodeVerifier) -> None:
    """A model could otherwise have each wrong answer count for nothing."""
    tests = [PYTEST, "assert add(1, 2) == 3", "assert add == 4"]
    assert verifier.verdicts(["add = 5"] * 3, tests=tests, names=[None] * 3) == [False] * 3


# Each returns an object that fits itself to whatever a test subtracts from it or compares it with.
FITTING = {
    "an object": """
class Fitted:
    def __abs__(self): return 0.0
    def __lt__(self, other): return True
    __gt__ = __le__ = __lt__
class Number(Fitted):
    def __sub__(self, other): return Fitted()
    __rsub__ = __add__ = __truediv__ = __xor__ = __mod__ = __sub__
def double(x): return Number()
""", "a number": """
class Number(float):
    def __sub__(self, other): return Number(0.0)
    __rsub__ = __add__ = __sub__
def double(x): return Number(7.0)
""", "a number that changes": """
class Number(float):
    reads = 0
    def __float__(self):
        Number.reads += 1
        return 1e9 if Number.reads % 2 else -1e9
def double(x): return Number(7.0)
"""}
EXPECTS_4 = [
    "assert abs(double(2) - 4.0) < 1e-6", "assert double(2) - 4 == 0", "assert not double(2) - 4",
    "assert abs(4.0 - double(2)) < 1e-6", "assert abs(double(2) + -4.0) < 1e-6", "assert 3.9 < double(2) < 4.1",
    "result = double(2)\nassert 3.9 < result\nassert result < 4.1", "import math\nassert math.isclose(double(2), 4)",
    "import pytest\nfrom solution import double\ndef test_it():\n    assert double(2) == pytest.approx(4.0)",
    "import unittest\nfrom solution import double\nclass Test(unittest.TestCase):\n    def test_it(self):\n"
    "        self.assertAlmostEqual(double(2), 4.0)"]


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])  # a third of the tests, or all
@every_row("program", FITTING)
def test_a_result_cannot_fit_itself_to_what_a_test_expects(verifier: CodeVerifier, program: str, every: int) -> None:
    tests = [*EXPECTS_4, *(f"{name}\n{EXPECTS_4[0]}" for name in ("Fitted", "Number"))]  # the last name its class
    tests = tests[list(FITTING).index(program) % every :: every]
    assert True not in verifier.verdicts([FITTING[program]] * len(tests), tests=tests, names=[None] * len(tests))


def test_a_right_result_passes_the_tests_that_others_would_fit_themselves_to(verifier: CodeVerifier) -> None:
    assert verifier.verdicts(["def double(x): return x * 2.0"], tests=[EXPECTS_4], names=[None]) == [True]


# what tests do with the code

STACK = """
class Empty(LookupError):
    pass

class Stack:
    def __init__(self, items=()):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items:
            raise Empty("nothing left")
        return self.items.pop(LAST)
    def __len__(self):
        return len(self.items)
    def __iter__(self):
        return iter(self.items)
    def __eq__(self, other):
        return self.items == other.items
    def __repr__(self):
        return f"Stack({self.items})"
""".replace("LAST", "{}")
REVERSE = """
class ListNode:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next
class Solution:
    def reverse(self, head):
        last = None
        while head:
            head.next, last, head = last, head, head.next
        return last{}
"""
VALUES = "from collections import deque\nfrom datetime import date\nfrom decimal import Decimal\n" \
         "from fractions import Fraction\n\ndef value(n):\n    n += {}\n" \
         "    return [deque([n]), range(n), Fraction(n, 3), Decimal(n) / 4, date(2024, 1, n), {{n: {{n}}}}]"
SORT = "def sort(items, seen):\n    items.sort()\n    {}\n    seen['least'] = items[0]"
SAY = "def say(name):\n    print('Hello,', name{})"
EACH = "def each(function, items):\n    return [function(item){} for item in items]"
USES: list[tuple[str, str, str, str]] = [  # code, what makes it right, what makes it wrong, a test
    (STACK, "", "0", "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s.pop() == 2 and list(s) == [1]"),
    (STACK, "", "0", "from solution import Stack, Empty\nimport pytest\ndef test():\n    s = Stack([4, 5])\n"
     "    assert repr(s) == 'Stack([4, 5])' and 4 in s and 9 not in s\n    assert s.pop() == 5\n    s.pop()\n"
     "    with pytest.raises(Empty, match='nothing') as info:\n        s.pop()\n"
     "    assert str(info.value) == 'nothing left'"),
    (STACK, "", "0", "s = Stack([1, 2])\ns.pop()\nassert s == Stack([1])\nassert isinstance(s, Stack)"),
    (REVERSE, "", ".next", "node = Solution().reverse(ListNode(1, ListNode(2)))\nfound = []\nwhile node:\n"
     "    found.append(node.val)\n    node = node.next\nassert found == [2, 1]"),
    (REVERSE, "", ".next", "assert is_same_list(Solution().reverse(list_node([1, 2, 3])), list_node([3, 2, 1]))"),
    (VALUES, "0", "1", "from collections import deque\nassert value(3)[0] == deque([3])"),
    (VALUES, "0", "1", "assert value(3)[1] == range(3)"),
    (VALUES, "0", "1", "from fractions import Fraction\nassert value(3)[2] == Fraction(1)"),
    (VALUES, "0", "1", "from decimal import Decimal\nassert value(3)[3] == Decimal('0.75')"),
    (VALUES, "0", "1", "import datetime\nassert value(3)[4] == datetime.date(2024, 1, 3)"),
    (SORT, "pass", "items.reverse()", "items, seen = [3, 1, 2], {}\nsort(items, seen)\nassert items == [1, 2, 3]"),
    (SORT, "pass", "items.reverse()", "seen = {}\nsort([3, 1], seen)\nassert seen == {'least': 1}"),
    (SAY, "", ", '!'", "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    say('Bo')\n"
     "assert out.getvalue() == 'Hello, Bo\\n'"),
    (SAY, "", ", '!'", "def test_it(capsys):\n    say('Bo')\n    assert capsys.readouterr().out == 'Hello, Bo\\n'"),
    ("def bisect(x):\n    return x / {}", "2", "3", "assert bisect(4) == 2 and math.isclose(bisect(3), 1.5)"),
    (EACH, "", " + 1", "assert each(lambda x: 2 * x, [1, 2]) == [2, 4] and each(int, ['3']) == [3]"),
    ("def ask():\n    return int(input('?')) + {}", "1", "2", "from unittest import mock\n"
     "@mock.patch('builtins.input', side_effect=['3'])\ndef test_it(answers):\n    assert ask() == 4"),
    ("def count():\n    n = {}\n    while True:\n        yield n\n        n += 1", "0", "1",
     "numbers = count()\nassert [next(numbers), next(numbers)] == [0, 1]"),
    ("async def later(x):\n    return x + {}", "1", "2", "import asyncio\nassert asyncio.run(later(1)) == 2"),
]


@every_row(("code", "right", "wrong", "test"), USES)
def test_a_test_works_with_what_the_code_has(
    verifier: CodeVerifier, code: str, right: str, wrong: str, test: str
) -> None:
    codes = [code.replace("{}", change).replace("{{", "{").replace("}}", "}") for change in (right, wrong)]
    assert verifier.verdicts(codes, tests=[test] * 2, names=[None] * 2) == [True, False]


CONSTANT = "class V:\n    def __init__(self, *a):\n        pass\n    def __add__(self, other):\n        return self\n" \
           "    def __eq__(self, other):\n        return True"


def test_what_only_the_code_could_tell_is_no_verdict(verifier: CodeVerifier) -> None:
    assert verifier.verdicts([CONSTANT] * 2, names=[None] * 2, tests=["assert V(1, 2) + V(3, 4) == V(4, 6)",
                                                                      "assert V(1) == 7"]) == [None, None]


# rows without a verdict

FAULTY: list[tuple[Any, str]] = [
    ([], "at least one"), ("", "at least one"), ("[]", "at least one"), ({}, "a test is {}"),
    (CHECK, "nothing calls them"), ("assert True", "uses nothing of the code"), ("assert (", "is not Python"),
    ("import numpy as np\nassert np.sum(add(1, 2)) == 3", "imports numpy"), (LIVE, "does not name its function"),
    ({"inputs": ["1"], "outputs": []}, "the inputs 1 and the outputs 0"),
    ({"inputs": [], "outputs": []}, "at least one"),
    ({"language": "cpp", "test_cases": OPEN_R1}, "tests are for 'cpp'"),
    ([{"input": "1", "output": "2", "testtype": "interactive"}], "has the type 'interactive'"),
]


@every_row(("tests", "reason"), FAULTY)
def test_a_row_that_can_never_pass_is_refused_by_its_number_and_gets_none_in_a_run(
    verifier: CodeVerifier, tests: Any, reason: str
) -> None:
    columns = {"tests": [tests, PYTEST], "names": [None, None]}
    for reward in (verifier.reward(), verifier.share()):
        (finding,) = faulty_rows("mine", reward, [(0, {"tests": PYTEST}), (7, {"tests": tests}), (9, {"tests": None})])
        assert (finding.severity, finding.about) == ("error", "mine") and reason in finding.problem
        assert "1 of 3 rows (number 7); row 7, column 'tests'" in finding.problem
        scores = RewardScorer([reward]).score(["p"] * 2, [ADD.format("+")] * 2, [[1]] * 2, columns, None)
        (paid,) = scores.rewards.values()
        assert paid == [None, 1.0] and scores.metrics["tests/no_verdict"] == 0.5


def test_each_reason_is_said_once(verifier: CodeVerifier, caplog: pytest.LogCaptureFixture) -> None:
    reward = verifier.reward()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            reward(completions=["x = 1"] * 3, tests=[[{"in": 1}]] * 2 + [PYTEST], names=[None] * 3)
    (line,) = [record.getMessage() for record in caplog.records if "no verdict" in record.getMessage()]
    assert line.startswith("code_passes_tests has no verdict on 2 of 3 completions: a test is {'in': 1}; allowed are")
