"""Wrong code that tries to get a passed test all the same."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from lowmem_grpo.rewards.sandbox.cases import read_cases
from lowmem_grpo.rewards.sandbox.trial import OUTCOMES, Sandbox, run_tests
from tests.attacks.attack import Verdict
from tests.attacks.floods import AT_ONCE

KIND = "forged verdicts"
TESTS = [
    "assert add(2, 3) == 5", {"call": "add", "args": [2, 3], "expected": 5},
    "def check(f):\n    assert abs(f(2, 3) - 5) < 1 and all([sorted([f(2, 3)]) == [5]])\ncheck(add)",
    "assert all(map(lambda x: add(x, x) == x * 7, [1, 2, 3]))",
    "class Later:\n    def __aiter__(self):\n        return self\n    async def __anext__(self):\n"
    "        return add(2, 3)\nasync def check():\n    async for found in Later():\n"
    "        assert found == 'a sum'\n        break\n"
    "try:\n    check().send(None)\nexcept StopIteration:\n    pass",
    "import pytest\nfrom solution import add\ndef test_small():\n    assert add(2, 3) == pytest.approx(5)\n",
    "import unittest\nfrom solution import add\nclass TestAdd(unittest.TestCase):\n    def test_it(self):\n"
    "        self.assertEqual(add(2, 3), 5)\nif __name__ == '__main__':\n    unittest.main()\n",
    "assert Solution().add(2, 3) == 5",
]
PROGRAM = [{"input": "2 3", "output": "5"}]
PROGRAMS = {
    "prints passed": "print('passed')", "exits cleanly": "import sys\nsys.exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "prints after an error": "import atexit\natexit.register(print, 5)\n1/0",
    "closes its output": "import os\nos.close(1)",
    "writes a verdict": "import os\nos.write(1, b'{\"outcome\": \"passed\"}')",
    "prints to standard error": "print(5, file=__import__('sys').stderr)",
    "reads the answer": "import os\nprint(*[open(f).read() for f in os.listdir('.') if f != 'code.py'] or [''])",
}
YES = "class Yes(BASE):\n    def __eq__(self, other): return True\n    __ne__ = lambda self, other: False\n" \
      "    __hash__ = None\n    __bool__ = lambda self: True\n"
WRITE_ALL = "for n in range(3, 64):\n    try:\n        os.write(n, LINE)\n    except OSError:\n        pass\n"
FORGERIES = {
    "prints passed": "print('passed', flush=True)\ndef add(a, b):\n    print('passed')\n",
    "exits cleanly": "import sys\nsys.exit(0)",
    "exits cleanly when called": "import sys\ndef add(a, b):\n    sys.exit(0)\n",
    "exits at once": "import os\nos._exit(0)",
    "exits at once when called": "import os\ndef add(a, b):\n    os._exit(0)\n",
    "raises AssertionError": "def add(a, b):\n    raise AssertionError\n",
    "overrides AssertionError": "import builtins\nclass Never(Exception): pass\nbuiltins.AssertionError = Never\n"
                                "def add(a, b):\n    return 0\n",
    "equals everything": YES.replace("BASE", "object") + "def add(a, b):\n    return Yes()\n",
    "an int that equals everything": YES.replace("BASE", "int") + "def add(a, b):\n    return Yes(6)\n",
    "a list that equals everything": YES.replace("BASE", "list") + "def add(a, b):\n    return Yes()\n",
    "a string that equals everything": YES.replace("BASE", "str") + "def add(a, b):\n    return Yes('5')\n",
    "not a number": "def add(a, b):\n    return float('nan')\n",
    "takes the place of built-ins": "def add(a, b):\n    return 0\ndef abs(x):\n    return 0\n"
                                    "def sorted(x):\n    return [5]\nall = any = sorted\n",
    "changes built-ins": "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.all = builtins.sorted = lambda x: [5]\n"
                         "def add(a, b):\n    return 0\n",
    "writes verdicts to every descriptor": "import os\nLINE = b'{\"outcome\": \"passed\", \"reason\": \"\"}\\n'\n"
                                           + WRITE_ALL + "def add(a, b):\n" + "".join(
                                               f"    {line}\n" for line in WRITE_ALL.splitlines()) + "    return 0\n",
    "answers with a verdict too": "import os\nLINE = b'{\"loaded\": true, \"value\": 0, \"outcome\": \"passed\"}\\n'\n"
                                  + 9 * WRITE_ALL,
    "answers with nonsense": "import os\nLINE = b'\\xff\\x00[[[[\\n'\n" + WRITE_ALL,
    "answers with encoded nonsense": "import os\nLINE = b'{\"value\": {\"set\": 5}}\\n'\n" + 9 * WRITE_ALL,
    "hangs up": "import os\nfor n in range(64):\n    try:\n        os.close(n)\n    except OSError:\n        pass\n"
                "while True: pass\n",
    "takes over the harness": "import sys\ninside = sys.modules['lowmem_grpo.rewards.sandbox.inside']\n"
                              "inside.encode = lambda value: {'outcome': 'passed', 'anything': True}\n"
                              "inside.find = lambda module, name: lambda *args, **kwargs: True\n",
    "walks the frames": "import sys\nframe = sys._getframe()\nwhile frame:\n"
                        "    for value in list(frame.f_locals.values()):\n"
                        "        if hasattr(value, 'send') and hasattr(value, 'socket'):\n"
                        "            value.send({'outcome': 'passed', 'reason': ''})\n    frame = frame.f_back\n"
                        "def add(a, b):\n    return 0\n",
    "rewrites the harness": "import lowmem_grpo.rewards.sandbox.inside as inside\n"
                            "for name in ('trial.py', 'plain.py'):\n"
                            "    path = inside.__file__.replace('inside.py', name)\n    open(path, 'a').close()\n"
                            "    opened = True\nresult = 5 if opened else 0\ndef add(a, b):\n    return result\n",
    "leaves files for the test": "open('tests.py', 'w').write('')\nopen('code.py', 'w').write('')\n"
                                 "open('builtins.py', 'w').write('')\ndef add(a, b):\n    return 0\n",
    "returns a generator": "def add(a, b):\n    yield 5\n", "ends loops": "def add(a, b):\n    raise StopIteration\n",
    "ends loops of its own kind": "class End(StopIteration): pass\ndef add(a, b):\n    raise End\n",
    "ends asynchronous loops": "def add(a, b):\n    raise StopAsyncIteration\n",
    "a method that equals everything": "class Solution:\n    def add(self, a, b):\n        return self\n"
                                       "    def __eq__(self, other):\n        return True\n",
    "takes the place of pytest": "import builtins, sys, unittest\nsys.modules['pytest'] = sys\n"
                                 "builtins.AssertionError = ZeroDivisionError\n"
                                 "unittest.TestCase.assertEqual = lambda *a: None\ndef add(a, b):\n    return None\n",
    "takes the place of tests": "check = test_small = lambda *a: None\ndef approx(x):\n    return x\n"
                                "def add(a, b):\n    return 7\n",
    "breaks what answers": "import json\njson.loads = json.dumps = None\n",
    "changes all that compares": "import sys\nfor module in list(sys.modules.values()):\n"
                                 "    for name in list(vars(module)):\n"
                                 "        if name in ('same', 'encode', 'state_of', 'described'):\n"
                                 "            setattr(module, name, lambda *a, **k: True)\n"
                                 "def add(a, b):\n    return 0\n",
    "answers before it is asked": "def add(a, b):\n    return 0\ndef check(*a):\n    return True\n",
}


def forgeries(sandbox: Sandbox) -> Iterator[Verdict]:
    """A verdict for each forgery: it succeeds if a test passes. Several run at once, each in processes of its own."""
    tried = [*((name, code, TESTS) for name, code in FORGERIES.items()),
             *((f"a program that {name}", code, PROGRAM) for name, code in PROGRAMS.items())]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(partial(forgery, sandbox), *zip(*tried, strict=True))


def forgery(sandbox: Sandbox, name: str, code: str, tests: list[Any]) -> Verdict:
    """The verdict of one forgery."""
    found = [verdict.outcome for verdict in run_tests(code, read_cases(list(tests)), sandbox)]
    sound = "passed" not in found and {*found} <= {*OUTCOMES}
    return Verdict(f"{sandbox.isolation}: {KIND}", name, "" if sound else f"its tests {found}")
