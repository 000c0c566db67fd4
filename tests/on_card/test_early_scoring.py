"""Rewards while others are sampled, on a card as on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from card import CARD, DEVICES, half
from card_runs import make

from lowmem_grpo.runs.records import read_lines


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_early_rewards_are_those_of_a_run_that_scores_afterwards(
    device: torch.device, tmp_path: Path
) -> None:
    runs: dict[bool, list[Any]] = {}
    for early in (True, False):
        dtype = half() if device == CARD else torch.float32
        trainer = make(tmp_path / str(early), device, dtype, max_steps=1, score_while_sampling=early)
        trainer.memory.rollout.lowered = 4  # a prompt's completions at a time
        trainer.train()
        (line,) = read_lines(trainer.run_dir / "metrics.jsonl")
        assert (line["time/reward_hidden"] > 0) == early
        runs[early] = [(row["completion"], row["rewards"]) for row in read_lines(trainer.run_dir / "completions.jsonl")]
    assert runs[True] == runs[False]
    assert len({str(rewards) for _, rewards in runs[True]}) > 1
