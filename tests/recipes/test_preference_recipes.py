"""Recipes `dpo`, `reward_model` and `ppo`: what their rows and rewards say, short runs, and (slow) what they teach."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import invoke, invoke_well, lines, records, run_well

from lowmem_grpo.recipes.dpo import pairs_of
from lowmem_grpo.recipes.ppo import POINTS, likes
from lowmem_grpo.recipes.reward_model import answers_to, in_form, make_dataset, make_demonstrations, make_pairs
from lowmem_grpo.recipes.tasks.arithmetic import Problem

PROBLEM = Problem(3, (("+", 4), ("*", 2)))  # 7, 14
FEW = ["train_size=8", "max_completion_length=16"]
SMALL_DPO = ["gpu=cpu", "max_steps=1", "eval_problems=4", "per_device_train_batch_size=4", "engine=transformers",
             "train_size=16"]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_each_wrong_answer_stands_in_one_pair_beside_a_right_one_and_problems_without_both_have_none() -> None:
    problem = {"prompt": "3 + 4?", "answer": "7"}
    found = pairs_of(problem, ["a: 7", "b: 8", "c: 7", "d: 9", "e: 1"], most=5)
    assert [(row["chosen"], row["rejected"]) for row in found] == [
        (said("a: 7"), said("b: 8")), (said("c: 7"), said("d: 9")), (said("a: 7"), said("e: 1"))]
    assert {row["prompt"] for row in found} == {"3 + 4?"}
    assert len(pairs_of(problem, ["7", "8", "9"], most=1)) == 1
    assert pairs_of(problem, ["7"], 2) == pairs_of(problem, ["8", "9"], 2) == pairs_of(problem, [], 2) == []


@pytest.mark.parametrize(("text", "paid"), [
    ("3 + 4 = 7\n7 * 2 = 14\nAnswer = 14", 1.0), ("3 + 4 = 8\n8 * 2 = 1\nAnswer = -5", 1.0),
    ("7 * 2 = 14\nAnswer = 14", 0.0), ("3 + 4 = 7\n7 * 2 = 14\nAnswer: 14", 0.0), ("Answer = 14", 0.0),
    ("3 + 4 = 7\n7 * 2 = 14", 0.0), ("3 + 4 = 7\n3 + 4 = 7\n7 * 2 = 14\nAnswer = 14", 0.0),
    ("3 + 4 =7\n7 * 2 = 14\nAnswer = 14", 0.0), ("", 0.0),
])
def test_a_good_answer_has_a_calculation_for_each_step_and_then_the_answer(text: str, paid: float) -> None:
    assert in_form([text, said(text)], steps=[2, 2]) == [paid, paid]


def test_only_the_chosen_side_of_a_pair_is_good_and_so_is_a_quarter_of_the_demonstrations() -> None:
    good, worse = answers_to(PROBLEM, random.Random(0))
    assert good == "3 + 4 = 7\n7 * 2 = 14\nAnswer = 14" and len({good, *worse}) == 7
    assert in_form([good, *worse], steps=[2] * 7) == [1.0, *[0.0] * 6]
    steps = {row["prompt"][0]["content"]: row["steps"] for row in make_dataset("test", 64, seed=3)}
    for row in make_pairs("test", 64, seed=3):
        count = [steps[row["prompt"][0]["content"]]]
        assert [in_form([row[side]], steps=count) for side in ("chosen", "rejected")] == [[1.0], [0.0]]
    taught = make_demonstrations(400, seed=3)
    counts = [len(re.findall(r"Add|Subtract|Multiply", row["prompt"][0]["content"])) for row in taught]
    assert 60 < sum(in_form(taught["completion"], steps=counts)) < 140  # a quarter


def test_a_prompts_part_of_the_reward_is_the_same_for_every_answer() -> None:
    prompts = [[{"role": "user", "content": text}] for text in ("Multiply by 2. Multiply by 3.", "Add 1.")]
    assert likes("Multiply")(prompts=prompts, completions=[said("a"), said("b")]) == [2 * POINTS, 0.0]


def test_a_run_makes_pairs_of_its_models_answers_trains_on_them_and_a_resumed_one_reads_them_again(
    tmp_path: Path
) -> None:
    invoke_well("run", "dpo", *SMALL_DPO, f"output_dir={tmp_path}")
    summary, line = records(tmp_path)
    assert (summary["recipe"], summary["status"], summary["steps"]) == ("dpo", "finished", 1)
    assert "rewards/accuracies" in line and "accuracy_after" in summary
    pairs = lines(tmp_path / "answered.jsonl")
    assert all({*row} == {"prompt", "chosen", "rejected"} and row["chosen"] != row["rejected"] for row in pairs)
    before = (tmp_path / "answered.jsonl").stat()
    again = invoke_well("run", "dpo", *SMALL_DPO, f"output_dir={tmp_path}", "resume=true", "max_steps=2")
    assert "2 steps in" in again.output
    assert (tmp_path / "answered.jsonl").stat() == before  # else its rows would be others


def test_a_run_trains_its_judge_and_then_the_policy_on_its_scores(tmp_path: Path) -> None:
    run_well("reward_model", tmp_path / "a", *FEW, "pairs=32", "sft_steps=1")
    summary, line = records(tmp_path / "a")
    assert summary["paid_by"] == "reward_model" and 0 <= summary["pairs_in_order"] <= 1
    assert "rewards/judge/mean" in line
    assert "adapter" in invoke_well("eval", tmp_path / "a", "--recipe", "reward_model", "--limit", "4").output


@pytest.mark.slow
def test_a_run_that_the_rule_pays_has_no_judge(tmp_path: Path) -> None:
    run_well("reward_model", tmp_path / "b", *FEW, "paid_by=verifier", "sft_steps=1")
    summary, line = records(tmp_path / "b")
    assert "rewards/in_form/mean" in line and not (tmp_path / "b" / "judge").exists()
    assert "pairs_in_order" not in summary


def test_a_run_has_one_completion_of_a_prompt_with_a_critic_or_without_one(tmp_path: Path) -> None:
    run_well("ppo", tmp_path / "a", *FEW, "num_generations=1", "critic_warmup_steps=0")
    _, line = records(tmp_path / "a")
    assert "critic/loss" in line and "rewards/prompts_part/mean" in line
    run_well("ppo", tmp_path / "b", *FEW, "num_generations=1", "advantage_estimator=reinforce++")
    _, line = records(tmp_path / "b")
    assert "critic/loss" not in line


@pytest.mark.parametrize(("words", "message"), [
    ("dpo beta=-1", "beta is -1"), ("dpo loss_type=nothing", "'nothing'"), ("dpo answers=1", "answers is 1"),
    ("dpo advantage_estimator=gae", "no option 'advantage_estimator'"),
    ("reward_model paid_by=people", "paid_by is 'people'"), ("reward_model pairs=1", "pairs is 1"),
    ("ppo lam=2", "lam is 2"),
])
def test_a_setting_that_a_recipe_cannot_have_is_refused_before_a_model_is_loaded(
    words: str, message: str, tmp_path: Path
) -> None:
    result = invoke("run", *words.split(), f"output_dir={tmp_path / 'run'}")
    assert result.exit_code != 0 and message in result.output and "loading tiny" not in result.output


@pytest.mark.slow
def test_pairs_of_its_own_answers_raise_a_models_accuracy_by_more_than_twenty_points(tmp_path: Path) -> None:
    summary = whole_run("dpo", tmp_path, "train_size=768")
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2


@pytest.mark.slow
def test_a_judge_orders_held_out_pairs_and_its_scores_alone_teach_the_policy_a_form(tmp_path: Path) -> None:
    summary = whole_run("reward_model", tmp_path, "pairs=1536", "max_steps=12")
    assert summary["pairs_in_order"] > 0.95
    assert summary["accuracy_after"] > 0.8 > 0.6 > summary["accuracy_after_sft"]


@pytest.mark.slow
def test_a_critic_learns_what_prompts_are_paid_and_the_policy_what_answers_are(tmp_path: Path) -> None:
    summary = whole_run("ppo", tmp_path, "max_steps=36")
    explained = [line["critic/explained_variance"] for line in lines(tmp_path / "metrics.jsonl") if "step_time" in line]
    assert max(explained[:5]) < 0.2 and min(explained[-4:]) > 0.4
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.15


def whole_run(name: str, folder: Path, *words: str) -> dict[str, Any]:
    invoke_well("run", name, "gpu=cpu", "engine=transformers", f"output_dir={folder}", *words)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary
