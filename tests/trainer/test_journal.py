"""The log of a run: which lines are logged, which completions are printed, and what the first two steps show (rewards
that teach nothing, and how long the run will take)."""

import io
import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from preflight_runs import make, nothing_right
from tables import every_row
from trainer_runs import ENDS

from lowmem_grpo import GRPOConfig
from lowmem_grpo.rewards.checking.diagnosis import about_rewards
from lowmem_grpo.runs.records import RunRecords
from lowmem_grpo.runs.state import TrainerControl, TrainerState
from lowmem_grpo.runs.views.terminal import CurrentStderr
from lowmem_grpo.trainer.lifecycle import FirstSteps, Journal
from lowmem_grpo.types import Rollout, RolloutGroup


def groups_of(*rewards: list[float | None], finish: Any = "stop", invalid: bool = False) -> list[RolloutGroup]:
    """A group for each list, of rollouts that a function `pays` has paid so."""
    broken = {"pays": float("nan")} if invalid else {}
    return [RolloutGroup({}, [1], [
        Rollout([1], [0.0], finish, rewards={"pays": pay}, reward=pay, invalid_rewards=broken) for pay in pays
    ]) for pays in rewards]


PAYS = {"pays": 1.0}


@every_row(("groups", "said"), [
    (groups_of([0, 0]), r"^0 of 1 groups carry signal, in each group all completions earn the same"),
    (groups_of(*[[1, 1]] * 4), r"^0 of 4 groups carry signal"),
    (groups_of([1, 0], *[[1, 1]] * 5), r"^1 of 6 groups carry signal, in the others all completions earn the same"),
    (groups_of([1, 0], finish="length"), r"^100% of the completions were cut off at max_completion_length"),
    (groups_of([None, 1, 0], invalid=True), r"^pays: NaN or infinity for 3 of 3 completions"),
    (groups_of([1, 0]), None), (groups_of([1, 0], *[[1, 1]] * 2), None), (groups_of(*[[1, 0]] * 4), None),
])
def test_the_first_step_reports_what_rewards_and_lengths_show(groups: list[RolloutGroup], said: str | None) -> None:
    lines = [str(one) for one in about_rewards(groups, PAYS)]
    assert len(lines) == (said is not None)
    assert said is None or re.search(said, lines[0])


@pytest.mark.parametrize("count", [1, 6])
def test_labels_that_no_function_can_read_are_reported(count: int) -> None:
    lines = [str(one) for one in about_rewards(groups_of(*[[None] * 4] * count), PAYS)]
    assert f"pays: None for all {4 * count} completions. What to do: check that its column holds" in "".join(lines)


def test_pay_that_all_earn_is_a_note_no_pay_for_all_a_warning_and_a_metric_neither() -> None:
    groups = groups_of(*[[1, 0]] * 4)
    for pay, severity in ((0.5, "note"), (0.0, "warning")):
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            rollout.rewards["pays_2"] = pay
        (finding,) = about_rewards(groups, {"pays": 1.0, "pays_2": 1.0})
        assert finding.severity == severity
        assert str(finding).startswith(f"pays_2: it pays {pay:g} for all 8 completions")
        assert about_rewards(groups, {"pays": 1.0, "pays_2": 0.0}) == []


def test_a_run_that_learns_nothing_is_told_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, reward=nothing_right, max_steps=2, disable_tqdm=True, **ENDS).train()
    (said,) = [record.getMessage() for record in caplog.records if "step 1:" in record.getMessage()]
    assert said.startswith("step 1: 0 of 2 groups carry signal, in each group all completions earn the same")
    assert "easier" in said or "sometimes solved" in said


def test_the_expected_time_is_printed_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("lowmem_grpo.runs.views.live.time", SimpleNamespace(monotonic=lambda: now[0]))
    args = GRPOConfig(save_steps=25)
    said: list[str] = []
    first = FirstSteps(RunRecords(tmp_path), said.append)
    state = TrainerState(global_step=20, max_steps=100, elapsed=500.0)
    first.on_train_begin(args, state, None)
    for step, seconds in ((21, 60.0), (22, 12.0), (23, 12.0)):
        now[0] += seconds
        state.global_step, state.elapsed = step, state.elapsed + seconds
        state.log_history = [{"step": step, "time/generate": 0.75, "time/reward": 0.05, "time/train": 0.2}]
        first.on_step_end(args, state, None)
    assert said == ["12 s a step (sampling 75%, rewards 5%, training 20%): 15 min 36 s to go until step 100; the "
                    "next checkpoint is due at step 25, in 36 s"]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"expected_seconds": 572 + 78 * 12}
    line = first.expectation(GRPOConfig(save_strategy="no"), TrainerState(global_step=2, max_steps=5), 36.0)
    assert line == "12 s a step: 36 s to go until step 5"


def test_a_warning_is_written_above_the_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    handler, above = CurrentStderr(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", above)  # as rich does while a live view is drawn
    handler.emit(logging.LogRecord("lowmem_grpo", logging.WARNING, "", 0, "first step: %s", ("0 of 1 groups",), None))
    assert above.getvalue() == "first step: 0 of 1 groups\n"


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
        journal.write({"step": 1}, groups())
        journal.flush()
    assert [message.rpartition("\n")[2] for message in caplog.messages] == printed


@pytest.mark.parametrize(("first", "logged"), [(False, [3, 6, 7]), (True, [1, 3, 6, 7])])
def test_the_first_step_is_logged_where_it_is_asked_for(first: bool, logged: list[int]) -> None:
    state, control = TrainerState(max_steps=7), TrainerControl()
    asked = []
    for state.global_step in range(1, 8):
        control.should_log = False
        control.follow("on_step_end", GRPOConfig(logging_steps=3, logging_first_step=first), state,
                       state.global_step - 1)
        asked += [state.global_step] * control.should_log
    assert asked == logged
