"""How the package is built stays within limits; how large it is, and how its words are used, is only printed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.common import child
from bench.common.house import Checkout

BUDGET = {
    "files below 60 lines with one importer": 0, "folders at the top": 17, "files at the top": 10,
    "arrows between folders": 135, "arrows between subfolders": 216, "class names that stand twice": 6,
}
FILES = {"first rollout()": 50, "second rollout()": 42, "update()": 42, "chat call": 38, "train(groups)": 76}
MODULE = '''"""A module."""

from lowmem_grpo.lower.words import Word


class Word(Word):
    @property
    def short(self):
        """Whether it is short."""
        found = len(self)
        return found < 3  # of letters

    def take(self):
        """Return it."""

    def letters(self, one):
        """What it is made of."""
        # Of all letters, the first
        return one
'''


def test_the_package_grows_beyond_its_budget_only_on_purpose(record_property: Callable[[str, object], None]) -> None:
    figures = Checkout().figures()
    others = [f"{name} {figure:,}" for name, figure in figures.items() if name not in BUDGET]
    record_property("printed", f"the package: {', '.join(others)}")
    over = {name: f"{figures[name]}, limit {most}" for name, most in BUDGET.items() if figures[name] > most}
    assert over == {}, "shorten other code, or raise the limit in BUDGET in a commit of its own that says why"


@pytest.mark.slow
def test_a_call_enters_no_more_files_than_before() -> None:
    entered: dict[str, Any] = child.run("bench.common.entered", seconds=300)
    assert entered.keys() == FILES.keys(), entered
    assert {name: entered[name] for name, most in FILES.items() if entered[name] > most} == {}


def test_the_figures_are_those_of_a_package_counted_by_hand(tmp_path: Path) -> None:
    for name, text in {"lowmem_grpo/__init__.py": "", "lowmem_grpo/lower/__init__.py": "", "bench/a.py": "a\nb\n",
                       "lowmem_grpo/lower/words.py": "class Word(str):\n    pass\n",
                       "lowmem_grpo/upper/__init__.py": "", "lowmem_grpo/upper/talk.py": MODULE}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    figures = Checkout(tmp_path).figures()
    assert figures == {
        "package lines": 2 + MODULE.count("\n"), "core lines": 2 + MODULE.count("\n"), "package files": 5,
        "median lines of a file": 0, "files below 60 lines with one importer": 1, "folders at the top": 2,
        "files at the top": 1, "arrows between folders": 1, "arrows between subfolders": 1,
        "class names that stand twice": 1, "uses of `found`": 2, "uses of `one`": 2, "uses of `given`": 0,
        "methods without an object": 1, "docstrings without a verb": 1, "comments that begin with of": 2,
        "bench lines": 2, "tests lines": 0,
    }
