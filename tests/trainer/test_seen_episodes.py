"""A run with an environment, as it is seen: by reward functions, in completions.jsonl, on the page and in the log."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import SMALL, load

from lowmem_grpo import GRPOConfig, GRPOTrainer
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.runs.views.report import write_report

TURNS = 2


class Digits:
    """Pays for digits, at each turn and at the end."""

    def reset(self, seed: int = 0, **row: Any) -> str:
        self.left = TURNS
        return f"Say digits. Begin with {seed % 10}."

    def step(self, reply: str) -> tuple[str, float, bool]:
        self.left -= 1
        return f"Left: {self.left}", digits(reply), self.left == 0

    def get_reward(self) -> float:
        return 0.5


def digits(text: str) -> float:
    return 0.125 * sum(character.isdigit() for character in text)


def of_the_last(completions: list[Any], **kwargs: Any) -> list[float]:
    """A function for one answer."""
    return [digits(completion[0]["content"]) for completion in completions]


def of_all(prompts: list[Any], completions: list[Any], environments: list[Any]) -> list[float]:
    """A function for messages, which looks at the environment too."""
    assert all("Begin with" in prompt[-1]["content"] for prompt in prompts)
    assert all(type(environment) is Digits for environment in environments)
    return [sum(digits(one["content"]) for one in each if one["role"] == "assistant") for each in completions]


def test_episodes_of_a_run_are_seen_alike_by_rewards_records_report_and_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SMALL | {"max_turn_tokens": 12, "max_completion_length": 90, "log_completions": True}
    config = GRPOConfig(output_dir=str(tmp_path), **settings)
    trainer = GRPOTrainer(load(), [of_the_last, of_all], config, None, environment_factory=Digits)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    lines = read_lines(tmp_path / "completions.jsonl")
    assert len(lines) == 16 and {line["ending"] for line in lines} == {"done"}
    for line in lines:
        first, last = line["turns"]
        assert line["prompt"].startswith("Say digits. Begin with"), "and nothing that followed"
        assert [turn["replies"][0]["content"] for turn in line["turns"]] == ["Left: 1", "Left: 0"]
        assert line["tokens"] == first["tokens"] + last["context"] + last["tokens"]
        assert line["sampled_tokens"] == first["tokens"] + last["tokens"]
        assert line["rewards"]["of_the_last"] == digits(line["completion"]) == digits(last["text"])
        assert line["rewards"]["of_all"] == line["rewards"]["Digits"] - 0.5 == digits(first["text"] + last["text"])
        assert line["reward"] == pytest.approx(sum(line["rewards"].values()))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert all(f'"title":"{title}"' in page for title in ("Ends of episodes", "Turns", "Cached tokens"))
    assert json.dumps(lines[-1]["turns"][0]["text"], ensure_ascii=False).replace("<", "\\u003c") in page
    assert any("[1. assistant, reward " in said and "ended by done" in said for said in caplog.messages)
