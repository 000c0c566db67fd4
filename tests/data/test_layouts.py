"""Rows in the layouts of public datasets: what is asked, what the answer is, and what pays for it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from public_rows import LAYOUTS, Layout
from recipe_runs import invoke

from lowmem_grpo.data.layouts import answer_of, prompt_of
from lowmem_grpo.recipes.new_recipe import KINDS
from lowmem_grpo.recipes.recipe_file import load_recipe
from lowmem_grpo.rewards.ready.code import code_passes_tests


def write(folder: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> str:
    """What `lowmem-grpo new` says of the rows, in a folder where it writes mine.py."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", list(sys.path))
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = invoke("new", "mine", "--data", "rows.jsonl")
    return f"{done.exit_code} {' '.join(done.output.split())}"


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if not layout.refused])
@pytest.mark.every(2)
def test_rows_of_a_public_dataset_give_its_question_and_its_answer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout: Layout = LAYOUTS[name]
    told = write(tmp_path, layout.rows, monkeypatch)
    assert told.startswith("0 "), told
    rows = list(load_recipe("./mine.py").DATA.rows) if layout.kind != "code" else made(tmp_path, layout)
    about, system = KINDS[layout.kind]
    assert about in told, told
    own = [] if any(role == "system" for role, _ in layout.messages) else [("system", system)]
    assert [(each["role"], each["content"]) for each in rows[0]["prompt"]] == own + layout.messages
    wanted = layout.answer if isinstance(layout.answer, str) else json.dumps(layout.answer)
    assert rows[0]["answer"] == wanted and len(rows) == len(layout.rows)


def made(folder: Path, layout: Layout) -> list[dict[str, Any]]:
    """The rows of a recipe whose verifier needs a sandbox, which this machine may not have."""
    text = (folder / "mine.py").read_text().replace('rewards.code_passes_tests("answer")', "rewards.answer_match()")
    assert text != (folder / "mine.py").read_text()
    (folder / "mine.py").write_text(text)
    return list(load_recipe("./mine.py").DATA.rows)


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.refused])
def test_rows_that_need_more_than_two_columns_are_refused_with_the_columns_and_what_to_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = write(tmp_path, LAYOUTS[name].rows, monkeypatch)
    assert told.startswith("1 ") and LAYOUTS[name].refused in told, told
    assert not (tmp_path / "mine.py").exists()


ADD = "a, b = map(int, input().split())\nprint(a + b)"
RIGHT = {"mbpp": "def f(x):\n    return x", "humaneval": "def f1(x):\n    return x", "apps": ADD, "verl code": ADD,
         "livecodebench": "def add(a, b):\n    return a + b"}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.every(2)
def test_the_tests_of_a_public_dataset_pass_right_code_and_no_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, LAYOUTS[name].rows, monkeypatch)
    answer = made(tmp_path, LAYOUTS[name])[0]["answer"]
    right, wrong = (f"```python\n{code}\n```" for code in (RIGHT[name], "def f(x):\n    return 7"))
    verifier = code_passes_tests("answer", isolation="process")
    assert verifier.verdicts([right, wrong], answer=[answer] * 2) == [True, False]


def test_a_chat_without_a_question_has_no_prompt_and_a_row_without_an_answer_has_none() -> None:
    assert prompt_of([{"role": "assistant", "content": "Hello"}], "Think.") == []
    assert answer_of({"messages": [{"role": "user", "content": "Hi"}]}, "messages") is None
    assert answer_of({"a": {"b": {"c": 5.0}}}, "a.b.c") == "5" and answer_of({"a": {}}, "a.b") is None


@pytest.mark.parametrize("row", [
    {"A": "What is it?", "B": "4"}, {"messages": [{"role": "user", "content": "Hi"}], "answer": "4", "tools": None},
])
def test_columns_that_only_look_like_choices_or_tools_are_taken(
    row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = write(tmp_path, [row] * 3, monkeypatch)
    assert told.startswith("0 ") and "FILL IN" not in told, told
