"""The object that is called like openai's client."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from random_talks import SCHEMAS
from served import chat_over, scripted_desk
from tables import every_row

from lowmem_grpo.service.client import SESSION, Client, NotServedError

HELLO: dict[str, Any] = {"model": "agent", "messages": [{"role": "user", "content": "Hello"}]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture
def client() -> Iterator[Client]:
    desk = scripted_desk(lambda prompt: "3" if "<tool_response>" in prompt else CALL)
    yield Client(chat_over(desk))
    engine_of(desk).gate.set()
    desk.close()


def engine_of(desk: Any) -> Any:
    return desk.engine


def asked(client: Client, **fields: Any) -> Any:
    return asyncio.run(client.chat.completions.create(**HELLO | fields))


def test_replies_are_openais_own_and_their_messages_go_back_as_they_are(client: Client) -> None:
    reply = asked(client, tools=SCHEMAS, timeout=60, extra_headers={"X-A": "b"}, user=openai.NOT_GIVEN)
    assert isinstance(reply, ChatCompletion)
    (choice,) = reply.choices
    (call,) = choice.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    for message in (choice.message, choice.message.model_dump(), choice.message.model_dump(exclude_none=True)):
        following = asked(client, tools=SCHEMAS, messages=[*HELLO["messages"], message, result])
        assert following.choices[0].message.content == "3"
        assert client.served.histories.parent(following.choices[0].turn) == choice.turn


def test_extra_body_adds_fields_as_openais_client_does(client: Client) -> None:
    reply = asked(client, extra_body={"return_token_ids": True, "top_k": 5}, top_p=1.0)
    turn = client.served.turn(reply.choices[0].turn)
    assert turn is not None
    assert (reply.prompt_token_ids, reply.choices[0].token_ids) == (turn.prompt_ids, turn.completion_ids)


def test_a_stream_is_read_like_openais_and_may_be_left(client: Client) -> None:
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
    assert isinstance(chunks[0], ChatCompletionChunk) and chunks[0].choices[0].turn  # type: ignore[attr-defined]
    asyncio.run(leave())
    assert client.served.desk.engine.conversations == 1  # type: ignore[union-attr]


@every_row("fields, kind, words", [
    ({"model": "other"}, openai.NotFoundError, "'other' is not served here"),
    ({"temperature": -1}, openai.BadRequestError, "temperature is -1"),
    ({"temperature": -1, "stream": True}, openai.BadRequestError, "temperature is -1"),
    ({"best_of": 3}, openai.BadRequestError, "best_of is not a field"),
    ({"response_format": Client}, openai.BadRequestError, "response_format is"),
])
def test_refusals_are_openais_errors(client: Client, fields: dict[str, Any], kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        asked(client, **fields)
    assert caught.value.status_code in (400, 404) and caught.value.param == next(iter(fields))
    assert caught.value.response.status_code == caught.value.status_code


def test_a_call_that_takes_too_long_raises_openais_timeout_and_keeps_nothing(client: Client) -> None:
    engine = engine_of(client.served.desk)
    engine.gate.clear()
    for late in (client.with_options(timeout=0.05), Client(client.served, timeout=0.05)):
        with pytest.raises(openai.APITimeoutError):
            asked(late)
    engine.gate.set()
    asked(client)
    assert len(client.served.histories.held) == 1


def test_an_engine_that_fails_is_openais_internal_error(client: Client) -> None:
    engine_of(client.served.desk).says = lambda prompt: 1 / 0
    with pytest.raises(openai.InternalServerError, match="ZeroDivisionError"):
        asked(client)


@every_row("path", ["responses", "embeddings", "completions", "beta", "chat.responses",
                                  "chat.completions.parse", "chat.completions.with_raw_response", "models.retrieve"])
def test_what_is_not_served_is_refused_with_advice(client: Client, path: str) -> None:
    part: Any = client
    *before, name = path.split(".")
    for step in before:
        part = getattr(part, step)
    with pytest.raises(NotServedError, match=rf"has no {name}: .*chat\.completions\.create"):
        getattr(part, name)
    assert not hasattr(part, name)


def test_the_rest_of_the_client_is_there(client: Client) -> None:
    async def use() -> list[str]:
        async with client.with_options(timeout=60, max_retries=0) as other:
            found = await other.models.list()
            return [model.id for model in found.data]

    assert asyncio.run(use()) == ["agent"]
    with pytest.raises(TypeError, match="with_options got retries"):
        client.with_options(retries=3)


def test_each_task_of_a_rollout_has_its_session(client: Client) -> None:
    histories, all_asked = client.served.histories, asyncio.Barrier(4)

    async def rollout(name: str) -> list[str | None]:
        SESSION.set(name)
        first = await client.chat.completions.create(**HELLO)
        message = first.choices[0].message
        await all_asked.wait()
        second = await Client(client.served).chat.completions.create(
            model="agent", messages=[*HELLO["messages"], message, {"role": "user", "content": "Again"}])
        return [first.choices[0].turn, histories.parent(second.choices[0].turn)]

    async def all_of_them() -> list[list[str | None]]:
        return list(await asyncio.gather(*(rollout(name) for name in "abcd")))

    found = asyncio.run(all_of_them())
    assert all(turn == parent for turn, parent in found) and len({turn for turn, _ in found}) == 4
