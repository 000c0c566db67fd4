"""Small faults in the package's code: which are made, which stay chosen, and which tests look for them."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from bench.faults.bench import FURTHER, order_for
from bench.faults.places import FOLDERS, Fault, chosen, drawn, faults_in

ROOT = Path(__file__).parents[2]
CODE = """\
def take(rows: list[int], most: int = 3) -> int:
    if rows and not most < 1 and 2 is not most:
        most = min(most, len(rows) - 1)
    return sum(rows[:most]) + rows[0]
"""
ASKED = "    if rows and not most < 1 and 2 is not most:"
FAULTS = {
    ("constant", "def take(rows: list[int], most: int = 6) -> int:"), ("and", ASKED.replace("and", "or", 1)),
    ("not", ASKED.replace("not ", "", 1)), ("comparison", ASKED.replace("<", "<=")),
    ("constant", ASKED.replace("1", "2")), ("constant", ASKED.replace("2", "4")),
    ("not", ASKED.replace("is not", "is")), ("dropped", "        pass"),
    ("smallest", "        most = max(most, len(rows) - 1)"), ("sign", "        most = min(most, len(rows) + 1)"),
    ("constant", "        most = min(most, len(rows) - 2)"), ("index", "    return sum(rows[:most + 1]) + rows[0]"),
    ("sign", "    return sum(rows[:most]) - rows[0]"), ("index", "    return sum(rows[:most]) + rows[1]"),
}
LEFT_ALONE = '''\
"""Of 2 and 3."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    LIMIT = 2
@cache(4)
def take(row: Literal[3]) -> Literal[4]:
    """Less than 5."""
    logger.warning("all %d", len(row) - 1)
    only = f"{row + 1}"
    raise ValueError(row < 4)
'''
KERNEL = "SIZE = 4\ndef tile(x):\n    return tl.load(x + 1)\ndef halves_ref(x):\n    return x - y\n"


def test_each_kind_of_fault_is_made_once_at_each_place() -> None:
    found = faults_in("lowmem_grpo/losses/a.py", CODE)
    assert {(fault.kind, fault.after) for fault in found} == FAULTS and len(found) == len(FAULTS)
    assert {fault.inside for fault in found} == {"take"}


def test_words_types_errors_logs_and_what_runs_on_a_card_are_left_alone() -> None:
    assert faults_in("lowmem_grpo/losses/a.py", LEFT_ALONE) == []
    assert [fault.after for fault in faults_in("lowmem_grpo/kernels/a.py", KERNEL)] == ["    return x + y"]


def test_a_fault_changes_one_line_of_code_that_is_still_python() -> None:
    path = "lowmem_grpo/losses/kl.py"
    text = (ROOT / path).read_text()
    for fault in faults_in(path, text):
        changed = fault.put_into(text)
        ast.parse(changed)
        pairs = zip(text.split("\n"), changed.split("\n"), strict=True)
        assert [pair for pair in pairs if pair[0] != pair[1]] == [(fault.before, fault.after)]


def test_the_choice_depends_on_the_seed_alone_and_stays_where_code_is_added(tmp_path: Path) -> None:
    for folder in FOLDERS:
        (tmp_path / "lowmem_grpo" / folder).mkdir(parents=True)
    file = tmp_path / "lowmem_grpo" / "losses" / "a.py"
    file.write_text(CODE)
    before = [fault.lasting for fault in chosen(tmp_path, 8, 0)]
    assert len(before) == 8 and before != [fault.lasting for fault in chosen(tmp_path, 8, 1)]
    file.write_text(f"def new(x):\n    return x or y\n\n\n{CODE}")
    assert [fault.lasting for fault in chosen(tmp_path, 8, 0)] == before


def test_kinds_take_turns() -> None:
    found = faults_in("lowmem_grpo/losses/a.py", CODE)
    assert len({fault.kind for fault in drawn(found, 8, 0)}) == 8


def test_the_mirroring_tests_come_first_and_vllms_never() -> None:
    fault = Fault("lowmem_grpo/losses/kl.py", 1, 0, "sign", "weighed_kl", "", "")
    near, own, further = order_for(fault, ROOT)
    assert near[0] == "tests/losses/test_kl.py" and own and all(path.startswith("tests/losses/") for path in own)
    assert further and not {*near, *own} & {*further} and not any("vllm" in path for path in [*near, *own, *further])
    assert all((ROOT / "tests" / place).exists() for places in FURTHER.values() for place in places.split())


def test_the_first_test_that_fails_for_the_fault_alone_has_found_it(tmp_path: Path) -> None:
    files = {
        "pytest.ini": "", "lowmem_grpo/a.py": "def three():\n    return 3\n", "tests/test_a.py": """\
            from lowmem_grpo.a import three
            def test_that_fails_anyhow(): assert False
            def test_of_something_else(): assert True
            def test_of_three(): assert three() == 3
            """,
    }
    for name, text in files.items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_text(dedent(text))
    code = f"""\
        import json, pytest
        from dataclasses import asdict
        from pathlib import Path
        from bench.faults.copies import Copy
        from bench.faults.places import faults_in
        copy = Copy(Path({str(tmp_path / "copy")!r}))
        [fault] = faults_in("lowmem_grpo/a.py", (copy.folder / "lowmem_grpo/a.py").read_text())
        copy.left = 60
        print(json.dumps([asdict(copy.fails(fault, tests)) for tests in (["tests"], ["tests", "-k", "else"])]))
        """
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    done = subprocess.run([sys.executable, "-c", dedent(code)], cwd=ROOT, env=env, capture_output=True, text=True,
                          check=True, timeout=500)
    found, missed = json.loads(done.stdout.splitlines()[-1])
    assert found == {"test": "tests/test_a.py::test_of_three", "slow": False, "how": "failed", "whole": True}
    assert missed == {"test": "", "slow": False, "how": "", "whole": True}
    assert (tmp_path / "copy/lowmem_grpo/a.py").read_text() == files["lowmem_grpo/a.py"]
