"""Gathering many rollouts: what fails is counted, nothing is left running, and what comes back is whole."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

from lowmem_grpo import agents as art
from lowmem_grpo.agents import progress


class Rollouts:
    """Rollouts that end as they are told, and a count of those that have begun and that were cancelled."""

    def __init__(self) -> None:
        self.begun = self.cancelled = 0

    async def one(self, ending: Any, metrics: dict[str, float] | None = None) -> Any:
        self.begun += 1
        try:
            await asyncio.sleep(3600 if ending == "never" else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(ending, BaseException):
            raise ending
        return art.Trajectory(reward=ending, metrics=metrics or {}) if isinstance(ending, float) else ending

    def groups(self, *endings: list[Any]) -> list[Any]:
        return [art.TrajectoryGroup(map(self.one, members)) for members in endings]


@pytest.fixture
def rollouts() -> Rollouts:
    return Rollouts()


def gather(groups: Any, **options: Any) -> list[art.TrajectoryGroup]:
    return asyncio.run(art.gather_trajectory_groups(groups, **options))


def test_groups_come_back_in_order_and_the_bar_shows_their_means(
    rollouts: Rollouts, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = gather(rollouts.groups([0.0, 1.0], [3.0]), pbar_desc="play")
    assert [[one.reward for one in group] for group in groups] == [[0, 1], [3]]
    assert "play: 100%" in (shown := capsys.readouterr().err) and "3/3" in shown and "reward=1.33" in shown
    gather([art.TrajectoryGroup([rollouts.one(1.0, {"moves": 4})])], max_metrics=1)
    assert "reward=1" in (shown := capsys.readouterr().err) and "moves" not in shown


@pytest.mark.parametrize("allowed", [2, 0.5, math.inf])
def test_as_many_rollouts_as_allowed_may_fail_and_are_counted(
    rollouts: Rollouts, allowed: float, caplog: pytest.LogCaptureFixture
) -> None:
    (group,) = gather(rollouts.groups([1.0, ValueError("no mail"), None, 2.0]), max_exceptions=allowed)
    assert [one.reward for one in group] == [1, 2]
    assert [one.type for one in group.exceptions] == ["ValueError", "TypeError"]
    assert "2 of 4 rollouts failed: 1 x ValueError: no mail; 1 x TypeError: a rollout returned None" in caplog.text


def test_a_reward_or_metric_that_is_no_number_is_its_rollouts_failure(rollouts: Rollouts) -> None:
    unpaid, unmeasured = art.Trajectory(), art.Trajectory(metrics={"won": 1})
    unpaid.reward, unmeasured.metrics["won"] = None, "yes"  # type: ignore[assignment]
    (group,) = gather(rollouts.groups([1.0, unpaid, unmeasured]), max_exceptions=2)
    assert len(group) == 1 and [one.message[:13] for one in group.exceptions] == ["reward is Non", "won is a str;"]


@pytest.mark.parametrize("allowed", [0, 0.2])
def test_one_failure_too_many_is_raised_and_all_others_are_cancelled(rollouts: Rollouts, allowed: float) -> None:
    with pytest.raises(ValueError, match="no mail") as raised:
        gather(rollouts.groups(["never", ValueError("no mail")], ["never", "never"]), max_exceptions=allowed)
    assert "1 of 4 rollouts failed" in raised.value.__notes__[0] and len(raised.value.__notes__) == 1
    assert rollouts.cancelled == 3


def test_a_rollout_that_never_ends_is_cut_at_its_timeout(rollouts: Rollouts) -> None:
    (group,) = gather(rollouts.groups([1.0, "never"]), timeout=0.05, max_exceptions=1)
    assert len(group) == 1 and rollouts.cancelled == 1
    assert group.exceptions[0].message == "the rollout did not end within 0.05 s and was cancelled"


def test_cancelling_a_gathering_cancels_every_rollout_and_puts_the_bar_away(rollouts: Rollouts) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(art.gather_trajectory_groups(rollouts.groups(["never"] * 3, ["never"])))
        async with asyncio.timeout(60):
            while rollouts.begun < 4:
                await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert rollouts.cancelled == rollouts.begun == 4
        assert progress.CURRENT.get(None) is None

    asyncio.run(main())


async def later(group: Any) -> Any:
    return group


@pytest.mark.parametrize(("after", "sizes"), [
    (lambda group: group, [1, 2]), (later, [1, 2]), (lambda group: None if len(group) == 1 else later(group), [2]),
    (lambda group: [group, group], [1, 1, 2, 2]),
])
def test_what_after_each_returns_takes_the_groups_place(
    rollouts: Rollouts, after: Callable[[Any], Any], sizes: list[int]
) -> None:
    assert list(map(len, gather(rollouts.groups([1.0], [2.0, 3.0]), after_each=after))) == sizes


@pytest.mark.parametrize(("options", "words"), [
    ({"after_each": lambda group: 3}, "after_each returned a int"), ({"max_exceptions": -1}, "max_exceptions is -1"),
    ({"max_exceptions": float("nan")}, "max_exceptions is nan"), ({"timeout": 0}, "timeout is 0"),
    ({"max_metrics": 0}, "max_metrics is 0"),
])
@pytest.mark.filterwarnings("ignore:coroutine")
def test_settings_that_make_no_sense_are_refused_by_name(rollouts: Rollouts, options: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        gather(rollouts.groups([1.0]), **options)


def test_groups_made_by_a_function_and_groups_that_are_whole_are_taken(rollouts: Rollouts) -> None:
    async def made(ending: Any) -> art.TrajectoryGroup:
        return await art.TrajectoryGroup([rollouts.one(ending)])  # type: ignore[misc, no-any-return]

    groups: list[Awaitable[Any] | art.TrajectoryGroup] = [
        made(1.0), art.TrajectoryGroup([art.Trajectory(reward=2)]), rollouts.one(ValueError("no tasks")),
        rollouts.one(None)]
    assert [group.trajectories[0].reward for group in gather(groups, max_exceptions=2)] == [1, 2]
    with pytest.raises(TypeError, match="takes groups, and got a Trajectory"):
        gather([art.Trajectory()])

    async def outside() -> None:
        await rollouts.groups([KeyError("x"), "never"])[0]

    with pytest.raises(KeyError):
        asyncio.run(outside())
    assert rollouts.cancelled == 1, "a group outside of a gathering raises what a rollout raised"


def test_single_rollouts_give_their_trajectories_or_their_errors(rollouts: Rollouts) -> None:
    pair = (art.Trajectory(reward=1), art.Trajectory(reward=2))

    async def main() -> list[Any]:
        members = map(rollouts.one, [1.0, ValueError("no"), pair, 7])
        return await art.gather_trajectories(members, max_exceptions=2)

    found = asyncio.run(main())
    assert found[0].reward == 1 and isinstance(found[1], ValueError) and found[2] is pair
    assert isinstance(found[3], TypeError) and len(art.TrajectoryGroup([found[0], found[1]]).exceptions) == 1


def test_a_rollout_that_catches_its_cancelling_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rollouts: Rollouts
) -> None:
    monkeypatch.setattr(progress, "CLOSING", 0.05)

    async def stubborn() -> None:
        for _ in range(2):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                logging.info("no")

    with pytest.raises(ValueError, match="no mail"):
        gather([art.TrajectoryGroup([stubborn(), rollouts.one(ValueError("no mail"))])])
    assert "1 rollouts go on" in caplog.text


# What ART does too


def test_a_cancelled_error_that_a_rollout_raises_is_one_failure_and_not_the_end(rollouts: Rollouts) -> None:
    first, second = gather(rollouts.groups([1.0, asyncio.CancelledError("of a client")], [2.0, 3.0]), max_exceptions=1)
    assert [one.reward for one in first] == [1] and [one.type for one in first.exceptions] == ["CancelledError"]
    assert len(second) == 2
    (left,) = gather([rollouts.one(asyncio.CancelledError()), *rollouts.groups([1.0])], max_exceptions=1)
    assert len(left) == 1
    singles = asyncio.run(art.gather_trajectories([rollouts.one(asyncio.CancelledError()), rollouts.one(1.0)],
                                                  max_exceptions=1))
    assert isinstance(singles[0], asyncio.CancelledError) and singles[1].reward == 1
    with pytest.raises(asyncio.CancelledError):
        gather(rollouts.groups([asyncio.CancelledError(), "never"]))
    assert rollouts.cancelled == 1, "of one failure too many all others are cancelled"


def choice(**more: Any) -> Choice:
    said = {"role": "assistant", "content": "Hi"}
    return Choice.model_validate({"index": 0, "finish_reason": "stop", "message": said, **more})


def test_gathering_counts_the_tokens_of_all_choices_as_art_does() -> None:
    logged = {"content": [{"token": "a", "logprob": -1.0, "top_logprobs": []}] * 3, "refusal": None}
    further = art.History(messages_and_choices=[choice(completion_tokens=4)])
    told = [choice(completion_tokens=2), {"role": "user", "content": "Go on."}, choice(logprobs=logged)]

    async def one(choices: list[Any]) -> art.Trajectory:
        return art.Trajectory(messages_and_choices=choices, additional_histories=[further])

    (group,) = gather([art.TrajectoryGroup([one(told), one([choice()]), one([])])])
    assert [member.metrics.get("completion_tokens") for member in group] == [9, None, 4]
