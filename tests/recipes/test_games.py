"""The recipes that play: what they are made of, and short runs end to end."""

import json
from pathlib import Path

import pytest
from recipe_runs import invoke, lines, run

from lowmem_grpo.environments.env_spec import HELD_OUT
from lowmem_grpo.recipes import calculator, game2048, guess, tictactoe, twenty_questions
from lowmem_grpo.recipes.eval_task import held_out_games


def test_the_games_own_pay_decides_and_not_the_count_of_wins(tmp_path: Path) -> None:
    assert run("tictactoe", tmp_path).exit_code == 0
    rows = lines(tmp_path / "completions.jsonl")
    assert [row["reward"] for row in rows] == [row["rewards"]["TicTacToe"] for row in rows]
    assert all(row["turns"] and row["ending"] == "done" for row in rows)


@pytest.mark.parametrize(("name", "model"), [
    ("guess", "tiny-games"), ("calculator", "tiny-games"), ("tictactoe", "tiny-games"), ("game2048", "tiny-talks"),
    ("twenty_questions", "tiny-talks"), ("inbox", "tiny-inbox"),
])
@pytest.mark.every(3)
def test_eval_plays_the_same_games(name: str, model: str, tmp_path: Path) -> None:
    result = invoke("eval", model, "--recipe", name, "--limit", "6", "--out", str(tmp_path), "--engine",
                    "transformers")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "eval.json").read_text())
    assert found["prompts"] == 6 and 0 <= found["base"]["accuracy"] <= 1
    assert all(row["base"][0]["text"].startswith("> ") for row in found["rows"])


# data


def test_held_out_games_are_repeated_by_their_seed_and_never_trained_on() -> None:
    rows = held_out_games(50, 1).to_list()
    assert held_out_games(20, 1).to_list() == rows[:20] and held_out_games(50, 2).to_list() != rows
    assert min(row["seed"] for row in rows) >= HELD_OUT  # training has lower ones
    assert rows[0].keys() == held_out_games(1, 1, side=None)[0].keys() == {"prompt", "seed"}
    for exam, columns in ((tictactoe.EXAM, {"strength": 0.0}), (guess.EXAM, {}), (game2048.EXAM, {"side": 4}),
                          (twenty_questions.EXAM, {"world": "things"})):
        assert exam.problems(20, 1, None).to_list() == [row | columns for row in rows[:20]]


def test_only_what_the_policy_says_itself_is_its_answer() -> None:
    for completion, right in (
        ("2340", 1.0), ("It is 2340.", 1.0), ("2341", 0.0), ("", 0.0),
        ([{"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool", "content": "2340"}], 0.0),
        ([{"role": "tool", "content": "1"}, {"role": "assistant", "content": "2340"}], 1.0),
    ):
        assert calculator.correct_answer([completion], ["2340"]) == [right]
