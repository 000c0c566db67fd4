"""Recipe inbox: its rows, and short runs with rules and with a judge."""

from pathlib import Path

import pytest
from recipe_runs import lines, records, run, run_well

from lowmem_grpo.recipes.inbox import make_dataset
from lowmem_grpo.recipes.tasks.inbox import Inbox
from tests.attacks.judge_server import by_length, serving

# rows


@pytest.mark.parametrize("name", ["small", "large"])
def test_a_row_has_what_the_inbox_takes_and_the_splits_share_no_question(name: str) -> None:
    rows = {split: make_dataset(split, 50, 1, name).to_list() for split in ("train", "test")}
    asked = {split: {row["prompt"][-1]["content"] for row in given} for split, given in rows.items()}
    assert len(asked["train"]) == len(asked["test"]) == 50 and not asked["train"] & asked["test"]
    columns = {"prompt", "mailbox", "mail_seed", "answer", "source", "calls", "unknown"}
    assert all(set(row) == columns for row in rows["train"])
    doubted = Inbox()
    doubted.reset(**rows["test"][0])
    doubted.answer("unknown", [])
    assert doubted.earned == (0.0 if name == "large" else -1.0)
    for row in rows["test"]:
        inbox = Inbox()
        inbox.reset(**row)
        assert row["answer"] in inbox.read(row["source"]) and inbox.most == row["calls"]
    told = [message["content"] for message in rows["test"][0]["prompt"] if message["role"] == "system"]
    assert ("at most" not in str(told)) and (("10 calls" in told[0]) if name == "large" else not told)


# short runs


def test_a_short_run_searches_trains_and_says_how_others_play(tmp_path: Path) -> None:
    run_well("inbox", tmp_path, "seed=3")
    summary, line = records(tmp_path)
    assert (summary["recipe"], summary["status"], summary["model"], summary["mailbox"]) == \
        ("inbox", "finished", "tiny-inbox", "small")
    assert summary["baselines"]["keywords"] == 1.0 and summary["baselines"]["random"] < 0.5
    assert summary["eval_problems"] == len(summary["samples"]) == 4
    assert -2 <= line["rewards/earned/mean"] <= 2 and line["tools/call_frequency"] > 0
    rows = lines(tmp_path / "completions.jsonl")
    assert all(row["reward"] == row["rewards"]["earned"] for row in rows)


@pytest.mark.slow
def test_a_judge_pays_without_labels_and_the_rules_only_count(tmp_path: Path) -> None:
    with serving(by_length) as server:
        judged = "reward=ruler", f"judge={server.url}", "judge_model=m", "judge_key=local"
        result = run("inbox", tmp_path / "run", *judged)
    assert result.exit_code == 0, result.output
    summary, line = records(tmp_path / "run")
    assert summary["judging"]["calls"] > 0 and "rewards/earned/mean" in line and summary["judge"] == server.url
    rows = lines(tmp_path / "run" / "completions.jsonl")
    assert all(row["reward"] == row["rewards"]["ruler"] for row in rows)
