"""Tools in a run: the caller's own reading of calls, a tool that is broken, and an environment that says too much."""

import json
from pathlib import Path
from typing import Any

import pytest
from template_tokenizers import tiny_with, weather
from trainer_runs import ROWS, SMALL, load

from lowmem_grpo import GRPOConfig, GRPOTrainer
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.environments import ToolOutage

PLAY: dict[str, Any] = {"max_completion_length": 220, "max_turn_tokens": 8, "max_turns": 2, "report_to": "none",
                        "max_steps": 1, "max_tool_tokens": 96}


def played(folder: Path, **given: Any) -> list[dict[str, Any]]:
    """The episodes of a run of one step."""
    model = load(max_seq_length=1024)
    model.loaded.tokenizer.chat_template = tiny_with("qwen2_5").chat_template
    trainer = GRPOTrainer(model, lambda completions, **_: [float(len(str(one))) for one in completions],
                          GRPOConfig(output_dir=str(folder), **(SMALL | PLAY)), ROWS, **given)
    trainer.train()
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def told(episodes: list[dict[str, Any]]) -> list[str]:
    """What policies read between their turns."""
    return [reply["content"] for one in episodes for turn in one["turns"] for reply in turn.get("replies", [])]


def test_the_callers_own_function_reads_calls_of_any_form(tmp_path: Path) -> None:
    def parse(text: str) -> list[dict[str, Any]]:
        if len(text) % 2:
            raise ValueError("an odd call")
        return [{"name": "weather", "arguments": {"city": "Rome"}}]

    said = set(told(played(tmp_path, tools=[weather], parse=parse)))
    assert said <= {"Rome: sun for 1 days, in None", "error: the tool call could not be read: an odd call"} and said


def test_a_tool_that_is_broken_is_not_the_policys_failure(tmp_path: Path) -> None:
    calls = []

    def search(word: str) -> str:
        """Search.

        Args:
            word: What for.
        """
        calls.append(word)
        if len(calls) % 3 == 0:
            raise ToolOutage("the server is gone")
        return "found"

    episodes = played(tmp_path, tools=[search], parse=lambda text: [{"name": "search", "arguments": {"word": text}}])
    assert {one["ending"] for one in episodes} <= {"max_turns", "environment_error"}
    assert not any("gone" in json.dumps(one["turns"]) for one in episodes) and len(calls) > len(episodes)


class Camera:
    def reset(self, **row: Any) -> str:
        return "Look."

    def observe(self) -> list[dict[str, Any]]:
        """Look at the road."""
        return [{"type": "image", "image": object()}, {"type": "text", "text": "a road"}]  # as TRL's carla_vlm.py


def test_a_tool_that_returns_an_image_ends_the_run_at_its_first_call(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a tool gave an image, and images are not supported"):
        played(tmp_path, environment_factory=Camera, parse=lambda text: [{"name": "observe", "arguments": {}}])


class Talker:
    def reset(self, **row: Any) -> str:
        return " Go on."

    def step(self, reply: str) -> tuple[str, float, bool]:
        return "word " * 100_000, 0.0, False


def test_what_a_step_says_is_cut_like_the_result_of_a_tool(tmp_path: Path) -> None:
    texts = told(played(tmp_path, environment_factory=Talker))
    assert texts and all("characters left out" in text and len(text) < 300 for text in texts)
