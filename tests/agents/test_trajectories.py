"""Trajectories and groups as an ART program makes them."""

import asyncio
import copy
import math
from datetime import datetime, timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from pydantic import ValidationError
from tables import every_row, not_refused

from lowmem_grpo import agents as art
from lowmem_grpo.agents import trajectories as module
from lowmem_grpo.agents.trajectories import message_of
from lowmem_grpo.utils import UnsupportedError


def choice(content: str | None, **message: Any) -> Choice:
    said = {"role": "assistant", "content": content, **message}
    return Choice.model_validate({"index": 0, "finish_reason": "stop", "message": said, "turn": "t1"})


async def rollout(reward: float) -> art.Trajectory:
    await asyncio.sleep(0)
    return art.Trajectory(messages_and_choices=[{"role": "user", "content": "Hi"}, choice("Ho")], reward=reward)


def test_copies_have_lists_and_dictionaries_of_their_own_and_keep_the_names_of_turns() -> None:
    trajectory = art.Trajectory(messages_and_choices=[choice("Ho")])
    for one in (trajectory, copy.copy(trajectory), copy.deepcopy(trajectory), trajectory.model_copy()):
        assert one.messages_and_choices[0].turn == "t1"  # type: ignore[union-attr]
    group = art.TrajectoryGroup([art.Trajectory(metadata={"a": 1})], metadata={"b": 2}, logs=["made"])
    for copied in (copy.copy(group), group.model_copy()):
        copied.trajectories.append(art.Trajectory())
        copied.log("copied")
        copied.metadata["b"] = copied.metrics["c"] = 3
        copied.exceptions.append(art.FailedRollout(type="a", message="b", traceback="c"))
        assert copied.trajectories[0] is group.trajectories[0], "the members are the same, as in ART"
    assert (len(group), group.logs, group.metadata, group.metrics, group.exceptions) == (1, ["made"], {"b": 2}, {}, [])
    twin = copy.copy(group.trajectories[0])
    twin.messages_and_choices.append({"role": "user", "content": "Hi"})
    twin.metadata["a"] = 2
    assert group.trajectories[0].messages_and_choices == [] and group.trajectories[0].metadata == {"a": 1}


def test_messages_are_those_that_a_model_is_sent() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    given = [{"role": "user", "content": None}, choice(None, tool_calls=[call]),
             ChatCompletionMessage(role="assistant", content="so"),
             {"role": "tool", "tool_call_id": "call_1", "content": "1"}]
    trajectory, made = art.Trajectory(), art.Trajectory(messages_and_choices=given)  # type: ignore[arg-type]
    trajectory.messages_and_choices.extend(given)  # type: ignore[arg-type]
    assert trajectory.messages() == made.messages() == [
        {"role": "user", "content": ""}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "so"}, {"role": "tool", "tool_call_id": "call_1", "content": "1"},
    ]
    assert [one["trainable"] for one in trajectory.for_logging()["messages"]] == [False, True, False, False]


def test_rewards_and_metrics_that_are_no_finite_numbers_come_back_from_json() -> None:
    spoilt = art.Trajectory(messages_and_choices=[choice("Ho")], reward=math.nan, metrics={"a": -math.inf, "b": 2},
                            metadata={"c": math.nan})
    group = art.TrajectoryGroup([spoilt], metrics={"d": math.inf})
    for again in (art.Trajectory.model_validate_json(spoilt.model_dump_json()),
                  art.TrajectoryGroup.model_validate_json(group.model_dump_json()).trajectories[0]):
        assert str(again) == str(spoilt) == "Trajectory(reward=nan, metrics={'a': -inf, 'b': 2}, metadata={'c': nan})"
        assert again.messages_and_choices == spoilt.messages_and_choices
    assert art.TrajectoryGroup.model_validate_json(group.model_dump_json()).metrics == {"d": math.inf}


@pytest.mark.filterwarnings("error")
def test_what_is_no_message_group_or_field_is_refused_with_how_to_write_it() -> None:
    assert not_refused(message_of, [
        (wrong, "choices of a completion") for wrong in (None, "Hello", {"content": "no role"}, 3)], TypeError) == []
    assert not_refused(lambda make: art.TrajectoryGroup(make()), [
        (wrong, "write TrajectoryGroup(rollout") for wrong in (
            art.Trajectory, lambda: rollout(1), lambda: "abc", lambda: 3)], TypeError) == []
    with pytest.raises(ValidationError, match="rewards"):
        art.Trajectory(rewards=1.0)  # type: ignore[call-arg]


def test_a_trajectory_notes_how_long_things_took(monkeypatch: pytest.MonkeyPatch) -> None:
    began, seconds = datetime(2026, 1, 1), count(100.0)
    monkeypatch.setattr(module, "datetime", SimpleNamespace(now=lambda: began + timedelta(seconds=7)))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))

    async def timed() -> art.Trajectory:
        trajectory = art.Trajectory(start_time=began)
        for _ in range(2):
            async with trajectory.track_duration("search"):
                next(seconds)
        trajectory.log("done")
        return trajectory.finish()

    trajectory = asyncio.run(timed())
    assert trajectory.metrics == {"search_duration": 4.0, "duration": 7.0}
    assert trajectory.logs == ["done"]


def test_a_group_of_rollouts_is_awaited_and_keeps_their_order() -> None:
    async def slow(reward: float, last: asyncio.Event) -> art.Trajectory:
        await (last.wait() if reward == 0 else asyncio.sleep(0))
        last.set()
        return await rollout(reward)

    async def main() -> art.TrajectoryGroup:
        last = asyncio.Event()
        return await art.TrajectoryGroup((slow(reward, last) for reward in (0, 1)), metadata={"task": 3})  # type: ignore[misc]

    group = asyncio.run(main())
    assert [one.reward for one in group] == [0, 1] and len(group) == 2
    assert group.metadata == {"task": 3}
    assert copy.deepcopy(group) == group and copy.deepcopy(group).trajectories[0] is not group.trajectories[0]
    assert art.TrajectoryGroup.model_validate(group.model_dump()).trajectories[1].reward == 1


def test_errors_and_what_is_no_trajectory_are_kept_as_failures_of_a_group() -> None:
    group = art.TrajectoryGroup([art.Trajectory(), ValueError("no mail"), None], exceptions=[KeyError("x")])
    assert len(group) == 1
    assert [(one.type, one.message) for one in group.exceptions] == [
        ("ValueError", "no mail"), ("TypeError", "None stands in place of a Trajectory"), ("KeyError", "'x'")]


@every_row("name", ["ServerlessBackend", "SkyPilotBackend", "TinkerBackend", "megatron", "PipelineTrainer", "utils",
                    "TrainSFTConfig", "TinkerArgs", "train_sft", "update_wandb_config", "set_cost_calculator"])
def test_a_name_of_art_that_is_not_here_is_refused_with_what_to_do(name: str) -> None:
    for owner in (art, art.dev, art.TrainableModel(name="agent", project="mail", base_model="tiny")):
        with pytest.raises(UnsupportedError, match=rf"has no {name}\. \w"):
            getattr(owner, name)
        with pytest.raises(AttributeError, match=f"{name}_"):
            getattr(owner, name + "_")
    with pytest.raises(AttributeError, match=r"it has .*InternalModelConfig"):
        getattr(art.dev, name + "_")
