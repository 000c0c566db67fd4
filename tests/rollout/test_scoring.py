"""From what functions and environments pay to the advantages of episodes and their turns, as in a run."""

import math
from typing import Any

import pytest

from lowmem_grpo import GRPOConfig
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rollout.scoring import EnvironmentReward, Scoring
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import Rollout, RolloutGroup, Turn

CHAT = [{"role": "user", "content": "Guess."}]


class Game:
    """An environment."""


def episode(*pay: float, ending: str = "done") -> Rollout:
    """A token a turn, with one of context between two."""
    turns = [Turn([1], [5], [0.0], "stop", reward=each) for each in pay]
    count = 2 * len(pay) - 1
    return Rollout([5] * count, [0.0] * count, "stop", trained=[place % 2 == 0 for place in range(count)], turns=turns,
                   ending=ending, environment=Game())


def style(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(number) for number in range(len(completions))]


def scored(*rollouts: Rollout, functions: Any = (style,), weights: list[float] | None = None, **settings: Any
           ) -> RolloutGroup:
    """A group with advantages; the weights are the user's, and the environment's own is 1."""
    config = GRPOConfig(reward_weights=weights, scale_rewards="none", **settings)
    own = None if weights is None else [*weights, 1.0]
    scorer = RewardScorer([*functions, EnvironmentReward(Game)], own, episodes=True)
    scoring = Scoring(scorer, config, TrainerState(), credit=config)
    group = RolloutGroup({"prompt": CHAT}, [1], list(rollouts))
    scoring.apply([group], scoring.start_batch([group]).settle([group]))
    return group


def test_the_user_s_weights_are_those_of_the_functions_and_an_environment_s_pay_weighs_1() -> None:
    group = scored(episode(1.0, 1.0), episode(0.0, 4.0), weights=[0.5])
    assert [one.reward for one in group.rollouts] == [2.0, 4.5]
    assert [one.advantage for one in group.rollouts] == [-1.25, 1.25]


def test_turns_are_paid_for_what_they_earned_and_the_last_for_what_functions_add() -> None:
    """To go, with discount 0.5: 1 + 0.5 * 1 and 1; 0 + 0.5 * (4 + 0.5 * 1) and 4 + 0.5 * 1."""
    group = scored(episode(1.0, 1.0), episode(0.0, 4.0), weights=[0.5], turn_discount=0.5)
    found = [one.advantages.tolist() for one in group.rollouts]  # type: ignore[union-attr]
    assert found == [[1.5 - 1.875, 0, 1 - 2.75], [2.25 - 1.875, 0, 4.5 - 2.75]]


@pytest.mark.parametrize("ending", ["timeout", "environment_error"])
def test_what_is_said_of_an_episode_whose_environment_failed_changes_nothing(ending: str) -> None:
    """Neither NaN, for which a step is skipped, nor what pays others."""
    def broken(completions: list[Any], **kwargs: Any) -> list[float]:
        return [1.0, 0.0, math.nan]

    group = scored(episode(1.0), episode(0.0), episode(9.0, ending=ending), functions=[broken])
    first, second, failed = group.rollouts
    assert (first.advantage, second.advantage, failed.advantage) == (1.0, -1.0, 0.0)
    assert failed.reward is None and not failed.invalid_rewards and failed.rewards == {"broken": None, "Game": None}


def test_a_completion_that_no_function_rewards_is_shown_once_with_its_row(caplog: pytest.LogCaptureFixture) -> None:
    def silent(completions: list[Any], **_: Any) -> list[float | None]:
        return [None if completion == "b" else 1.0 for completion in completions]

    scoring = Scoring(RewardScorer([silent], None), GRPOConfig(), TrainerState())
    for _ in range(2):
        group = RolloutGroup({"prompt": "1+1=", "answer": "2"}, [1], [
            Rollout([5], [0.0], "stop", text=text) for text in "ab"])
        scoring.apply([group], scoring.start_batch([group]).settle([group]))
        assert [one.reward for one in group.rollouts] == [1.0, None]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("All reward functions returned None for the following kwargs: {'prompt': '1+1=', "
                           "'answer': '2', 'completion': 'b'}. So 1 of 2 completions have no reward")
