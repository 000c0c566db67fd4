"""Which lines of a run are logged, and which of its completions are printed."""

import logging
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.runs.records import RunRecords
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.trainer.journal import Journal
from lowmem_grpo.types import Rollout, RolloutGroup


def groups() -> list[RolloutGroup]:
    """Two prompts with two completions each; the second one of each is the better one."""
    return [RolloutGroup({"prompt": f"p{p}"}, [1], [Rollout([2], [0.0], "stop", text=f"{p}{c}", reward=float(c))
                                                    for c in range(2)]) for p in range(2)]


@pytest.mark.parametrize(("settings", "printed"), [
    ({}, ["01"]), ({"num_completions_to_print": 3}, ["00", "01", "10"]), ({"log_unique_prompts": True}, ["01", "11"]),
    ({"num_completions_to_print": 1, "log_unique_prompts": True}, ["01"]),
])
def test_so_many_completions_are_printed_as_the_settings_say(
    settings: dict[str, Any], printed: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(TrainerState(global_step=1, max_steps=1), RunRecords(tmp_path),
                      GRPOConfig(log_completions=True, **settings))
    with caplog.at_level(logging.WARNING):
        journal.write(0, {"step": 1}, groups())
    assert [message.rpartition("\n")[2] for message in caplog.messages] == printed


@pytest.mark.parametrize(("first", "logged"), [(False, [3, 6, 7]), (True, [1, 3, 6, 7])])
def test_the_first_step_is_logged_where_it_is_asked_for(first: bool, logged: list[int], tmp_path: Path) -> None:
    state = TrainerState(max_steps=7)
    journal = Journal(state, RunRecords(tmp_path), GRPOConfig(logging_steps=3, logging_first_step=first))
    lines = []
    for step in range(1, 8):
        state.global_step = step
        lines.append(journal.write(step - 1, {"step": step}, []))
    assert [line["step"] for line in lines if line is not None] == logged
