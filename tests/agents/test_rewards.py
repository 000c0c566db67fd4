"""RULER on trajectories: by URL, by a judge that is given, and what comes of a judge that fails."""

import asyncio
import logging
from typing import Any

import pytest
from scripted import Scripted
from tables import every_row

from lowmem_grpo import agents as art
from lowmem_grpo import rewards
from lowmem_grpo.agents.rewards import JudgeError, judge_of, ruler, ruler_score_group
from tests.attacks.judge_server import by_length, in_turn, serving

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]
USER = {"role": "user", "content": "When is lunch?"}


def trajectory(*answers: str, reward: float = 0.0, **fields: Any) -> art.Trajectory:
    said = [{"role": "assistant", "content": answer} for answer in answers]
    return art.Trajectory(messages_and_choices=[USER, *said], reward=reward, **fields)


def scored(group: art.TrajectoryGroup, judge: Any, **options: Any) -> Any:
    return asyncio.run(ruler_score_group(group, judge, **options))


def test_scores_become_rewards_and_the_group_that_was_given_stays_as_it_was() -> None:
    group = art.TrajectoryGroup([trajectory("", reward=7, metrics={"moves": 2}, logs=["one"]), trajectory("ab")],
                                exceptions=[ValueError("x")], metadata={"task": 1})
    before = group.model_copy(deep=True)
    judged = scored(group, Scripted())
    assert group == before
    assert [one.reward for one in judged] == [1.0, 1.0] and judged.metadata == {"task": 1} and judged.exceptions
    assert judged.trajectories[0].metrics == {"moves": 2, "independent_reward": 7, "ruler_score": 1}
    assert judged.trajectories[0].logs[0] == "one" and judged.trajectories[0].logs[1].startswith("RULER: ")


def test_the_judge_sees_tools_once_and_further_conversations_too() -> None:
    judge = Scripted()
    more = art.History(messages_and_choices=[{"role": "user", "content": "Sum it up."}])
    pair = [trajectory("a", tools=TOOLS, additional_histories=[more]), trajectory("b", tools=TOOLS)]
    scored(art.TrajectoryGroup(pair), judge, rubric="Be strict.")
    (question,) = judge.asked
    assert question.user.count('"name": "search"') == 1 and "Tools that the agent may call" in question.prompt
    assert '{"conversation": 2}\n' in question.answers[0] and "Sum it up." in question.answers[0]
    assert "Be strict." in question.system


def test_trajectories_that_are_alike_get_one_score_and_nothing_to_compare_is_not_asked(
    caplog: pytest.LogCaptureFixture
) -> None:
    judge = Scripted()
    assert [one.reward for one in scored(art.TrajectoryGroup([trajectory("a")] * 3), judge)] == [0.5] * 3
    assert len(scored(art.TrajectoryGroup([]), judge)) == 0 and not judge.asked
    with caplog.at_level(logging.WARNING):
        scored(art.TrajectoryGroup([trajectory("a"), trajectory("b"), trajectory("a")]), judge, debug=True)
    assert len(judge.asked[0].answers) == 2 and "RULER: trajectory 2 gets 1: " in caplog.text


def test_a_judge_that_fails_raises_or_drops_its_group(caplog: pytest.LogCaptureFixture) -> None:
    group = art.TrajectoryGroup([trajectory("a"), trajectory("b")])
    with pytest.raises(JudgeError, match="scripted gave no scores: it babbles; take another"):
        scored(group, Scripted(fails=True))
    assert scored(group, Scripted(fails=True), swallow_exceptions=True) is None
    assert "a group of 2 trajectories is left out" in caplog.text


def test_a_judge_at_a_url_is_named_as_in_litellm_and_asked_once_for_the_same() -> None:
    with serving(by_length) as server:
        params = {"base_url": server.url, "api_key": "local", "temperature": 0, "num_retries": 1}
        lists = [[USER, {"role": "assistant", "content": "long " * number}] for number in range(1, 4)]
        for name in ("hosted_vllm/m", "hosted_vllm/m"):
            found = asyncio.run(ruler(lists, name, params, tools=TOOLS, debug=True))
    assert [one.trajectory_id for one in found] == ["1", "2", "3"]
    assert found[0].score > found[1].score > found[2].score > 0 and len(server.asked) == 1
    assert server.asked[0]["model"] == "m" and server.asked[0]["temperature"] == 0


def test_an_address_takes_the_name_of_its_model_from_the_parameters() -> None:
    with serving(in_turn(["no scores"])) as server, pytest.raises(JudgeError, match="no scores"):
        asyncio.run(ruler([[USER], []], server.url, {"model": "m", "api_key": "x", "num_retries": 0}))
    assert server.asked[0]["model"] == "m"


@every_row(("judge", "params", "words"), [
    ("anthropic/claude", {}, "address of 'anthropic' is not known"),
    ("hosted_vllm/m", {"base_url": "http://127.0.0.1:1/v1"}, "OPENAI_API_KEY is sent to OpenAI only"),
    ("http://127.0.0.1:1/v1", {}, "needs the name of its model"), ("self", {}, r"model\.judge\(\)"),
    ("openai/m", {"model": "n"}, "judge_model is its place"), ("openai/m", {"api_key": "k", "no_such": 1}, "no_such"),
    (Scripted(), {"temperature": 0}, "made already"), (None, {}, "judge_model is None"),
    (3, {}, "judge_model is a int"),
])
def test_a_judge_that_cannot_be_is_refused_with_what_to_give(judge: Any, params: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        judge_of(judge, params)


def test_what_is_no_group_and_no_rubric_is_refused_and_a_judge_of_rewards_is_taken() -> None:
    with pytest.raises(TypeError, match="takes one TrajectoryGroup, and got a list"):
        scored([], Scripted())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rubric is ' '"):
        scored(art.TrajectoryGroup([]), Scripted(), rubric=" ")
    judge = rewards.UrlJudge("http://127.0.0.1:1/v1", "m", "key")
    assert judge_of(judge, None) is judge
