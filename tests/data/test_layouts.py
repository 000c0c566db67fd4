"""Rows in the layouts of public datasets: what is asked, what the answer is, and what pays for it."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from datasets import Dataset
from public_rows import LAYOUTS, Layout

from lowmem_grpo.cli import main
from lowmem_grpo.recipes.new.kinds import KINDS
from lowmem_grpo.recipes.recipe_file import load_recipe


def write(folder: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> str:
    """What `lowmem-grpo new` says of the rows, in a folder where it writes mine.py."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = CliRunner().invoke(main, ["new", "mine", "--data", "rows.jsonl"])
    return f"{done.exit_code} {' '.join(done.output.split())}"


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if not layout.refused])
def test_rows_of_a_public_dataset_give_its_question_and_its_answer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout: Layout = LAYOUTS[name]
    told = write(tmp_path, layout.rows, monkeypatch)
    assert told.startswith("0 "), told
    rows = list(load_recipe("./mine.py").DATA.rows) if layout.kind != "code" else made(tmp_path, layout)
    kind = KINDS[layout.kind]
    assert kind.about in told, told
    own = [] if any(role == "system" for role, _ in layout.messages) else [("system", kind.system)]
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
