"""The recipes that play: what they are made of, short runs end to end, and the small model that they begin with."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bench.tiny_models import games_model
from bench.tiny_models.games_model import TOOLS, calculator_talk, guess_talk, tictactoe_talk
from bench.tiny_models.talks import encode_talk
from lowmem_grpo.cli.main import main
from lowmem_grpo.environments.rows import HELD_OUT
from lowmem_grpo.models.model_names import resolve
from lowmem_grpo.recipes import calculator, game2048, guess, tictactoe, twenty_questions
from lowmem_grpo.recipes.calculator import Sum, calculate
from lowmem_grpo.recipes.tictactoe import TicTacToe

MODELS = {"guess": "tiny-games", "calculator": "tiny-games", "tictactoe": "tiny-games", "game2048": "tiny-talks",
          "twenty_questions": "tiny-talks"}


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def run(name: str, folder: Path, *words: str) -> Result:
    small = ["max_steps=1", "eval_problems=4", "num_generations=2", "per_device_train_batch_size=4",
             "gradient_accumulation_steps=1", "engine=transformers", f"output_dir={folder}"]
    return invoke("run", name, *small, *words)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "paid"), [
    ("guess", {"won", "Guess"}), ("calculator", {"correct_answer"}), ("tictactoe", {"won", "TicTacToe"}),
    ("game2048", {"won", "Game2048"}), ("twenty_questions", {"won", "TwentyQuestions"}),
])
def test_a_short_run_plays_trains_and_says_how_others_play(name: str, paid: set[str], tmp_path: Path) -> None:
    result = run(name, tmp_path, "seed=3")
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["recipe"], summary["status"], summary["steps"], summary["model"]) == \
        (name, "finished", 1, MODELS[name])
    assert summary["eval_problems"] == len(summary["samples"]) == 4
    assert {"accuracy_before", "accuracy_after"} <= summary.keys()
    (line,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {f"rewards/{reward}/mean" for reward in paid} <= line.keys()
    assert line["reward"] is not None
    expected = {"guess": {"blind", "in range", "bisection"}, "tictactoe": {"random", "perfect"}, "calculator": set(),
                "game2048": {"random", "corner", "greedy"}, "twenty_questions": {"blind", "listening", "halving"}}
    assert set(summary.get("baselines", {})) == expected[name]
    assert all(0 <= share <= 1 for share in summary.get("baselines", {}).values())


def test_the_games_own_pay_decides_and_not_the_count_of_wins(tmp_path: Path) -> None:
    assert run("tictactoe", tmp_path).exit_code == 0
    rows = [json.loads(text) for text in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [row["rewards"]["TicTacToe"] for row in rows]
    assert all(row["turns"] and row["ending"] == "done" for row in rows)


@pytest.mark.parametrize("name", MODELS)
def test_eval_plays_the_same_games(name: str, tmp_path: Path) -> None:
    result = invoke("eval", MODELS[name], "--recipe", name, "--limit", "6", "--out", str(tmp_path), "--engine",
                    "transformers")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "eval.json").read_text())
    assert found["prompts"] == 6 and 0 <= found["base"]["accuracy"] <= 1
    assert all(row["base"][0]["text"].startswith("> ") for row in found["rows"])


@pytest.mark.parametrize(("name", "word", "message"), [
    ("guess", "largest=1", "largest is 1 and tries is 5; they must be at least 2 and 1"),
    ("guess", "tries=0", "at least 2 and 1"),
    ("tictactoe", "strengths=half", "strengths is 'half'; give numbers with commas between them"),
    ("tictactoe", "strengths=0,2", "from 0 (random) to 1 (perfect)"),
    ("tictactoe", "test_strength=-1", "test_strength is -1.0; it must be from 0"),
    ("calculator", "eval_problems=0", "eval_problems is 0; it must be a whole number"),
    ("game2048", "side=5", "side is 5; it must be 3 or 4"),
    ("game2048", "goal=33", "goal is 33; it must be 8, 16, 32, or another power of two above"),
    ("twenty_questions", "world=animals", "world is 'animals'; it must be numbers or things"),
    ("twenty_questions", "turns=0", "turns is 0; it must be at least 1"),
])
def test_a_wrong_option_is_found_before_the_model_is_loaded(
    name: str, word: str, message: str, tmp_path: Path
) -> None:
    result = run(name, tmp_path / "run", word)
    assert result.exit_code == 1 and message in result.output
    assert not (tmp_path / "run").exists()


# data


def test_held_out_games_are_repeated_by_their_seed_and_never_trained_on() -> None:
    for make in (guess.make_dataset, tictactoe.make_dataset, game2048.make_dataset, twenty_questions.make_dataset):
        rows = make(50, 1).to_list()
        assert make(20, 1).to_list() == rows[:20] and make(50, 2).to_list() != rows
        assert min(row["seed"] for row in rows) >= HELD_OUT  # training has lower ones


def test_the_opponent_before_and_after_training_is_the_one_asked_for() -> None:
    game = TicTacToe((1.0,))
    for row in tictactoe.make_dataset(5, 0, 0.25):
        game.reset(**row)
        assert game.strength == 0.25


def test_only_what_the_policy_says_itself_is_its_answer() -> None:
    for completion, right in (
        ("2340", 1.0), ("It is 2340.", 1.0), ("2341", 0.0), ("", 0.0),
        ([{"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool", "content": "2340"}], 0.0),
        ([{"role": "tool", "content": "1"}, {"role": "assistant", "content": "2340"}], 1.0),
    ):
        assert calculator.correct_answer([completion], ["2340"]) == [right]


# the model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(resolve("tiny-games"))


def test_a_prompt_of_the_games_tells_the_tools_and_a_call_is_rendered_as_hermes_does(
    tokenizer: PreTrainedTokenizerFast
) -> None:
    talk = calculator_talk(always(0.0), Sum(60, "*", 39))
    text = tokenizer.apply_chat_template(talk, tools=TOOLS, tokenize=False)
    assert "Tools: calculate(expression)" in text
    assert '<tool_call>\n{"name": "calculate", "arguments": {"expression": "60 * 39"}}\n</tool_call><|im_end|>' in text
    assert text.endswith("<|im_start|>tool\n2340<|im_end|>\n<|im_start|>assistant\n2340<|im_end|>\n")
    assert "Tools" not in tokenizer.apply_chat_template(talk[:1], tokenize=False)


def always(number: float) -> random.Random:
    rng = random.Random(0)
    rng.random = lambda: number  # type: ignore[method-assign]
    return rng


@pytest.mark.parametrize("make", [
    guess_talk, tictactoe_talk, lambda rng: calculator_talk(rng, Sum(60, "*", 39)),
])
def test_a_demonstration_trains_what_the_assistant_says_and_nothing_else(
    make: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    for seed in range(20):
        talk = make(random.Random(seed))
        ids, own = encode_talk(tokenizer, talk, TOOLS)
        said = tokenizer.decode([token for token, mine in zip(ids, own, strict=True) if mine])
        turns = [one for one in talk if one["role"] == "assistant"]
        assert said.count("<|im_end|>") == len(turns)
        assert all(one["content"] in said for one in turns)
        assert not any(one["content"] in said for one in talk if one["role"] == "user" and len(one["content"]) > 4)


def test_demonstrations_call_and_err_as_often_as_they_should() -> None:
    rng, problem = random.Random(0), Sum(60, "*", 39)
    talks = [calculator_talk(rng, problem) for _ in range(2000)]
    called = [talk for talk in talks if len(talk) > 2]
    assert len(called) / 2000 == pytest.approx(games_model.CALLS, abs=0.03)
    assert all(talk[-1]["content"] == "2340" for talk in called)
    assert all(talk[-1]["content"] != "2340" for talk in talks if len(talk) == 2)
    assert calculate(problem.expression) == "2340"
