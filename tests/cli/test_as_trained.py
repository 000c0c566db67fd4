"""What `lowmem-grpo eval` and `generate` ask of a run is what the run itself asked: its recipe's options, its seed, its
number of problems and its episodes, unless the command line gives others."""

import json
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import invoke, invoke_well, run_well

from lowmem_grpo.recipes.options import recalled
from lowmem_grpo.recipes.recipe_file import find_recipe, summary_of

FEW = ["train_size=8", "max_completion_length=12"]


def evaluated(folder: Path, *words: Any) -> tuple[dict[str, Any], str]:
    """eval.json of a run, and all that the command printed."""
    result = invoke_well("eval", folder, *words)
    return json.loads((folder / "eval.json").read_text()), " ".join(result.output.split())


@pytest.mark.every(2)
@pytest.mark.parametrize(("recipe", "words"), [
    ("countdown", ["min_numbers=5", "max_numbers=5", "largest_target=30", "operators=+-", *FEW]),
    ("instructions", ["model=tiny", "kinds=title", *FEW]),
    ("guess", ["largest=9", "tries=2"]),
    *(pytest.param(recipe, words, marks=pytest.mark.slow) for recipe, words in (
        ("arithmetic", FEW), ("game2048", ["goal=16", "moves=3"]),
        ("game2048", ["side=4", "moves=2", "max_turn_tokens=2"]), ("twenty_questions", ["world=numbers", "turns=2"]),
        ("tictactoe", ["test_strength=1.0"]), ("email", ["longest_words=1", *FEW]),
        ("inbox", ["calls=2", "train_size=8", "max_turns=3", "max_completion_length=96"]),
        ("proximity", ["sft_steps=0", *FEW]), ("shapes", FEW), ("calculator", ["train_size=8", "max_turns=1"]))),
])
def test_a_run_is_tested_on_the_problems_that_it_was_measured_on(recipe: str, words: list[str], tmp_path: Path) -> None:
    run_well(recipe, tmp_path, "seed=3", *words)
    summary = json.loads((tmp_path / "summary.json").read_text())
    found, said = evaluated(tmp_path)
    texts = {(row["base"][0]["text"], row["adapter"][0]["text"]) for row in found["rows"]}
    assert texts == {(sample["before"], sample["after"]) for sample in summary["samples"]}
    assert [found[model]["accuracy"] for model in ("base", "adapter")] == [
        summary["accuracy_before"], summary["accuracy_after"]]
    assert found["seed"] == 3 and "problems as in the run with " in said and "seed 3; KEY=VALUE" in said
    own = [word for word in words if word.partition("=")[0] in summary["options"]]
    assert all(word in said for word in own)


def test_the_command_line_has_the_last_word(tmp_path: Path) -> None:
    run_well("countdown", tmp_path, "max_completion_length=6", "train_size=8", "min_numbers=5", "max_numbers=5",
             "seed=3")
    found, said = evaluated(tmp_path, "min_numbers=2", "--recipe", "countdown", "--seed", 0, "--limit", 6)
    counts = {len(row["numbers"]) for row in found["rows"]}
    assert len(found["rows"]) == 6 and found["seed"] == 0 and counts - {5} and counts <= {2, 3, 4, 5}
    assert "min_numbers" not in said.partition("problems as in the run with ")[2].partition(";")[0]
    found, said = evaluated(tmp_path / "adapter", "--recipe", "proximity")
    assert found["seed"] == 0 and "problems as in the run" not in said  # of another recipe, nothing is taken
    assert [row["prompt"] for row in evaluated(tmp_path / "adapter")[0]["rows"]] == [
        row["prompt"] for row in evaluated(tmp_path)[0]["rows"]]


def test_an_episode_is_that_of_the_run(tmp_path: Path) -> None:
    run_well("guess", tmp_path, "largest=9", "tries=2")
    shown = invoke_well("generate", "--recipe", "guess", "--adapter", tmp_path, "--seed", 3)
    assert "from 1 to 9 in 2 tries" in shown.stdout and "the task is as in the run: largest=9, tries=2" in shown.stderr
    shown = invoke_well("generate", "--recipe", "guess", "largest=5", "--adapter", tmp_path, "--seed", 3)
    assert "from 1 to 5 in 2 tries" in shown.stdout


def test_a_run_goes_on_with_the_problems_with_which_it_began(tmp_path: Path) -> None:
    words = ["train_size=8", "max_completion_length=6", "save_steps=1"]
    run_well("countdown", tmp_path, *words, "min_numbers=5", "max_numbers=5")
    result = run_well("countdown", tmp_path, *words, "resume=true", "max_steps=2", "max_numbers=6")
    assert "as the run was started: min_numbers=5" in result.output
    options = json.loads((tmp_path / "summary.json").read_text())["options"]
    assert (options["min_numbers"], options["max_numbers"]) == (5, 6)
    asked = [json.loads(line)["prompt"] for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert {prompt.partition("numbers ")[2].partition(".")[0].count(",") for prompt in asked} <= {4, 5}


def test_a_recipe_file_is_not_run_unasked(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"recipe": "mine", "status": "finished"}')
    assert summary_of(tmp_path, "./mine.py")["status"] == "finished" and summary_of(tmp_path, "gsm8k") == {}
    result = invoke("eval", tmp_path)
    assert result.exit_code == 2 and "recipe mine of your own" in result.output and "--recipe ./mine.py" in \
        result.output


def test_a_record_of_another_kind_of_value_is_refused() -> None:
    countdown = find_recipe("countdown").OPTIONS
    assert recalled(countdown, {"max_numbers": 5, "gone": 1}, ["min_numbers=5"]).max_numbers == 5
    with pytest.raises(ValueError, match=r"options in the run's summary\.json cannot be used"):
        recalled(countdown, {"max_numbers": [1]}, [])
    with pytest.raises(ValueError, match="min_numbers is 9"):
        recalled(countdown, {"min_numbers": 9}, [])


def test_no_key_is_written_into_a_runs_records() -> None:
    inbox = find_recipe("inbox").OPTIONS(reward="ruler", judge_key="sk-1", calls=3)
    assert inbox.of_recipe["calls"] == 3 and "judge_key" not in inbox.of_recipe
    assert {"isolation", "workers"}.isdisjoint(find_recipe("code").OPTIONS().of_recipe)  # of this machine
