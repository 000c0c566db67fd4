"""Episodes in completions.jsonl and in the terminal: every turn is there, and lines of single answers stay the same."""

import json
import logging
from pathlib import Path

import pytest
from episodes import episode, game, tool_use, turn

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.runs.records import RunRecords, completion_lines, prompt_text, read_lines, to_line
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.runs.trajectory import transcript, turn_records
from lowmem_grpo.trainer.lifecycle import Journal
from lowmem_grpo.types import RolloutGroup, Split

ASKED = [{"role": "user", "content": "What is 6 times 7?"}]


def test_a_line_has_every_turn_with_its_tokens_calls_replies_and_reward() -> None:
    group = RolloutGroup({"prompt": ASKED}, [1, 2, 3], [game(reward=1.0), tool_use()])
    guessed, asked = (json.loads(to_line(line)) for line in completion_lines(3, [group]))
    assert {key: guessed[key] for key in ("completion", "ending", "num_turns", "tokens", "sampled_tokens")} == {
        "completion": "25", "ending": "done", "num_turns": 2, "tokens": 7, "sampled_tokens": 4}
    assert guessed["turns"] == [
        {"text": "50", "tokens": 2, "prompt_tokens": 3, "seconds": 0.1, "reward": 0.0,
         "replies": [{"role": "user", "content": "Lower."}]},
        {"text": "25", "tokens": 2, "context": 3, "prompt_tokens": 8, "cached": 8, "reward": 1.0,
         "replies": [{"role": "user", "content": "Right!"}]}]
    assert asked["turns"][0]["calls"] == [{"name": "multiply", "arguments": {"a": 6, "b": 7}}]
    assert asked["turns"][0]["replies"] == [{"role": "tool", "name": "multiply", "content": "42"}]
    assert asked["ending"] == "answer" and "reward" not in asked["turns"][1]


def test_a_rewritten_history_is_told_from_one_that_goes_on() -> None:
    rewritten = episode(turn("a"), turn("b"), turn("c"))
    rewritten.turns[1].prompt_ids, rewritten.splits = [1, 2, 3, 9], [Split(0, [1, 2, 3]), Split(2, [1, 2, 3, 9])]
    rewritten.turns[2].prompt_ids = [1, 2, 3, 9, 11, 12, 9]
    line, = completion_lines(1, [RolloutGroup({"prompt": "p"}, [1, 2, 3], [rewritten])])
    assert [(each.get("context"), each.get("rewritten")) for each in line["turns"]] == [
        (None, None), (4, True), (1, None)] and line["sequences"] == 2


def test_failures_cuts_and_an_end_without_a_turn_are_recorded() -> None:
    failed = turn("?", failures=1)
    failed.finish_reason = "length"
    assert {"failures": 1, "cut_off": True}.items() <= turn_records(episode(failed))[0].items()
    opened = episode(ending="context", opening=[{"role": "user", "content": "Guess."}])
    rollouts = [episode(ending="environment_error"), opened]
    line, began = completion_lines(1, [RolloutGroup({"seed": 7}, [1], rollouts)])
    assert line["ending"] == "environment_error" and line["prompt"] == "" and "turns" not in line
    assert began["prompt"] == "Guess.", "what the environment said first"


@pytest.mark.parametrize("content", [
    [{"type": "text", "text": "Look:"}, {"type": "image"}], "Look:\n[image]", [{"text": "Look:\n[image]"}],
])
def test_content_in_blocks_is_shown_as_text(content: object) -> None:
    replied = turn("a", {"role": "tool", "name": "see", "content": content})
    assert turn_records(episode(replied))[0]["replies"][0]["content"] == "Look:\n[image]"
    assert prompt_text([{"role": "user", "content": content}]) == "Look:\n[image]"


def test_a_sample_in_the_terminal_says_who_said_what_and_how_it_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(TrainerState(global_step=1, max_steps=1), RunRecords(tmp_path), GRPOConfig(log_completions=True))
    with caplog.at_level(logging.WARNING):
        journal.write({"step": 1}, [RolloutGroup({"prompt": ASKED}, [1], [tool_use(reward=0.0), game(reward=1.0)])])
        journal.flush()
    assert caplog.messages == [
        "step 1\nWhat is 6 times 7?\n--- episode, reward 1.0, ended by done\n[1. assistant, reward 0]\n50\n"
        "[user]\nLower.\n[2. assistant, reward 1]\n25\n[user]\nRight!"]
    assert [line["num_turns"] for line in read_lines(tmp_path / "completions.jsonl")] == [2, 2]
    assert transcript(turn_records(tool_use())) == "[1. assistant]\n6 times 7\n[tool multiply]\n42\n[2. assistant]\n" \
                                                   "The answer is 42."
