"""The object that is called like openai's client."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import Choice
from random_talks import SCHEMAS
from served import chat_over, scripted_worker
from tables import every_row

from lowmem_grpo.agents.local_run import client_of
from lowmem_grpo.server.openai.chat_handler import ChatHandler
from lowmem_grpo.server.openai.sessions import RECORDER, SESSION, Session
from lowmem_grpo.server.requests import Limits

HELLO: dict[str, Any] = {"model": "agent", "messages": [{"role": "user", "content": "Hello"}]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture
def chat() -> Iterator[ChatHandler]:
    worker = scripted_worker(lambda prompt: "3" if "<tool_response>" in prompt else CALL)
    yield chat_over(worker)
    engine_of(worker).gate.set()
    worker.close()


@pytest.fixture
def client(chat: ChatHandler) -> openai.AsyncOpenAI:
    return client_of(chat)


def engine_of(worker: Any) -> Any:
    return worker.engine


def asked(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return asyncio.run(client.chat.completions.create(**HELLO | fields))


def test_replies_are_openais_own_and_their_messages_go_back_as_they_are(
    client: openai.AsyncOpenAI, chat: ChatHandler
) -> None:
    reply = asked(client, tools=SCHEMAS, timeout=60, extra_headers={"X-A": "b"}, user=openai.NOT_GIVEN)
    assert isinstance(reply, ChatCompletion)
    (choice,) = reply.choices
    (call,) = choice.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    for message in (choice.message, choice.message.model_dump(), choice.message.model_dump(exclude_none=True)):
        following = asked(client, tools=SCHEMAS, messages=[*HELLO["messages"], message, result])
        assert following.choices[0].message.content == "3"
        assert chat.histories.parent(following.choices[0].turn) == choice.turn


def test_extra_body_adds_fields_as_openais_client_does(client: openai.AsyncOpenAI, chat: ChatHandler) -> None:
    reply = asked(client, extra_body={"return_token_ids": True, "top_k": 5}, top_p=1.0)
    turn = chat.turn(reply.choices[0].turn)
    assert (reply.prompt_token_ids, reply.choices[0].token_ids) == (turn.prompt_ids, turn.completion_ids)


def test_a_stream_is_read_like_openais_and_may_be_left(client: openai.AsyncOpenAI, chat: ChatHandler) -> None:
    async def read() -> list[ChatCompletionChunk]:
        stream = await client.chat.completions.create(**HELLO, stream=True)
        async with stream:
            return [chunk async for chunk in stream]

    async def leave() -> None:
        async with await client.chat.completions.create(**HELLO, stream=True) as stream:
            async for _ in stream:
                break

    chunks = asyncio.run(read())
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == CALL
    assert isinstance(chunks[0], ChatCompletionChunk) and chunks[-1].choices[0].turn  # type: ignore[attr-defined]
    asyncio.run(leave())
    assert chat.worker.engine.conversations == 1  # type: ignore[union-attr]


@every_row("fields, kind, words", [
    ({"model": "other"}, openai.NotFoundError, "'other' is not served here"),
    ({"temperature": -1}, openai.BadRequestError, "temperature is -1"),
    ({"temperature": -1, "stream": True}, openai.BadRequestError, "temperature is -1"),
    ({"extra_body": {"best_of": 3}}, openai.BadRequestError, "best_of is not a field"),
    ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format is"),
])
def test_refusals_are_openais_errors(client: openai.AsyncOpenAI, fields: dict[str, Any], kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        asked(client, **fields)
    assert caught.value.status_code in (400, 404) and caught.value.param in {**fields, **fields.get("extra_body", {})}
    assert caught.value.response.status_code == caught.value.status_code


def test_a_call_that_takes_too_long_raises_openais_timeout_and_keeps_nothing(
    client: openai.AsyncOpenAI, chat: ChatHandler,
) -> None:
    engine = engine_of(chat.worker)
    engine.gate.clear()
    for late in (client.with_options(timeout=0.05), client_of(chat, timeout=0.05)):
        with pytest.raises(openai.APITimeoutError):
            asked(late)
    engine.gate.set()
    asked(client)
    assert len(chat.histories.held) == 1


@every_row("call", [
    lambda client: client.embeddings.create(model="agent", input="Hello"),
    lambda client: client.responses.create(model="agent", input="Hello"),
    lambda client: client.completions.create(model="agent", prompt="Hello"),
    lambda client: client.models.retrieve("agent"),
])
def test_what_is_not_served_is_refused_with_advice(client: openai.AsyncOpenAI, chat: ChatHandler, call: Any) -> None:
    with pytest.raises(openai.NotFoundError, match=r"there is no .*chat\.completions\.create"):
        asyncio.run(call(client))


def test_the_rest_of_the_client_is_there_and_closing_one_leaves_the_others(client: openai.AsyncOpenAI) -> None:
    async def use() -> list[str]:
        async with client.with_options(timeout=60, max_retries=0) as other:
            found = await other.models.list()
            return [model.id for model in found.data]

    assert asyncio.run(use()) == asyncio.run(use()) == ["agent"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_rollout_hears_is_recorded_with_its_tool_calls(client: openai.AsyncOpenAI, stream: bool) -> None:
    session = Session("", "", Limits(), lambda name: None)

    async def rollout() -> None:
        RECORDER.set(session)
        reply = await client.chat.completions.create(**HELLO, tools=SCHEMAS, stream=stream)
        if stream:
            assert len([chunk async for chunk in reply]) == 3

    asyncio.run(rollout())
    (conversation,) = session.conversations()
    (call,) = Choice.model_validate(conversation.messages_and_choices[-1]).message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 2}')  # type: ignore[union-attr]


def test_each_task_of_a_rollout_has_its_session(client: openai.AsyncOpenAI, chat: ChatHandler) -> None:
    histories, all_asked = chat.histories, asyncio.Barrier(4)

    async def rollout(name: str) -> list[str | None]:
        SESSION.set(name)
        first = await client.chat.completions.create(**HELLO)
        message = first.choices[0].message
        await all_asked.wait()
        second = await client_of(chat).chat.completions.create(
            model="agent", messages=[*HELLO["messages"], message, {"role": "user", "content": "Again"}])
        return [first.choices[0].turn, histories.parent(second.choices[0].turn)]

    async def all_of_them() -> list[list[str | None]]:
        return list(await asyncio.gather(*(rollout(name) for name in "abcd")))

    found = asyncio.run(all_of_them())
    assert all(turn == parent for turn, parent in found) and len({turn for turn, _ in found}) == 4
