"""Short runs of the recipes that the embedded model cannot learn: they finish, and leave what a run leaves; and options
of all recipes that are refused before a model is loaded."""

from pathlib import Path

import pytest
from recipe_runs import invoke, records, run

from lowmem_grpo.recipes.tasks import mail_database
from lowmem_grpo.rewards.sandbox.isolation import ISOLATIONS, why_not

WORKING = [name for name in ISOLATIONS if why_not(name) is None]
needs_isolation = pytest.mark.skipif(not WORKING, reason="no isolation works here: " + str(why_not("process")))
ISOLATION = WORKING[0] if WORKING else "process"
FEW = ("train_size=8", "max_completion_length=6")


@pytest.mark.parametrize(("name", "words", "said", "rewards"), [
    pytest.param("code", [f"isolation={ISOLATION}", "seconds=3"], f"Code runs in {ISOLATION}",
                 ["code_passes_tests", "one_block"], marks=needs_isolation),
    ("countdown", ["max_numbers=3"], "The embedded tiny model does not know countdown",
     ["reaches_target", "given_numbers", "answer_line"]),
    ("email", [], "The embedded tiny model cannot write e-mails",
     ["keyword_present", "ideal_answer", "too_long", "recipient_named", "signed"]),
])
@pytest.mark.every(3)
def test_a_recipe_finishes_on_the_embedded_model(
    name: str, words: list[str], said: str, rewards: list[str], tmp_path: Path
) -> None:
    result = run(name, tmp_path, "seed=3", *FEW, *words)
    assert result.exit_code == 0, result.output
    assert said in result.output and "accuracy before" in result.output
    summary, line = records(tmp_path)
    assert (summary["recipe"], summary["status"], summary["steps"], summary["seed"]) == (name, "finished", 1, 3)
    assert summary["eval_problems"] == 4 == len(summary["samples"])
    assert {"accuracy_before", "accuracy_after"} <= summary.keys()
    assert name != "code" or summary["isolation"] == ISOLATION
    assert {f"rewards/{reward}/mean" for reward in rewards} <= line.keys()
    assert name != "code" or any("tests/error" in key for key in line)
    assert (tmp_path / "report.html").is_file()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(("words", "message"), [
    ("code isolation=docker", "isolation is 'docker'; allowed are bubblewrap, process"),
    ("code seconds=0", "seconds is 0.0; it must be a finite number, at least 0.05"),
    pytest.param(f"code isolation={ISOLATION} workers=0", "workers is 0", marks=needs_isolation),
    ("countdown max_numbers=9", "they must be 2 to 6"), ("countdown operators=^", "operators is '^'"),
    ("countdown eval_problems=0", "eval_problems is 0; it must be"),
    ("countdown engine=llama", "allowed: auto, transformers, vllm"),
    ("email longest_words=-1", "longest is -1"), ("proximity sft_steps=-1", "sft_steps is -1; it must be"),
    ("gsm8k dataset=nowhere.jsonl", "no file 'nowhere.jsonl' that can be read; allowed are .jsonl"),
    ("gsm8k gpu=99", "gpu is '99'; allowed are auto, cpu, 16, 24, 48, 80"),
    ("gsm8k gradient_checkpointing_mode=disk", "allowed: none, device, offload"),
    ("gsm8k loss_type=ppo", "loss_type is 'ppo'; it must be one of grpo, bnpo"),
    ("guess largest=1", "largest is 1 and tries is 5; they must be at least 2 and 1"),
    ("guess tries=0", "at least 2 and 1"),
    ("tictactoe strengths=half", "strengths is 'half'; give numbers with commas between them"),
    ("tictactoe strengths=0,2", "from 0 (random) to 1 (perfect)"),
    ("tictactoe test_strength=-1", "test_strength is -1.0; it must be from 0"),
    ("calculator eval_problems=0", "eval_problems is 0; it must be a whole number"),
    ("game2048 side=5", "side is 5; it must be 3 or 4"),
    ("game2048 goal=33", "goal is 33; it must be 8, 16, 32, or another power of two above"),
    ("twenty_questions world=animals", "world is 'animals'; it must be numbers or things"),
    ("twenty_questions turns=0", "turns is 0; it must be at least 1"),
    ("inbox mailbox=huge", "mailbox is 'huge'; allowed: small, large"),
    ("inbox calls=1", "calls is 1; it must be at least 2"),
    ("inbox reward=best", "reward is 'best'; allowed: rules, ruler"),
    ("inbox judge_model=m", "judge_model is for a judge: give reward=ruler with it"),
    ("inbox judge=http://127.0.0.1/v1", "judge is for a judge: give reward=ruler"),
    ("inbox reward=ruler judge=gpt", "judge is 'gpt'; allowed are"),
    ("inbox reward=ruler judge=http://127.0.0.1/v1", "judge_model is missing"),
    ("inbox calls=6", "max_turns is 6, but an episode has 6 calls; give max_turns=7 or more, or fewer calls"),
    ("inbox eval_problems=1000", "the mailbox 'small' of seed 0 has 67 questions to test, and 1000 are asked for"),
    ("inbox train_size=0", "train_size is 0; it must be a whole number"),
    ("judge judge=gpt", "judge is 'gpt'; allowed are"), ("judge judge=http://127.0.0.1/v1", "judge_model is missing"),
    ("judge judge_model=m", "judge_model is for a judge at an address"), ("judge judge_keys=x", "judge_key"),
])
@pytest.mark.every(2)
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
