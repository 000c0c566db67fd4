"""Training on rollouts that the caller's own code played: the same as an environment's, resumed or not."""

import json
import signal
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer_runs import adapter, same

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.recipes.guess import Guess
from lowmem_grpo.rollout.parity import ParityError
from lowmem_grpo.rollout.rollout_func import group_of
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.trainer.nonfinite import NonFiniteError
from lowmem_grpo.trainer.trajectories import TrajectoryTrainer
from lowmem_grpo.types import RolloutGroup
from tests.attacks.small_run import differences

SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-3, "per_device_train_batch_size": 8, "num_generations": 4, "save_steps": 1,
    "lr_scheduler_type": "constant", "parity_steps": 1,
}
PLAYED = SETTINGS | {"max_completion_length": 160, "max_turn_tokens": 4, "max_steps": 2}


@cache
def loaded() -> Any:
    bare, _ = FastLanguageModel.from_pretrained("tiny-games", max_seq_length=256, load_in_4bit=False)
    return FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False)


def make(folder: Path, **settings: Any) -> TrajectoryTrainer:
    return TrajectoryTrainer(deepcopy(loaded()), GRPOConfig(output_dir=str(folder), **SETTINGS | settings))


def by_hand(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """The same rollouts, made of nothing but their turns and their rewards."""
    found = []
    for group in groups:
        made = group_of([[deepcopy(one.turns)] for one in group.rollouts])
        for rollout, played in zip(made.rollouts, group.rollouts, strict=True):
            rollout.reward = sum(turn.reward or 0.0 for turn in played.turns)
            for turn in rollout.turns:
                turn.seconds = 0.0  # of this machine
        found.append(made)
    return found


class Games:
    """Groups of games that the policy plays, with seeds of their own for each step."""

    def __init__(self, folder: Path) -> None:
        self.player = GRPOTrainer(deepcopy(loaded()), None, GRPOConfig(output_dir=str(folder), **PLAYED), None,
                                  environment_factory=Guess)

    def of(self, trainer: TrajectoryTrainer) -> list[RolloutGroup]:
        """Those of the trainer's next step, as its policy plays them."""
        player, step = self.player, trainer.state.global_step
        player.model.load_state_dict(trainer.model.state_dict())
        player.source.position, player.state.global_step = 2 * step, step
        groups = by_hand(player.rollout())
        for turn in (turn for group in groups for one in group.rollouts for turn in one.turns):
            turn.policy_version = step
        for one in (one for group in groups for one in group.rollouts):
            one.policy_version = step
        return groups


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Games:
    return Games(tmp_path_factory.mktemp("games"))


def test_ctrl_c_in_a_step_saves_that_step(tmp_path: Path, games: Games) -> None:
    trainer = make(tmp_path, save_steps=500)
    trainer.callbacks.add_callback(SimpleNamespace(on_step_end=lambda *_, **__: signal.raise_signal(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt, match="which is saved"), trainer.running():
        trainer.step(games.of(trainer))
    assert (tmp_path / "checkpoint-1" / "adapter_model.safetensors").is_file()


@pytest.fixture(scope="module")
def first(games: Games, tmp_path_factory: pytest.TempPathFactory) -> list[RolloutGroup]:
    """Of the untrained policy."""
    return games.of(make(tmp_path_factory.mktemp("first")))


def test_rollouts_of_ones_own_code_have_the_gradient_of_the_same_rollouts_of_an_environment(tmp_path: Path) -> None:
    played = GRPOTrainer(deepcopy(loaded()), None, GRPOConfig(output_dir=str(tmp_path / "played"), **PLAYED), None,
                         environment_factory=Guess)
    groups = played.rollout()
    given = by_hand(groups)
    played.update(groups)
    trainer = make(tmp_path / "given")
    with trainer.running():
        line = trainer.step(given)
    assert same(adapter(trainer), adapter(played)), "bit for bit"
    assert line["reward"] == pytest.approx(torch.tensor([one.reward for g in groups for one in g.rollouts]).mean())
    assert line["sampling/parity/later_turns"] < 1e-5 and line["trajectories/staleness"] == 0


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(games: Games, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with (straight := make(whole)).running():
        for _ in range(2):
            straight.step(games.of(straight), {"metrics/won": 0.5})
    killed = make(parts)
    session = killed.running()
    session.__enter__()
    killed.step(games.of(killed), {"metrics/won": 0.5})
    killed.step(games.of(killed), {"metrics/won": 0.25}, save_strategy="no")  # then the process died
    session.gen.close()  # type: ignore[attr-defined]
    again = make(parts)
    with again.running():
        assert again.state.global_step == 1
        again.step(games.of(again), {"metrics/won": 0.5})
    assert differences(parts, whole) == []
    assert [line["step"] for line in read_lines(parts / "metrics.jsonl")] == [1, 2]
    lines = read_lines(parts / "completions.jsonl")
    assert len(lines) == 16 and all(line["turns"] and line["ending"] == "done" for line in lines)
    summary = json.loads((parts / "summary.json").read_text())
    assert (summary["status"], summary["method"], summary["steps"]) == ("finished", "trajectories", 2)
    assert (parts / "report.html").is_file() and (parts / "adapter").is_dir()


def test_groups_of_any_number_and_size_are_one_step(first: list[RolloutGroup], tmp_path: Path) -> None:
    groups = deepcopy(first)
    groups.append(RolloutGroup({}, list(groups[0].prompt_ids), groups[0].rollouts[:2]))
    del groups[0].rollouts[:2]
    with (trainer := make(tmp_path)).running():
        line = trainer.step(groups)
    assert (line["step"], line["groups/total"], line["completions/total"]) == (1, 3, 8)
    assert trainer.state.policy_version == 1


def test_a_step_returns_its_own_line_although_every_second_one_is_logged(
    first: list[RolloutGroup], tmp_path: Path
) -> None:
    with (trainer := make(tmp_path, logging_steps=2)).running():
        lines = [trainer.step(deepcopy(first)) for _ in range(3)]
    assert [line["step"] for line in lines] == [1, 2, 3] and all("loss" in line for line in lines)


def test_settings_change_for_one_step(first: list[RolloutGroup], tmp_path: Path) -> None:
    with (trainer := make(tmp_path)).running():
        line = trainer.step(deepcopy(first), learning_rate=1e-4, loss_type="cispo", epsilon_high=4.0,
                            scale_rewards="none", save_strategy="no")
        assert line["learning_rate"] == 1e-4 and "cispo_clip_ratio" in line
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-0"]
        assert (trainer.args.loss_type, trainer.args.epsilon_high) == ("dapo", None)
        line = trainer.step(deepcopy(first))
        assert line["learning_rate"] == 3e-3 and "cispo_clip_ratio" not in line
        assert line["trajectories/staleness"] == 1 and line["mismatch/corrected"] == 1
        with pytest.raises(ValueError, match="temperature cannot change from step to step"):
            trainer.step(deepcopy(first), temperature=0.5)
        with pytest.raises(ValueError, match="'cispo' does not use it"):
            trainer.step(deepcopy(first), loss_type="cispo", epsilon=0.3)
        assert trainer.state.global_step == 2 and trainer.args.temperature == 1.0
        with trainer.settings.changed({"learning_rate": 1e-5}):
            assert trainer.parts.objective.config.learning_rate == trainer.learner.config.learning_rate == 1e-5
            assert trainer.saver.snapshot()["config"]["learning_rate"] == 3e-3, "checkpoints hold those of the run"


@pytest.mark.parametrize(("change", "weighed"), [
    (lambda turn: setattr(turn, "exact", False), True), (lambda turn: None, False),
], ids=["another temperature", "as the policy"])
@pytest.mark.every(2)
def test_what_was_drawn_otherwise_is_weighed_and_not_held_against_the_sampler(
    change: Callable[[Any], None], weighed: bool, first: list[RolloutGroup], tmp_path: Path
) -> None:
    groups = deepcopy(first)
    for turn in (turn for group in groups for one in group.rollouts for turn in one.turns):
        change(turn)
        turn.logprobs = [value - 0.5 for value in turn.logprobs]
    given = by_hand(groups)
    for group, before in zip(given, groups, strict=True):
        for one, other in zip(group.rollouts, before.rollouts, strict=True):
            one.reward = other.reward
    with (trainer := make(tmp_path)).running():
        if not weighed:
            with pytest.raises(ParityError):
                trainer.step(given)
            return
        line = trainer.step(given)
    assert line["mismatch/corrected"] == 1 and "sampling/parity/mean" not in line


def test_a_reward_that_is_no_number_makes_no_step(first: list[RolloutGroup], tmp_path: Path) -> None:
    trainer = make(tmp_path, nonfinite_steps=2)
    before = adapter(trainer)
    groups = deepcopy(first)
    groups[0].rollouts[0].reward = float("nan")
    with pytest.raises(NonFiniteError), trainer.running():
        line = trainer.step(deepcopy(groups))
        assert line["optimizer/skipped"] == 1 and line["nonfinite/rollouts"] == 1
        trainer.step(groups)
    assert same(adapter(trainer), before)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_what_cannot_be_is_said_before_anything_is_trained(first: list[RolloutGroup], tmp_path: Path) -> None:
    for settings, match in (({"dynamic_sampling_rounds": 1}, "groups are sampled by the caller"),
                            ({"lr_scheduler_type": "linear"}, "set max_steps"),
                            ({"advantage_estimator": "remax"}, "needs a greedy rollout"),
                            ({"advantage_estimator": "gae"}, "whose critic GRPOTrainer trains; take 'grpo'"),
                            ({"eval_strategy": "steps", "eval_steps": 1}, "under the split val")):
        with pytest.raises(ValueError, match=match):
            make(tmp_path, **settings)
    with (trainer := make(tmp_path, max_steps=1, lr_scheduler_type="linear")).running():
        with pytest.raises(ValueError, match="nothing to train on"):
            trainer.step([])
        trainer.step(deepcopy(first))
        with pytest.raises(ValueError, match="all 1 steps"):
            trainer.step(deepcopy(first))
