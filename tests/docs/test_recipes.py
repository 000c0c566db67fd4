"""The page of the recipes is up to date, and the bench behind it measures what a user would see."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.learning.recipe_runs import main
from lowmem_grpo.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def source() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        import make_recipes

        yield make_recipes


@pytest.fixture(scope="module")
def page(source: Any) -> str:
    return str(source.page())


def test_the_page_is_that_of_the_recipes_each_told_in_words_with_a_measured_row(source: Any, page: str) -> None:
    assert page == source.PAGE.read_text(encoding="utf-8"), "run python docs/make_recipes.py"
    parts = ("teaches", "about", "commands", "rewards", "expect")
    assert [name for name in RECIPES if not all(source.WORDS[name][part] for part in parts)] == []
    measured = {name for (name, _), row in source.read_rows().items() if "missing" not in row}
    assert measured == set(RECIPES)


def test_the_page_has_a_row_and_a_picture_of_each_recipe_that_learned_and_names_the_others(
    source: Any, page: str
) -> None:
    rows = source.read_rows().values()
    learned = {row["recipe"] for row in rows if (row.get("accuracy_after") or 0) > (row.get("accuracy_before") or 0)}
    assert {path.stem for path in source.PICTURES.glob("*.svg")} == learned and learned < set(RECIPES)
    for name in RECIPES:
        in_table = f"| [{name}](#{name}) | {source.WORDS[name]['teaches']} |" in page
        among_others, has_picture = f"\n- [{name}](#{name}): " in page, f"](recipes/{name}.svg)" in page
        assert (in_table, has_picture, among_others) == (*[name in learned] * 2, name not in learned), name


def test_every_option_of_a_recipe_is_explained_in_its_section_or_for_all_recipes(source: Any, page: str) -> None:
    assert not [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")]
    listed = source.shared_options().keys() | {"config"}
    for name in RECIPES:
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        own = {entry.name for entry in fields(source.module_of(name).OPTIONS)} - listed
        assert [option for option in own if f"\n| `{option}` | `" not in section] == [], name


def bench(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


@pytest.mark.slow
def test_the_row_of_a_run_says_what_the_run_wrote(tmp_path: Path) -> None:
    small = ["train_size=16", "eval_problems=8", "num_generations=2", "per_device_train_batch_size=4",
             "gradient_accumulation_steps=1"]
    done = bench("--recipes", "arithmetic", "--steps", "2", "--seed", "3", "--runs", str(tmp_path), "--output",
                 str(tmp_path / "rows.jsonl"), *(word for option in small for word in ("--option", option)))
    assert done.exit_code == 0, done.output
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    summary = json.loads((tmp_path / "arithmetic" / "summary.json").read_text())
    assert (row["accuracy_after"], row["steps"], row["seed"]) == (summary["accuracy_after"], 2, 3)
    assert len(row["rewards"]) == len(row["step_seconds"]) == 2
    assert row["command_seconds"] > summary["train_seconds"] > 0 and row["host_peak_bytes"] > 2**27


def test_a_recipe_that_fails_leaves_a_row_with_the_reason_and_a_bad_exit_status(tmp_path: Path) -> None:
    done = bench("--recipes", "arithmetic", "--runs", str(tmp_path), "--output", str(tmp_path / "rows.jsonl"),
                 "--option", "arithmetic:max_stepz=1")
    assert done.exit_code == 1
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert "no option 'max_stepz'" in row["missing"]
