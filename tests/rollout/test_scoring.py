"""From what functions and environments pay to the advantages of episodes and their turns, as in a run; and the metrics
of rollouts: lengths, rewards that may be missing, groups with signal."""

import math
from typing import Any

import pytest

from lowmem_grpo import GRPOConfig
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rollout.scoring import EnvironmentReward, Scoring, rollout_metrics, waiting_share
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


def rollout(tokens: int, reward: float | None, finish: str = "stop", **rewards: float | None) -> Rollout:
    advantage = 0.0 if reward is None else reward - 0.5
    return Rollout([1] * tokens, [0.0] * tokens, finish, rewards=rewards, reward=reward,
                   advantage=advantage)  # type: ignore[arg-type]


def test_lengths_and_rewards_are_those_of_the_generation() -> None:
    groups = [
        RolloutGroup({}, [1], [rollout(2, 1.0, right=1.0), rollout(4, 0.0, right=0.0)]),
        RolloutGroup({}, [1], [rollout(8, 0.5, "length", right=0.5), rollout(6, 0.5, right=0.5)]),
    ]
    metrics = rollout_metrics(groups, ["right"])
    assert metrics == {
        "completions/mean_length": 5, "completions/min_length": 2, "completions/max_length": 8,
        "completions/mean_terminated_length": 4, "completions/min_terminated_length": 2,
        "completions/max_terminated_length": 6,
        "completions/repetition": pytest.approx((4 / 5 + 2 / 3) / 4),  # of 8 and 6 equal tokens
        "completions/clipped_ratio": 0.25, "frac_reward_zero_std": 0.5,
        "groups/total": 2, "groups/with_signal": 1, "groups/signal_share": 0.5, "rewards/right/mean": 0.5,
        "rewards/right/std": pytest.approx((0.5 / 3) ** 0.5), "reward": 0.5,
        "reward_std": pytest.approx((0.5 / 3) ** 0.5),
    }


def test_missing_rewards_are_left_out_of_means_instead_of_counted_as_zero() -> None:
    rollouts = [rollout(1, 1.0, right=1.0, judge=None), rollout(1, 3.0, right=None, judge=None), rollout(1, None)]
    metrics = rollout_metrics([RolloutGroup({}, [1], rollouts)], ["right", "judge"])
    assert (metrics["rewards/right/mean"], metrics["rewards/right/std"], metrics["reward"]) == (1, 0, 2)
    assert "rewards/judge/mean" not in metrics and metrics["groups/with_signal"] == 1
    assert metrics["frac_reward_zero_std"] == 0
    alone = [RolloutGroup({}, [1], [rollout(1, 1.0), rollout(1, None)])]
    assert rollout_metrics(alone, [])["frac_reward_zero_std"] == 1


def test_a_generation_without_any_reward_or_end_has_metrics_all_the_same() -> None:
    metrics = rollout_metrics([RolloutGroup({}, [1], [rollout(3, None, "length"), rollout(3, None, "length")])], ["r"])
    assert "reward" not in metrics
    assert metrics["frac_reward_zero_std"] == 1.0
    assert metrics["completions/mean_terminated_length"] == 0
    assert metrics["completions/clipped_ratio"] == 1.0


def episode_of(ending: str, *turns: Turn) -> Rollout:
    drawn = sum(len(turn.completion_ids) for turn in turns)
    return Rollout([1] * (drawn + 5), [0.0] * (drawn + 5), "stop", trained=[True] * drawn + [False] * 5,
                   turns=list(turns), ending=ending, reward=1.0)


def turn(prompt: int, tokens: int, cached: int = 0, calls: int = 0, failures: int = 0, seconds: float = 0.0) -> Turn:
    return Turn([1] * prompt, [1] * tokens, [0.0] * tokens, "stop", cached_tokens=cached, calls=calls,
                failures=failures, seconds=seconds)


def test_episodes_are_measured_by_what_the_policy_drew_and_by_their_turns() -> None:
    groups = [
        RolloutGroup({}, [1], [episode_of("done", turn(10, 2, calls=2, failures=1, seconds=1.0),
                                          turn(20, 4, cached=12)),
                               episode_of("max_turns", turn(10, 3, calls=1, seconds=0.5))]),
        RolloutGroup({}, [1], [episode_of("done", turn(10, 1)), episode_of("timeout", turn(10, 1))]),
    ]
    metrics = rollout_metrics(groups, [])
    wanted = {
        "completions/mean_length": 11 / 4, "completions/max_length": 6, "turns/mean": 5 / 4, "turns/min": 1,
        "turns/max": 2, "episodes/done": 0.5, "episodes/max_turns": 0.25, "episodes/timeout": 0.25,
        "episodes/answer": 0, "tools/call_frequency": 3 / 4, "tools/failure_frequency": 1 / 3,
        "tokens/cached_share": 12 / 60, "groups/lost": 1,
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)
    assert waiting_share(groups, 3.0) == {"tools/waiting_share": pytest.approx(1.5 / 4 / 3)}


def test_nothing_of_episodes_is_logged_where_there_are_none_nor_of_tools_in_a_game() -> None:
    single = [RolloutGroup({}, [1], [rollout(2, 1.0), rollout(3, 0.0)])]
    assert not [name for name in rollout_metrics(single, []) if name.startswith(("turns", "episodes", "tools"))]
    assert waiting_share(single, 1.0) == {} and "groups/lost" not in rollout_metrics(single, [])
    game = [RolloutGroup({}, [1], [episode_of("done", turn(1, 1))])]
    assert not [name for name in rollout_metrics(game, []) if name.startswith("tools")]
    asked = [RolloutGroup({}, [1], [episode_of("answer", turn(1, 1))])]
    assert rollout_metrics(asked, [])["tools/call_frequency"] == 0
