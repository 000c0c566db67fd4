"""A session records what its client got, and nothing else, as the conversations that were held in it."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from scripted_chat import Gated, ScriptedChat, begun, client_of, until

from lowmem_grpo.agents.endpoint import AgentEndpoint
from lowmem_grpo.agents.trajectories import History
from lowmem_grpo.server.requests import Limits

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture
def endpoint() -> Iterator[AgentEndpoint]:
    with AgentEndpoint(ScriptedChat()) as endpoint:
        yield endpoint


def said(session: Any, messages: list[Any], **options: Any) -> list[Any]:
    """The messages with the reply to them."""
    reply = client_of(session).chat.completions.create(**{"model": "agent", "messages": messages} | options)
    return [*messages, {"role": "assistant", "content": reply.choices[0].message.content}]


def texts(history: History) -> list[str]:
    return [message["content"] for message in history.messages()]


def test_turns_of_a_conversation_are_one_history_and_other_conversations_further_ones(endpoint: AgentEndpoint) -> None:
    with endpoint.session() as session:
        first = said(session, HI, tools=TOOLS)
        said(session, [{"role": "user", "content": "other"}])
        first = said(session, [*first, {"role": "user", "content": "more"}], tools=TOOLS)
        said(session, [*first, {"role": "user", "content": "most"}], tools=TOOLS)
    trajectory = session.trajectory(reward=0.5, metrics={"right": True}, metadata={"task": 3}, logs=["done"])
    assert [texts(history) for history in trajectory.histories] == [
        ["hi", "heard: hi", "more", "heard: more", "most", "heard: most"], ["other", "heard: other"]]
    assert trajectory.tools == TOOLS and trajectory.additional_histories[0].tools is None
    assert [one.turn for one in trajectory.messages_and_choices if not isinstance(one, dict)] == [  # type: ignore[union-attr]
        "turn-0", "turn-2", "turn-3"]
    assert (trajectory.reward, trajectory.metrics, trajectory.metadata, trajectory.logs) == (
        0.5, {"right": True}, {"task": 3}, ["done"])


def test_two_ways_on_from_one_reply_are_two_histories(endpoint: AgentEndpoint) -> None:
    with endpoint.session() as session:
        root = said(session, HI)
        for text in ("left", "right"):
            said(session, [*root, {"role": "user", "content": text}])
    assert [texts(history)[1:3] for history in session.trajectory().histories] == [["heard: hi", "left"],
                                                                                   ["heard: hi", "right"]]


def test_a_streamed_reply_is_recorded_as_a_whole_one(endpoint: AgentEndpoint) -> None:
    with endpoint.session() as session:
        chunks = client_of(session).chat.completions.create(model="agent", messages=HI, stream=True, n=2)
        assert len(list(chunks)) > 4
    assert [texts(history) for history in session.trajectory().histories] == [["hi", "heard: hi"]] * 2


def test_sessions_at_once_do_not_mix(endpoint: AgentEndpoint) -> None:
    def rollout(number: int) -> list[list[str]]:
        with endpoint.session() as session:
            messages = said(session, [{"role": "user", "content": f"{number}"}])
            said(session, [*messages, {"role": "user", "content": "more"}])
        return [texts(history) for history in session.trajectory().histories]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(rollout, range(24)))
    assert found == [[[f"{n}", f"heard: {n}", "more", "heard: more"]] for n in range(24)]


def test_what_the_base_model_says_is_not_the_policys(endpoint: AgentEndpoint) -> None:
    with endpoint.session() as session:
        said(session, HI, model="base/model")
        with pytest.raises(ValueError, match="nothing was said in this session"):
            session.trajectory()


def test_what_the_client_did_not_get_is_not_recorded(endpoint: AgentEndpoint) -> None:
    client = client_of(endpoint)
    client.chat.completions.create(model="agent", messages=HI)  # at the endpoint's own address
    with endpoint.session() as session:
        said(session, HI)
        with pytest.raises(openai.NotFoundError):
            said(session, HI, model="other")
    with pytest.raises(openai.NotFoundError, match="no such session, or it has ended"):
        said(session, HI)
    assert len(session.replies) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_not_answered_and_frees_its_slot(stream: bool) -> None:
    gate = Gated()
    chat = ScriptedChat(gate)
    with AgentEndpoint(chat, limits=Limits(concurrent=1)) as endpoint, endpoint.session() as session:
        leaves = begun(session.base_url, session.api_key, model="agent", messages=HI, stream=stream)
        gate.wait_for(1)
        leaves.close()
        until(lambda: (chat.cancelled, chat.busy) == (1, 0))
        gate.opened.set()
        said(session, [{"role": "user", "content": "again"}])
        assert [texts(history) for history in session.trajectory().histories] == [["again", "heard: again"]]


def test_a_client_that_leaves_in_the_middle_of_a_stream_leaves_no_trace() -> None:
    gate, gone = Gated(), threading.Event()

    async def between() -> None:
        try:
            await gate([{"content": ""}])
        except asyncio.CancelledError:
            gone.set()
            raise

    with AgentEndpoint(ScriptedChat(between=between), limits=Limits(concurrent=1)) as endpoint:
        with endpoint.session() as session:
            with client_of(session).chat.completions.create(model="agent", messages=HI, stream=True) as chunks:
                assert next(iter(chunks)).choices[0].delta.content == "h"
            assert gone.wait(60)
            gate.opened.set()
            said(session, [{"role": "user", "content": "again"}])
        assert [texts(history) for history in session.trajectory().histories] == [["again", "heard: again"]]


def test_a_reply_that_comes_after_the_end_of_its_session_is_not_recorded() -> None:
    gate = Gated()
    with ThreadPoolExecutor(1) as pool, AgentEndpoint(ScriptedChat(gate)) as endpoint:
        with endpoint.session() as session:
            late = pool.submit(said, session, HI)
            gate.wait_for(1)
        gate.opened.set()
        assert late.result(60)[-1]["content"] == "heard: hi"
        assert not session.replies
