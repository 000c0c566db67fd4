"""Which turn is paid for what, against numbers worked out by hand."""

from typing import Any

import pytest
import torch

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.losses.advantages import AdvantageSettings, assign_advantages
from lowmem_grpo.losses.credit import assign_credit
from lowmem_grpo.types import Rollout, RolloutGroup, Turn

WEIGHTS = {"Game": 1.0, "style": 0.5}
Pay = tuple[float | None, ...]


def episode(pay: Pay, style: float | None = 0.0, states: str | None = None, tokens: int = 1, ending: str = "done"
            ) -> Rollout:
    """An episode whose turn t has t + `tokens` tokens, with one token of context between two turns."""
    turns, ids, trained = [], [], []
    for number, reward in enumerate(pay):
        count = number + tokens
        state = None if states is None else states[number]
        turns.append(Turn([1], [5] * count, [0.0] * count, "stop", reward=reward, state=state))
        ids += ([9] if number else []) + [5] * count
        trained += ([False] if number else []) + [True] * count
    game = sum(one or 0.0 for one in pay)
    return Rollout(ids, [0.0] * len(ids), "stop", trained=trained, turns=turns, ending=ending,
                   rewards={"Game": game, "style": style})


def assign(*rollouts: Rollout, discount: float | None = None, weight: float = 1.0, scale: str = "none") -> RolloutGroup:
    """One group of these, with advantages."""
    chosen = AdvantageSettings(scale_rewards=scale, reward_weights=list(WEIGHTS.values()))
    group = RolloutGroup({}, [1], list(rollouts))
    assign_advantages([group], list(WEIGHTS), chosen)
    assign_credit([group], chosen, discount, weight, WEIGHTS, ["Game"])
    return group


def credit(*rollouts: Rollout, **settings: Any) -> list[list[float]]:
    """The advantages of the turns of each episode, in one group."""
    return [firsts(rollout) for rollout in assign(*rollouts, **settings).rollouts]


def firsts(rollout: Rollout) -> list[float]:
    """The advantage of each turn; all tokens of a turn have the same, and context has none."""
    values = rollout.advantages
    assert isinstance(values, torch.Tensor) and values.shape == (len(rollout.completion_ids),)
    found, place = [], 0
    for number, turn in enumerate(rollout.turns):
        if number:
            assert values[place] == 0 and not rollout.trained[place]
            place += 1
        count = len(turn.completion_ids)
        assert (values[place : place + count] == values[place]).all()
        found.append(values[place].item())
        place += count
    return found


def test_a_turn_gets_its_discounted_reward_to_go_less_the_mean_of_those_that_reached_it() -> None:
    """Returns with discount 0.5: (1 + 0.5 * 2, 2) and (0 + 0.5 * (4 + 0.5 * (1 + 1)), 4 + 0.5 * 2, 2) where the second
    has a style of 2 at weight 0.5, which is added to its last turn."""
    found = credit(episode((1.0, 2.0)), episode((0.0, 4.0, 1.0), style=2.0), discount=0.5)
    assert found == [[2 - 2.25, 2 - 3.5], [2.5 - 2.25, 5 - 3.5, 0.0]]


def test_without_a_discount_of_one_nothing_is_lost_of_the_episode_s_reward() -> None:
    first, second = episode((1.0, None), style=3.0), episode((0.0, 0.0))
    assert credit(first, second, discount=1.0) == [[1.25, 0.75], [-1.25, -0.75]]
    assert first.reward == 2.5 and first.advantage == pytest.approx((1 * 1.25 + 2 * 0.75) / 3)


def test_a_turn_is_divided_by_the_deviation_of_what_it_is_compared_with() -> None:
    found = credit(episode((1.0, 0.0)), episode((0.0, 4.0)), discount=0.0, scale="group")
    expected = [[0.5 / (0.5**0.5 + 1e-4), -2 / (8**0.5 + 1e-4)]]
    assert found[0] == pytest.approx(expected[0]) and found[1] == pytest.approx([-one for one in expected[0]])


def test_turns_in_the_same_state_are_compared_and_added_to_the_episode_s_advantage() -> None:
    """Undiscounted returns: (3, 2) in a b, (0, 0) in a c, (1, 1, 1) in d a b. In a: 3, 0, 1; in b: 2, 1."""
    rollouts = [episode((1.0, 2.0), states="ab"), episode((0.0, 0.0), states="ac"),
                episode((0.0, 0.0, 1.0), states="dab")]
    own, a, b = [3 - 4 / 3, 0 - 4 / 3, 1 - 4 / 3], 4 / 3, 1.5
    expected = [[own[0] + 2 * (3 - a), own[0] + 2 * (2 - b)], [own[1] + 2 * (0 - a), own[1]],
                [own[2], own[2] + 2 * (1 - a), own[2] + 2 * (1 - b)]]
    for found, wanted in zip(credit(*rollouts, weight=2.0), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-6)


def test_states_without_weight_and_episodes_without_states_leave_one_advantage_for_all_tokens() -> None:
    for states, weight in (("ab", 0.0), (None, 1.0)):
        group = assign(episode((1.0, 0.0), states=states), episode((0.0, 0.0), states=states), weight=weight)
        assert [one.advantages for one in group.rollouts] == [0.5, -0.5]


def test_turns_give_signal_where_the_episodes_earn_the_same() -> None:
    first, second = episode((1.0, 0.0)), episode((0.0, 1.0))
    assert credit(first, second, discount=1.0) == [[0.0, -0.5], [0.0, 0.5]]
    assert first.has_signal and second.has_signal
    alike = [episode((1.0, 0.0)), episode((1.0, 0.0))]
    credit(*alike, discount=1.0)
    assert not any(one.has_signal for one in alike)


@pytest.mark.parametrize("ending", ["timeout", "environment_error"])
def test_a_failed_episode_is_as_if_it_was_not_there(ending: str) -> None:
    failed = episode((100.0, 100.0), ending=ending)
    rollouts = [episode((1.0, 2.0)), episode((0.0, 4.0))]
    alone = credit(*rollouts, discount=0.5)
    group = assign(*rollouts, failed, discount=0.5)
    assert [firsts(one) for one in rollouts] == alone
    assert failed.reward is None and not failed.has_signal and not group.lost


@pytest.mark.parametrize("name", ["grpo", "reinforce++", "rloo"])
def test_a_group_of_which_one_episode_is_left_has_no_signal(name: str) -> None:
    lost = RolloutGroup({}, [1], [episode((7.0,)), episode((0.0,), ending="timeout")])
    other = RolloutGroup({}, [1], [episode((1.0,)), episode((0.0,))])
    settings = AdvantageSettings(advantage_estimator=name, reward_weights=[1.0, 0.5])
    assign_advantages([other], list(WEIGHTS), settings)
    alone = [one.advantage for one in other.rollouts]
    assign_advantages([lost, other], list(WEIGHTS), settings)
    assert lost.lost and [one.advantage for one in lost.rollouts] == [0, 0]
    assert [one.advantage for one in other.rollouts] == alone and any(alone)


@pytest.mark.parametrize("settings", [
    {"advantage_estimator": "reinforce++"}, {"advantage_estimator": "remax"}, {"advantage_estimator": "passk"},
    {"multi_objective_aggregation": "normalize_then_sum"},
])
def test_a_discount_that_has_no_mean_to_compare_with_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"turn_discount is 0\.9, which compares turns with the mean of their group"):
        GRPOConfig(turn_discount=0.9, **settings)
    GRPOConfig(**settings)
    GRPOConfig(turn_discount=0.9, advantage_estimator="rloo")
