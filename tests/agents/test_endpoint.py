"""Trajectories that nobody writes down."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import ScriptedBackend

from lowmem_grpo import agents as art

QUESTION = {"role": "user", "content": "Hi"}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    backend = ScriptedBackend(tmp_path)
    yield backend.client()
    backend.worker.close()


async def ask(client: Any, *messages: Any, stream: bool = False) -> Any:
    reply = await client.chat.completions.create(model="agent", messages=list(messages), stream=stream)
    if not stream:
        return reply.choices[0].message
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in reply if chunk.choices])
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("stream", [False, True])
def test_all_calls_of_a_coroutine_make_up_its_trajectory(client: Any, stream: bool) -> None:
    async def agent() -> None:
        said = await ask(client, QUESTION, stream=stream)
        await ask(client, QUESTION, said, {"role": "user", "content": "Sure?"}, stream=stream)
        await asyncio.create_task(ask(client, {"role": "user", "content": "Another thing."}, stream=stream))
        art.auto_trajectory(required=True).reward = 2.0  # type: ignore[union-attr]
        assert len(art.auto_trajectory(required=True).messages_and_choices) == 4  # type: ignore[union-attr]

    trajectory = asyncio.run(art.capture_auto_trajectory(agent()))
    assert [one["role"] for one in trajectory.messages()] == ["user", "assistant", "user", "assistant"]
    assert trajectory.messages()[3]["content"] == "Yes." and trajectory.reward == 2
    assert trajectory.metrics["duration"] > 0
    assert [len(one.messages_and_choices) for one in trajectory.additional_histories] == [2]
    turns = [one.turn for history in trajectory.histories for one in history.messages_and_choices  # type: ignore[union-attr]
             if not isinstance(one, dict)]
    assert len(set(turns)) == 3


def test_two_coroutines_at_a_time_do_not_hear_each_other(client: Any) -> None:
    async def agent(words: str) -> None:
        for _ in range(3):
            await ask(client, {"role": "user", "content": words})
            await asyncio.sleep(0)

    async def main() -> list[art.Trajectory]:
        return await asyncio.gather(*(art.capture_auto_trajectory(agent(words)) for words in ("one", "two")))

    for words, trajectory in zip(("one", "two"), asyncio.run(main()), strict=True):
        said = {message["content"] for history in trajectory.histories for message in history.messages()}
        assert said == {words, "Yes."}


def test_a_trajectory_is_handed_over_from_deep_inside() -> None:
    async def agent() -> str:
        art.yield_trajectory(art.Trajectory(reward=1))
        art.yield_trajectory(art.Trajectory(reward=2))
        return "done"

    assert asyncio.run(art.capture_yielded_trajectory(agent())).reward == 2
    assert asyncio.run(agent()) == "done", "outside of a capture nobody takes it, as in ART"


@pytest.mark.parametrize(("call", "words"), [
    (lambda: asyncio.run(art.capture_auto_trajectory(asyncio.sleep(0))), "called no model"),
    (lambda: asyncio.run(art.capture_yielded_trajectory(asyncio.sleep(0))), "ended without yield_trajectory"),
    (lambda: art.auto_trajectory(required=True), "run this coroutine with capture_auto"),
])
def test_a_trajectory_that_is_not_there_is_said(call: Any, words: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=words):
        call()
    assert art.auto_trajectory() is None
