"""Short runs of recipes: they finish, and leave what a run leaves; and options of all recipes that are refused before a
model is loaded."""

from pathlib import Path

import pytest
from recipe_runs import invoke, records, run, run_well
from tables import every_row

from lowmem_grpo.recipes.tasks import mail_database
from lowmem_grpo.rewards.sandbox.trial import ISOLATIONS, why_not

WORKING = [name for name in ISOLATIONS if why_not(name) is None]
needs_isolation = pytest.mark.skipif(not WORKING, reason="no isolation works here: " + str(why_not("process")))
ISOLATION = WORKING[0] if WORKING else "process"
FEW = ["train_size=8", "max_completion_length=6"]
MODELS = {"guess": "tiny-games", "calculator": "tiny-games", "tictactoe": "tiny-games", "game2048": "tiny-talks",
          "twenty_questions": "tiny-talks"}


@pytest.mark.parametrize(("name", "words", "said", "rewards", "players"), [
    pytest.param("code", [*FEW, f"isolation={ISOLATION}", "seconds=3"], f"Code runs in {ISOLATION}",
                 ["code_passes_tests", "one_block"], [], marks=needs_isolation),
    ("countdown", [*FEW, "max_numbers=3"], "The embedded tiny model does not know countdown",
     ["reaches_target", "given_numbers", "answer_line"], []),
    ("email", FEW, "The embedded tiny model cannot write e-mails",
     ["keyword_present", "ideal_answer", "too_long", "recipient_named", "signed"], []),
    *(pytest.param(name, [], "", rewards, players, marks=pytest.mark.slow) for name, rewards, players in (
        ("calculator", ["correct_answer"], []), ("guess", ["won", "Guess"], ["blind", "in range", "bisection"]),
        ("tictactoe", ["won", "TicTacToe"], ["random", "perfect"]),
        ("game2048", ["won", "Game2048"], ["random", "corner", "greedy"]),
        ("twenty_questions", ["won", "TwentyQuestions"], ["blind", "listening", "halving"]))),
])
@pytest.mark.every(3)
def test_a_short_run_finishes_on_the_embedded_model_and_says_how_others_play(
    name: str, words: list[str], said: str, rewards: list[str], players: list[str], tmp_path: Path
) -> None:
    result = run_well(name, tmp_path, "seed=3", *words)
    assert said in result.output and "accuracy before" in result.output
    summary, line = records(tmp_path)
    found = [summary[key] for key in ("recipe", "status", "steps", "seed", "model")]
    assert found == [name, "finished", 1, 3, MODELS.get(name, "tiny")]
    assert summary["eval_problems"] == 4 == len(summary["samples"])
    assert {"accuracy_before", "accuracy_after"} <= summary.keys() and line["reward"] is not None
    assert name != "code" or (summary["isolation"] == ISOLATION and any("tests/error" in key for key in line))
    assert {f"rewards/{reward}/mean" for reward in rewards} <= line.keys()
    shares = summary.get("baselines", {})
    assert set(shares) == set(players) and all(0 <= share <= 1 for share in shares.values())
    assert (tmp_path / "report.html").is_file()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@every_row(("words", "message"), [
    ("gsm8k gpu=99", "gpu is '99'; allowed are auto, cpu, 8, 16, 24, 48, 80"),
    ("gsm8k gradient_checkpointing_mode=disk", "allowed: none, device, offload"),
    ("countdown min_numbers=5", "min_numbers is 5, above max_numbers, which is 4"),
    ("inbox judge_model=m", "judge_model is for a judge: give reward=ruler with it"),
    ("inbox judge=http://127.0.0.1/v1", "judge is for a judge: give reward=ruler"),
    ("inbox reward=ruler judge=http://127.0.0.1/v1", "judge_model is missing"),
    ("inbox calls=6", "max_turns is 6, but an episode has 6 calls; give max_turns=7 or more, or fewer calls"),
    ("inbox eval_problems=1000", "the mailbox 'small' of seed 0 has 67 questions to test, and 1000 are asked for"),
    ("judge judge=http://127.0.0.1/v1", "judge_model is missing"),
    ("judge judge_model=m", "judge_model is for a judge at an address"), ("judge judge_keys=x", "judge_key"),
])
def test_a_wrong_option_is_found_before_the_model_is_loaded(words: str, message: str, tmp_path: Path) -> None:
    name, *options = words.split()
    small = "max_steps=1", "gpu=cpu", "engine=transformers", f"output_dir={tmp_path / 'run'}"
    result = invoke("run", name, *small, *options)
    assert result.exit_code != 0 and message in result.output
    assert not (tmp_path / "run").exists()


def test_a_python_without_full_text_search_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail_database, "PROBE", "CREATE VIRTUAL TABLE words USING fts99 (word)")
    result = run("inbox", tmp_path / "run")
    assert result.exit_code == 1 and "has no full-text search FTS5 (no such module: fts99)" in result.output
    assert not (tmp_path / "run").exists()
