"""`lowmem-grpo generate --recipe`: an episode is shown turn by turn, a person plays beside or against the model, and
what cannot be played is refused at once."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from recipe_runs import invoke, run_well
from terminal import Terminal

from lowmem_grpo.cli.generate import say as say_part
from lowmem_grpo.cli.playing import say
from lowmem_grpo.trainer.play import typed_calls
from lowmem_grpo.types import ToolCall


def generate(*words: Any, typed: str = "") -> Result:
    return invoke("generate", *words, typed=typed)


def test_an_episode_is_shown_turn_by_turn_and_the_same_seed_plays_it_again() -> None:
    first = generate("--recipe", "guess", "--seed", 3)
    assert first.exit_code == 0, first.output
    lines = first.stdout.splitlines()
    assert lines[0] == "user: Guess my number from 1 to 32 in 5 tries. Reply with a number."
    assert lines[1].startswith("model: ") and lines[2].startswith("user: ")
    assert "the model " in lines[-1] and "reward" in lines[-1] and "--seed 3" in lines[-1]
    found = json.loads(generate("--recipe", "guess", "--seed", 3, "--json").stdout)
    said = [line.removeprefix("model: ") for line in lines if line.startswith("model: ")]
    assert [turn["text"] for turn in found["turns"]] == said and found["seed"] == 3


def test_without_a_seed_the_task_and_its_episode_are_those_of_the_run_or_the_first_at_each_call(tmp_path: Path) -> None:
    first, again = (json.loads(generate("--recipe", "guess", "--json").stdout) for _ in range(2))
    said = [[turn["text"] for turn in episode["turns"]] for episode in (first, again)]
    assert said[0] == said[1] and first["seed"] == again["seed"] == 0
    run_well("guess", tmp_path, "seed=5")
    assert json.loads(generate("--recipe", "guess", "--adapter", tmp_path, "--json").stdout)["seed"] == 5


def test_a_person_plays_the_same_task_before_the_model_with_its_tools() -> None:
    done = generate("--recipe", "calculator", "--seed", 3, "--you", "beside",
                    typed='calculate(expression="84 * 38")\n3192\n')
    assert done.exit_code == 0, done.output
    mine, _, models = done.stdout.partition("now the model, with the same task")
    assert "user: What is 84 * 38?" in mine and "tool calculate: 3192" in mine and "you solved it: 2 turns" in mine
    assert "user: What is 84 * 38?" in models and "the model" in models


def test_a_person_plays_against_the_model_and_is_asked_again_for_what_is_no_move() -> None:
    squares = "\n".join("123456789" * 9)
    done = generate("--recipe", "tictactoe", "--seed", 3, "--you", "against", typed=f"no\n5\n{squares}\n")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("You are O. Name a free square.") >= 2 and "4|O|6" in done.stdout


def test_a_person_thinks_of_something_and_answers_the_model() -> None:
    done = generate("--recipe", "twenty_questions", "--seed", 3, "--you", "against", typed="yes\n" * 6)
    assert done.exit_code == 0, done.output
    assert "You think of: " in done.stdout and "Is it above " in done.stdout and "yes: " in done.stdout


def test_a_game_without_an_opponent_is_not_played_against() -> None:
    done = generate("--recipe", "guess", "--you", "against")
    assert done.exit_code == 1 and "no attribute `opponent`" in " ".join(done.output.split())


@pytest.mark.parametrize("typed", ["", "16\n"])
def test_the_end_of_the_input_stops_the_command(typed: str) -> None:
    done = generate("--recipe", "guess", "--seed", 3, "--you", "beside", typed=typed)
    assert done.exit_code == 130 and "stopped by Ctrl-C" in done.stderr


def test_calls_that_a_person_types_are_read_line_by_line() -> None:
    assert typed_calls('search(words="a b")\nread(id=3)') == [
        ToolCall("search", {"words": "a b"}), ToolCall("read", {"id": 3})]
    assert typed_calls("the answer is f(x) of 3") == []


def test_what_a_model_says_does_not_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for tty in (True, False):
        monkeypatch.setattr(sys, "stdout", shown := Terminal(tty=tty))
        say("the model", "\x1b]0;owned\x07")
        assert "owned" in shown.shown and "\x1b]" not in shown.shown
        say_part("\x1b]0;more\x07")
        assert "more" in shown.shown and ("\x1b]" in shown.shown) is not tty  # a file gets what was sampled
