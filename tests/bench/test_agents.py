"""The bench of public ART programs changes only what it says it changes, and its table tells what happened."""

import ast

import pytest
from tables import every_row

from bench.agents import ProgramChanges, agents_table
from bench.common.rows import RESULTS, read_rows


@every_row(("before", "after", "kind"), [
    ("!uv pip install art\nx = 1", "pass\nx = 1", "imports"),
    ("import art", "from lowmem_grpo import agents as art", "imports"),
    ("from art.local import LocalBackend", "from lowmem_grpo.agents.local import LocalBackend", "imports"),
    ("from art.rewards import ruler", "from lowmem_grpo.agents.rewards import ruler", "imports"),
    ("await backend._experimental_push_to_s3(model)", "pass", "backend"),
    ("BASE_MODEL = 'a/b-7B'", "BASE_MODEL = 'small'", "model"),
    ("art.TrainableModel(name='n', base_model='a/b-7B')", "art.TrainableModel(name='n', base_model='small')", "model"),
    ("for i in range(await model.get_step(), 1_000): pass", "for i in range(await model.get_step(), 2): pass", "steps"),
])
def test_a_change_is_made_and_counted(before: str, after: str, kind: str) -> None:
    changes = ProgramChanges("small")
    assert ast.unparse(ast.parse(changes.rewrite(before))) == ast.unparse(ast.parse(after))
    assert changes.counts == {kind: 1}


@pytest.mark.parametrize("text", [
    "for i in range(10): pass", "name = 'a/b-7B'", "from openai import AsyncOpenAI", "no python at all",
])
def test_nothing_else_is_changed(text: str) -> None:
    changes = ProgramChanges("small")
    assert (changes.rewrite(text), changes.counts) == (text, {})


def test_the_recorded_rows_make_a_table_whose_lines_have_all_cells() -> None:
    rows = read_rows(RESULTS / "agents.jsonl")
    lines = agents_table(rows)
    assert {row["program"] for row in rows} == {line.split("|")[1].strip() for line in lines[7:]}
    assert all(line.count("|") == lines[5].count("|") for line in lines[5:])
    assert f"{sum('| runs |' in line for line in lines)} of {len(lines) - 7} ran" in lines[3]


def test_a_program_that_failed_or_trained_nothing_is_said_to_have() -> None:
    rows = [{"program": "a", "steps": 0, "seconds": 1.0}, {"program": "b", "steps": 2, "total": 4, "trained": 3},
            {"program": "c", "steps": 1, "error": "ValueError: no | good", "failed_cell": 4}]
    lines = agents_table(rows)
    assert lines[3].startswith("1 of 3 ran")
    assert "it trains nothing" in lines[7] and "| 3 of 4 |" in lines[8] and "| runs |" in lines[8]
    assert "cell 4: ValueError: no / good |" in lines[9]
