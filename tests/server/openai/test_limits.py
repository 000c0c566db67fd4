"""A request above a limit of an endpoint is refused with the limit's name, and costs the other requests nothing."""

import json
import socket
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import openai
import pytest
from scripted_chat import Gated, ScriptedChat, begun, client_of, until
from tables import every_row

from lowmem_grpo.agents.endpoint import Endpoint
from lowmem_grpo.server.requests import Limits

HI: list[Any] = [{"role": "user", "content": "hi"}]
MIB = 2**20


def sent(endpoint: Endpoint, headers: str, *parts: bytes) -> tuple[int, Any]:
    """(status, JSON) of a POST by hand, whose body is only these parts."""
    with socket.create_connection(("127.0.0.1", int(endpoint.address.rpartition(":")[2])), timeout=60) as connection:
        head = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", f"Authorization: Bearer {endpoint.api_key}"]
        connection.sendall("\r\n".join([*head, headers, "", ""]).encode())
        for part in parts:
            connection.sendall(part)
        said = b""
        with suppress(ConnectionResetError):  # by what was sent and not read
            while piece := connection.recv(65536):
                said += piece
    return int(said.split()[1]), json.loads(said.partition(b"\r\n\r\n")[2])


def test_of_50_mb_not_a_byte_is_waited_for() -> None:
    with Endpoint(ScriptedChat()) as endpoint:
        status, reply = sent(endpoint, f"Content-Length: {50 * MIB}")
        assert (status, reply["error"]["code"]) == (413, "request_too_large")
        large: Any = [{"role": "user", "content": "x" * 50 * MIB}]
        with pytest.raises(openai.APIStatusError, match=r"413.*at most 8388608 are taken.*body_bytes"):
            client_of(endpoint).chat.completions.create(model="agent", messages=large)
        assert client_of(endpoint).models.list().data


def test_a_body_that_does_not_say_its_length_is_read_up_to_the_limit() -> None:
    with Endpoint(ScriptedChat(), limits=Limits(body_bytes=MIB)) as endpoint:
        part = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        status, reply = sent(endpoint, "Transfer-Encoding: chunked", *[part] * 17)  # and no end
        assert (status, reply["error"]["code"]) == (413, "request_too_large")


def test_too_many_messages_are_counted() -> None:
    with Endpoint(ScriptedChat(), limits=Limits(messages=3)) as endpoint:
        assert client_of(endpoint).chat.completions.create(model="agent", messages=HI * 3).choices
        with pytest.raises(openai.BadRequestError, match="messages has 4 entries; at most 3") as refused:
            client_of(endpoint).chat.completions.create(model="agent", messages=HI * 4)
        assert refused.value.param == "messages"


def test_beyond_the_queue_a_request_is_told_to_come_again_and_then_gets_its_reply() -> None:
    gate = Gated()
    chat = ScriptedChat(gate)
    with ThreadPoolExecutor(4) as pool, Endpoint(chat, limits=Limits(concurrent=2, queue=1)) as endpoint:
        calls = [pool.submit(client_of(endpoint).chat.completions.create, model="agent", messages=HI) for _ in range(2)]
        gate.wait_for(2)
        calls.append(pool.submit(client_of(endpoint).chat.completions.create, model="agent", messages=HI))
        until(lambda: endpoint.completions.slots.statistics().tasks_waiting == 1)
        with pytest.raises(openai.RateLimitError, match="2 requests are being answered and 1 wait") as refused:
            client_of(endpoint).chat.completions.create(model="agent", messages=HI)
        assert refused.value.response.headers["retry-after"] == "1"
        patient = client_of(endpoint, max_retries=60)
        calls.append(pool.submit(patient.chat.completions.create, model="agent", messages=HI))
        gate.opened.set()
        assert [call.result(60).choices[0].message.content for call in calls] == ["heard: hi"] * 4
    assert chat.most == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_takes_too_long_is_ended_and_its_slot_is_free(stream: bool) -> None:
    gate = Gated()
    chat = ScriptedChat(gate)
    with Endpoint(chat, limits=Limits(seconds=0.3, concurrent=1, queue=0)) as endpoint:
        with pytest.raises(openai.InternalServerError, match=r"504.*more than 0.3 seconds"):
            client_of(endpoint, max_retries=5).chat.completions.create(model="agent", messages=HI, stream=stream)
        assert (chat.cancelled, chat.busy) == (1, 0)
        endpoint.completions.limits = replace(endpoint.limits, seconds=600)
        gate.opened.set()
        assert client_of(endpoint).chat.completions.create(model="agent", messages=HI).choices


def test_a_client_that_reads_nothing_of_its_stream_frees_its_slot_in_time() -> None:
    class Endless(ScriptedChat):
        async def stream(self, body: Mapping[str, Any], *others: Any) -> AsyncIterator[dict[str, Any]]:
            while True:
                yield {"choices": [], "text": "x" * 100_000}

    with Endpoint(Endless(), limits=Limits(seconds=0.3, concurrent=1)) as endpoint:
        deaf = begun(endpoint.base_url, endpoint.api_key, model="agent", messages=HI, stream=True)
        until(lambda: endpoint.completions.slots.borrowed_tokens == 1)
        endpoint.completions.limits = replace(endpoint.limits, seconds=600)
        assert client_of(endpoint).chat.completions.create(model="agent", messages=HI).choices
        deaf.close()


def test_a_body_that_does_not_come_is_not_waited_for_forever() -> None:
    with Endpoint(ScriptedChat(), limits=Limits(seconds=0.3)) as endpoint:
        status, reply = sent(endpoint, "Content-Length: 100\r\nConnection: close", b"{")
        assert (status, reply["error"]["code"]) == (408, "timeout")


def test_sessions_and_their_replies_are_bounded() -> None:
    with Endpoint(ScriptedChat(), limits=Limits(sessions=1, session_replies=2)) as endpoint:
        session = endpoint.session()
        with pytest.raises(RuntimeError, match=r"1 sessions are open.*with endpoint.session"):
            endpoint.session()
        for _ in range(2):
            client_of(session).chat.completions.create(model="agent", messages=HI)
        with pytest.raises(openai.RateLimitError, match="had its 2 replies"):
            client_of(session, max_retries=5).chat.completions.create(model="agent", messages=HI)
        session.close()
        endpoint.session().close()


@every_row("name, value", [("body_bytes", 0), ("concurrent", 0), ("queue", -1), ("seconds", 0),
                                         ("messages", 1.5), ("header_bytes", 10), ("sessions", "8")])
def test_a_limit_that_is_none_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is {value!r}; it must be"):
        Limits(**{name: value})
