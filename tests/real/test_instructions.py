"""The recipe `instructions` on a published model: its rewards are right, and its answers are judged by kind."""

import json
import re
from pathlib import Path

import pytest
from published_model import published_model
from recipe_runs import lines, run_well

pytestmark = pytest.mark.slow


def test_a_short_run_pays_an_answer_that_does_not_follow_or_says_nothing_of_kinds(tmp_path: Path) -> None:
    small = ("max_steps=2", "eval_problems=4", "num_generations=4", "per_device_train_batch_size=8",
             "max_completion_length=16", "kinds=no_comma,existence", "seed=1")
    done = run_well("instructions", tmp_path, f"model={published_model().folder}", *small)
    sampled = lines(tmp_path / "completions.jsonl")
    assert len(sampled) == 16 and len({line["reward"] for line in sampled}) > 1
    for line in sampled:
        text, wanted = line["completion"].lower(), line["prompt"]
        words = re.findall(r"Use the words? (.*)\.$", wanted)
        follows = all(word in text for word in words[0].split(" and ")) if words else "," not in text
        paid = follows and len(set(re.findall(r"\w+", text))) >= 4
        over = min(max(line["tokens"] - 12, 0), 4) / 4  # DAPO's penalty, over the last quarter of 16 tokens
        assert line["rewards"] == {"follows_instructions": paid, "instructions_followed": paid / 2,
                                   "soft_overlong_reward_func": -over}, line
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert sum(kind["problems"] for kind in summary["kinds"].values()) == 4
    assert set(summary["kinds"]) <= {"punctuation:no_comma", "keywords:existence"} and "Problems" in done.output
