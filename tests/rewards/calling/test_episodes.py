"""What reward functions get of episodes: the messages, their environments and turns; and what an environment pays."""

import copy
import json
from functools import partial
from typing import Any

import pytest
from episodes import CALL, episode, game, tool_use, turn

from lowmem_grpo.rewards import RewardError, RewardScorer, number_equal, repetition_penalty, soft_overlong_penalty
from lowmem_grpo.rewards.calling.contract import MissingColumnError
from lowmem_grpo.rewards.calling.reward_batch import EpisodeMessages, RewardBatch, score_groups
from lowmem_grpo.rewards.texts import completion_text
from lowmem_grpo.rollout.scoring import EnvironmentReward
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import Rollout, RolloutGroup

CHAT = [{"role": "user", "content": "What is 6 times 7?"}]


class Guess:
    """An environment."""


class Other:
    """An environment of another class."""


def scored(*functions: Any, rollouts: list[Rollout] | None = None, row: dict[str, Any] | None = None,
           early: bool = False) -> dict[str, list[float | None]]:
    """What functions pay for the rollouts of one group, some while others are sampled where it is `early`."""
    group = RolloutGroup({"prompt": CHAT} if row is None else row, [1, 2, 3],
                         [game(), tool_use()] if rollouts is None else rollouts)
    scorer = RewardScorer(list(functions), while_sampling=early, episodes=True)
    if not early:
        return score_groups(scorer, [group], TrainerState()).rewards
    with RewardBatch(scorer, [group], TrainerState()) as scoring:
        return scoring.settle([group]).rewards


@pytest.mark.parametrize("early", [True, False])
def test_functions_for_one_answer_read_the_last_and_functions_for_messages_read_all(early: bool) -> None:
    """Where `completion[0]` is the first turn, a reward for one answer pays for a call of a tool."""
    reads = [
        lambda messages: "42" in messages[0]["content"],
        lambda messages: [message["role"] for message in messages] == ["assistant", "tool", "assistant"],
        lambda messages: sum(len(message.get("tool_calls", ())) for message in messages),
        lambda messages: messages[-1]["content"] == "Right!",
    ]
    found = scored(*(partial(read_each, read=read) for read in reads), early=early)
    assert [*found.values()] == [[0, 1], [0, 1], [0, 1], [1, 0]]


def read_each(completions: list[Any], read: Any) -> list[float]:
    return [float(read(completion)) for completion in completions]


def test_the_messages_are_a_plain_list_but_for_index_0() -> None:
    plain = [{"role": "assistant", "content": "6 * 7", "tool_calls": [CALL]}, {"role": "tool", "content": "42"},
             {"role": "assistant", "content": "It is 42."}, {"role": "user", "content": "Thanks."}]
    later = EpisodeMessages(plain)
    assert [*later] == later == plain == copy.deepcopy(later) == json.loads(json.dumps(later))
    assert later[0] is plain[2] and later[1:] == plain[1:] and later[:1] == plain[:1] and later[-4] == plain[0]
    with pytest.raises(IndexError):
        EpisodeMessages()[0]


def test_a_text_prompt_gets_the_text_of_the_last_turn() -> None:
    assert scored(lambda completions: [float(text == "25") for text in completions], rollouts=[game()],
                  row={"prompt": "Guess."}) == {"<lambda>": [1.0]}


def test_ready_made_rewards_read_the_last_answer_and_count_only_what_the_policy_drew() -> None:
    context = episode(turn("1"), turn("2"), context=30)
    found = scored(number_equal(column="answer"), repetition_penalty(ngram=1), soft_overlong_penalty(20, 10),
                   rollouts=[game(), tool_use(), context], row={"prompt": CHAT, "answer": "42"})
    assert [pay > 0 for pay in found["number_equal"]] == [False, True, False]
    assert found["repetition_penalty"] == [-0.5, -0.5, -0.5], "the tokens 11 12 11 12, without the 9s between them"
    assert found["soft_overlong_reward_func"] == [0, 0, -1], "the limit of a run counts all tokens"
    assert completion_text([*tool_use().turns[0].replies, {"role": "assistant", "content": None}]) == ""


@pytest.mark.parametrize("prompt", [None, [{"role": "user", "content": ""}]])
def test_an_episode_without_turns_is_an_empty_answer_whatever_its_row(prompt: Any) -> None:
    rollouts = [game(), episode(ending="environment_error")]
    assert scored(lambda completions: [float(not each[0]["content"]) for each in completions], rollouts=rollouts,
                  row={"seed": 3, "prompt": prompt}) == {"<lambda>": [0, 1]}


def test_functions_get_prompts_with_what_the_environment_added() -> None:
    seen: list[Any] = []

    def keeps(prompts: list[Any], completions: list[Any]) -> list[float]:
        seen.extend(prompts)
        return [0.0] * len(prompts)

    opening = [{"role": "user", "content": "Guess. From 1 to 64."}]
    for prompt in (CHAT, "Guess."):
        scored(keeps, rollouts=[game(opening=opening), game()], row={"prompt": prompt})
    assert seen == [opening, CHAT, "Guess. From 1 to 64.", "Guess."]


@pytest.mark.parametrize("early", [True, False])
def test_functions_that_ask_get_the_environments_and_turns_of_episodes(early: bool) -> None:
    guess, seen = Guess(), {}

    def asks(completions: list[Any], environments: list[Any], turns: list[Any]) -> list[float]:
        return [float(environment is guess) + len(each) for environment, each in zip(environments, turns, strict=True)]

    def keeps(completions: list[Any], **kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0] * len(completions)

    found = scored(asks, keeps, rollouts=[game(environment=guess), game()], early=early)
    assert found["asks"] == [3, 2] and {"environments", "turns"} <= seen.keys()
    assert seen["completion_ids"] == [[11, 12, 9, 9, 9, 11, 12]] * 2, "all that followed the prompt, as in TRL"


def test_runs_of_single_turns_pass_no_environments_and_say_so() -> None:
    seen: dict[str, Any] = {}
    single = [RolloutGroup({"prompt": "p", "turns": 3}, [1], [Rollout([5], [-1.0], "stop", "4")])]

    def keeps(completions: list[Any], **kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0]

    score_groups(RewardScorer([keeps, repetition_penalty()]), single, TrainerState())
    assert "environments" not in seen and seen["turns"] == [3], "a column may have that name"
    with pytest.raises(MissingColumnError, match=r"requires environments.*only with tools or an environment_factory"):
        score_groups(RewardScorer([lambda completions, environments: [0.0]]), single, TrainerState())
    with pytest.raises(RewardError, match=r"columns \['turns'\] have names of reward function arguments; rename them"):
        scored(keeps, row={"prompt": CHAT, "turns": 3})


def test_what_an_environment_pays_is_a_reward_named_by_its_class() -> None:
    unpaid, other = episode(turn("a"), environment=Guess()), game(environment=Other())
    found = scored(EnvironmentReward(Guess), EnvironmentReward(Other),
                   rollouts=[game(environment=Guess()), game(), unpaid, other, episode(ending="timeout")])
    assert found == {"Guess": [1.0, 1.0, None, None, None], "Other": [None, 1.0, None, 1.0, None]}


@pytest.mark.parametrize(("paid", "message"), [
    ([float("nan")], "Guess paid nan; it must pay a finite number"), ([1.0, float("-inf")], "Guess paid -inf"),
    (["1.0"], "Guess paid '1.0', a str; it must pay a number"), ([1e308, 1e308], "Guess paid inf"),
])
def test_no_pay_that_is_not_a_finite_number_becomes_a_reward(paid: list[Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        scored(EnvironmentReward(Guess), rollouts=[episode(*(turn("a", reward=value) for value in paid))])
