"""Short runs of the recipes that the embedded model cannot learn: they finish, and leave what a run leaves."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lowmem_grpo.cli.main import main
from lowmem_grpo.rewards.sandbox.isolation import ISOLATIONS, why_not

WORKING = [name for name in ISOLATIONS if why_not(name) is None]
needs_isolation = pytest.mark.skipif(not WORKING, reason="no isolation works here: " + str(why_not("process")))
ISOLATION = WORKING[0] if WORKING else "process"


def run(name: str, folder: Path, *words: str) -> Result:
    small = ["max_steps=1", "eval_problems=3", "train_size=8", "num_generations=2", "per_device_train_batch_size=4",
             "gradient_accumulation_steps=1", "max_completion_length=6", f"output_dir={folder}", "engine=transformers"]
    return CliRunner().invoke(main, ["run", name, *small, *words])


@pytest.mark.parametrize(("name", "words", "said", "rewards"), [
    pytest.param("code", [f"isolation={ISOLATION}", "seconds=3"], f"Code runs in {ISOLATION}",
                 ["code_passes_tests", "one_block"], marks=needs_isolation),
    ("countdown", ["max_numbers=3"], "The embedded tiny model does not know countdown",
     ["reaches_target", "given_numbers", "answer_line"]),
    ("email", [], "The embedded tiny model cannot write e-mails",
     ["keyword_present", "ideal_answer", "too_long", "recipient_named", "signed"]),
])
def test_a_recipe_finishes_on_the_embedded_model(
    name: str, words: list[str], said: str, rewards: list[str], tmp_path: Path
) -> None:
    result = run(name, tmp_path, "seed=3", *words)
    assert result.exit_code == 0, result.output
    assert said in result.output and "accuracy before" in result.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["recipe"], summary["status"], summary["steps"], summary["seed"]) == (name, "finished", 1, 3)
    assert summary["eval_problems"] == 3 == len(summary["samples"])
    assert {"accuracy_before", "accuracy_after"} <= summary.keys()
    assert name != "code" or summary["isolation"] == ISOLATION
    (line,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {f"rewards/{reward}/mean" for reward in rewards} <= line.keys()
    assert name != "code" or any("tests/error" in key for key in line)
    assert (tmp_path / "report.html").is_file()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(("name", "word", "message"), [
    ("code", "isolation=docker", "isolation is 'docker'; allowed are bubblewrap, process"),
    ("code", "seconds=0", "seconds is 0.0; it must be a finite number, at least 0.05"),
    pytest.param("code", "workers=0", "workers is 0", marks=needs_isolation),
    ("countdown", "max_numbers=9", "they must be 2 to 6"), ("countdown", "operators=^", "operators is '^'"),
    ("countdown", "eval_problems=0", "eval_problems is 0; it must be"),
    ("countdown", "engine=llama", "allowed: auto, transformers, vllm"),
    ("email", "longest_words=-1", "longest is -1"), ("proximity", "sft_steps=-1", "sft_steps is -1; it must be"),
])
def test_a_wrong_option_is_found_before_the_model_is_loaded(
    name: str, word: str, message: str, tmp_path: Path
) -> None:
    common = [f"isolation={ISOLATION}"] if name == "code" and word.startswith("workers") else []
    result = run(name, tmp_path / "run", *common, word)
    assert result.exit_code == 1 and message in result.output
    assert not (tmp_path / "run").exists()
