"""From trajectories to what is trained: only what the policy drew, once, and shown as it was said; and to numbers."""

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openai.types.chat.chat_completion import Choice

from lowmem_grpo.agents.sampled import Sampled, Tally, tally_of
from lowmem_grpo.agents.trajectories import History, Trajectory, TrajectoryGroup
from lowmem_grpo.runs.trajectory import turn_records
from lowmem_grpo.types import Turn

SYSTEM, ASK, MORE = ({"role": role, "content": text} for role, text in
                     (("system", "Be brief."), ("user", "2 + 3?"), ("user", "And 4 + 4?")))


def turn(prompt: list[int], *drawn: int, text: str, **more: Any) -> Turn:
    return Turn(prompt, list(drawn), [-0.5] * len(drawn), "stop", text, **more)


HELD = {
    "five": turn([1, 2], 10, 11, text="5"), "eight": turn([1, 2, 10, 11, 3], 12, text="8"),
    "other": turn([1, 2], 13, text="five"), "base": turn([7], 9, text="base", policy_version=-1),
    "again": turn([1, 2, 10, 11, 4], 14, text="nine"),
}
NAMES = {one.text: name for name, one in HELD.items()}
SHELF: Any = SimpleNamespace(turn=HELD.get, find=lambda messages, *_: [
    NAMES.get(one["content"]) if one["role"] == "assistant" else None for one in messages])


def choice(name: str | None, text: str = "", **message: Any) -> Choice:
    turns = {} if name is None else {"turn": name}
    held = HELD.get(name or "")
    said = {"role": "assistant", "content": text or (held.text if held else "?"), **message}
    return Choice.model_validate({"index": 0, "finish_reason": "stop", "message": said, **turns})


def trajectory(*said: Any, reward: float = 1.0, **more: Any) -> Trajectory:
    return Trajectory(messages_and_choices=list(said), reward=reward, **more)


TWO = trajectory(SYSTEM, ASK, choice("five"), MORE, choice("eight"), metadata={"task": "sums"}, metrics={"right": 2})
ONE = trajectory(SYSTEM, ASK, choice("other"), reward=0.0, metrics={"right": True, "late": 3})


def of(*members: Trajectory, **more: Any) -> tuple[Sampled, list[Any]]:
    sampled = Sampled(SHELF)
    return sampled, sampled.groups([TrajectoryGroup(list(members), **more)])


def test_a_group_is_made_of_the_named_turns_and_shown_with_what_was_said() -> None:
    sampled, [group] = of(TWO, ONE, metadata={"seed": 3})
    first, second = group.rollouts
    assert first.completion_ids == [10, 11, 3, 12] and first.trained == [True, True, False, True]
    assert second.completion_ids == [13] and group.prompt_ids == [1, 2] and group.row == {"seed": 3}
    assert (first.reward, second.reward, first.extras) == (1.0, 0.0, {"task": "sums"})
    assert first.opening == [SYSTEM, ASK]
    assert [record["replies"] for record in turn_records(first)[:1]] == [[MORE]]
    given = [TrajectoryGroup([TWO, ONE], exceptions=[ValueError("x")], metrics={"of": 2})]
    assert sampled.tally(given, [group]).metrics() == {
        "trajectories/total": 2, "trajectories/trained": 2, "trajectories/unexplained": 0, "groups/left_out": 0,
        "trajectories/exceptions": 1, "metrics/late": 3.0, "metrics/right": 1.5, "group_metrics/of": 2.0,
    }
    assert HELD["five"].replies == [], "what is held stays as it is"


def test_without_a_choice_known_answers_are_the_policys() -> None:
    _, [group] = of(trajectory(*TWO.messages()), ONE)
    assert group.rollouts[0].completion_ids == [10, 11, 3, 12] and group.rollouts[0].turns[1].text == "8"


def test_a_turn_of_two_histories_is_trained_once_and_its_beginning_shown_once() -> None:
    branch = History(messages_and_choices=[SYSTEM, ASK, choice("five"), {"role": "user", "content": "And 4 + 5?"},
                                           choice("again")])
    _, [group] = of(trajectory(SYSTEM, ASK, choice("five"), MORE, choice("eight"), additional_histories=[branch]), ONE)
    rollout = group.rollouts[0]
    assert rollout.num_trained == 4 and [one.text for one in rollout.turns] == ["5", "8", "nine"]
    assert [one.replies for one in rollout.turns] == [[MORE], [{"role": "user", "content": "And 4 + 5?"}], []]


@pytest.mark.parametrize("said", [
    [ASK, choice("other"), choice(None, "another model's")],
    [ASK, choice("other"), {"role": "assistant", "content": "8"}],
    [ASK, choice("base"), choice("other")],
], ids=["a choice without a turn", "a message beside choices", "the base model's"])
def test_what_others_said_is_context(said: list[Any]) -> None:
    _, [group] = of(trajectory(*said), ONE)
    assert [one.text for one in group.rollouts[0].turns] == ["five"]


def test_calls_of_tools_are_shown_and_counted() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    _, [group] = of(trajectory(ASK, choice("five", tool_calls=[call]), {"role": "tool", "content": "5"}), ONE)
    [made] = group.rollouts[0].turns
    assert made.calls == 1 and made.message["tool_calls"][0]["function"]["name"] == "add"
    assert made.replies == [{"role": "tool", "content": "5"}]


@pytest.mark.parametrize(("wrong", "words"), [
    (trajectory(ASK, choice("gone")), "messages_and_choices[1] ('?') says that it is gone, which is not held"),
    (trajectory(ASK, additional_histories=[History(messages_and_choices=[choice("gone")])]),
     "additional_histories[0].messages_and_choices[0]"),
    (trajectory(ASK), "is not known to have said anything"), (trajectory(ASK, choice("base")), "anything"),
    (trajectory(ASK, {"role": "assistant", "content": "made up"}), "anything"),
], ids=["gone", "in a further history", "silent", "the base model", "made up"])
def test_what_no_turn_explains_is_left_out_by_name(
    wrong: Trajectory, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        sampled, [group] = of(TWO, wrong, ONE)
    assert len(group.rollouts) == 2 and len(sampled.lost) == 1
    assert "trajectory 1 of group 0" in caplog.text and words in caplog.text
    sampled, groups = of(TWO, wrong)
    assert not groups and sampled.left_out == 1


def tallied(*rewards: float, failed: int = 0) -> TrajectoryGroup:
    return TrajectoryGroup([Trajectory(reward=reward, metrics={"won": reward > 0}) for reward in rewards],
                           exceptions=[ValueError("x")] * failed, metrics={"size": len(rewards)})


def test_numbers_of_parts_of_any_size_have_the_means_of_the_whole() -> None:
    groups = [tallied(1.0, 0.0), tallied(1.0, 1.0, 0.0, failed=1), tallied(0.5)]
    whole = tally_of(groups, {}).metrics()
    assert whole["reward"] == pytest.approx(3.5 / 6) and whole["won"] == pytest.approx(4 / 6)
    assert whole["exception_rate"] == pytest.approx(1 / 7) and whole["group_size"] == 2
    for cut in range(4):
        parts = Tally.total([tally_of(groups[:cut], {}), tally_of(groups[cut:], {})])
        assert parts.metrics() == pytest.approx(whole)
    total = Tally.total([Tally({"seen": 2}, {"spread": []}), Tally({"seen": 3, "lost": 1})])
    assert total.metrics() == {"seen": 5, "lost": 1, "spread": 0.0}


def test_numbers_of_the_caller_go_before_those_of_trajectories_and_carry_the_split() -> None:
    assert tally_of([], {}).of_split("val") == {}
    line = tally_of([tallied(1.0)], {"won": 0.25, "val/cost": 2}).of_split("val")
    assert (line["val/won"], line["val/cost"], line["val/reward_std_dev"]) == (0.25, 2.0, 0.0)


def test_scalars_of_torch_and_nan_are_logged_and_what_is_no_number_is_refused() -> None:
    group = tallied(0.0, 0.0)
    scalars: Any = (torch.tensor(1.0), 0.5, 0.5**0.5), (math.nan, math.nan, math.nan)
    for group.trajectories[0].reward, mean, spread in scalars:
        line = tally_of([group], {}).metrics()
        assert [line["reward"], line["reward_std_dev"]] == pytest.approx([mean, spread], nan_ok=True)
    with pytest.raises(TypeError, match="cost is None; a reward or a metric must be a number"):
        tally_of([], {"cost": None})  # type: ignore[dict-item]
