"""Recipe judge: reports that are exact, summaries that are measured, and short runs with both judges."""

import re
from pathlib import Path

import pytest
from recipe_runs import records, run

from lowmem_grpo.recipes import judge
from lowmem_grpo.recipes.judge import KINDS, WORDS_ALLOWED, draw_report, share_kept
from lowmem_grpo.recipes.tasks import distinct, take
from tests.attacks.judge_server import by_length, serving

# reports


def test_a_report_holds_each_of_its_facts_once_and_says_how_long_a_summary_may_be() -> None:
    drawn = take(distinct("train", 0, draw_report, repr), 200)
    assert {report.kind for report in drawn} == set(range(len(KINDS)))
    assert f"more than {WORDS_ALLOWED} words" in judge.RUBRIC
    for report in drawn:
        assert f"at most {WORDS_ALLOWED} words" in report.question
        words = re.findall(r"\w+", report.text)
        assert [words.count(fact) for fact in report.facts] == [1] * 7
        assert share_kept(report.text, list(report.facts)) == 1.0 and len(report.text.split()) > WORDS_ALLOWED


def test_a_good_summary_is_right_and_that_of_another_report_is_wrong() -> None:
    dataset = judge.make_dataset("test", 100)
    assert dataset.column_names == ["prompt", "answer", "facts"]
    assert judge.good_summary(list(dataset["answer"]), list(dataset["facts"])) == [1.0] * 100
    chats = [[{"role": "assistant", "content": text}] for text in dataset["answer"]]
    assert judge.EXAM.right(completions=chats, facts=list(dataset["facts"])) == [1.0] * 100
    others = [*dataset["answer"][1:], "Nothing much."]
    assert sum(judge.good_summary(others, list(dataset["facts"]))) == 0, "that of another report"
    assert sum(judge.good_summary([row[-1]["content"] for row in dataset["prompt"]], list(dataset["facts"]))) == 0


def test_a_fact_is_found_as_a_whole_word() -> None:
    for text, share in (
        ("In Ravensby 1,240 tons of SALT.", 1.0), ("ravensby: 1 240 salt", 1.0), ("", 0.0), ("1240t", 1 / 3),
        ("Ravensby, 12400 tons of salty wool", 1 / 3), ("01240 Ravens", 0.0),
    ):
        assert share_kept(text, ["Ravensby", "1240", "salt"]) == pytest.approx(share)


# short runs


FEW = ("eval_problems=2", "train_size=4", "max_completion_length=6")


@pytest.mark.slow
def test_a_model_that_cannot_judge_trains_to_the_end_and_then_fails_in_one_line(tmp_path: Path) -> None:
    result = run("judge", tmp_path / "run", *FEW, "seed=4")
    assert result.exit_code == 1, result.output
    assert result.stderr.rstrip().rpartition("\n")[2].startswith(
        "Error: the judge (self) gave no usable score in 2 calls, so nothing was learned: take a model that can judge")
    assert "can neither summarize nor judge" in result.output and "judge self: 2 calls" in result.output
    summary, line = records(tmp_path / "run")
    assert (summary["recipe"], summary["status"], summary["judge"], summary["seed"]) == ("judge", "finished", "self", 4)
    assert summary["judging"]["failed"] == 2
    assert line["judge/ruler/failed"] == 1 and "rewards/facts_kept/mean" in line
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()


def test_the_recipe_can_be_judged_by_a_server(tmp_path: Path) -> None:
    with serving(by_length) as server:
        result = run("judge", tmp_path / "run", *FEW, f"judge={server.url}", "judge_model=m", "judge_key=local")
    assert result.exit_code == 0, result.output
    summary, line = records(tmp_path / "run")
    assert line["judge/ruler/failed"] == 0 and line["groups/with_signal"] > 0 and "rewards/too_long/mean" in line
    assert summary["judging"]["calls"] == 2 and summary["judging"]["prompt_tokens"] == 200
    assert "judge m: 2 calls" in result.output
