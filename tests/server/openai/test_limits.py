"""A request above a limit of an endpoint is refused with the limit's name, and costs the other requests nothing."""

import asyncio
import json
import logging
import resource
import socket
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from threading import current_thread
from typing import Any
from unittest.mock import Mock

import openai
import pytest
from scripted_chat import Gated, ScriptedChat, begun, client_of, until
from tables import every_row

from lowmem_grpo.agents.endpoint import Endpoint
from lowmem_grpo.server import server
from lowmem_grpo.server.openai import routes
from lowmem_grpo.server.openai.routes import Completions
from lowmem_grpo.server.openai.sessions import OpenSessions
from lowmem_grpo.server.requests import ChatError, Limits, json_of

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


def slots_of(endpoint: Endpoint) -> Any:
    """The slots of the one key that was used."""
    until(lambda: len(endpoint.completions.slots) == 1)
    return next(iter(endpoint.completions.slots.values()))


def test_of_50_mb_not_a_byte_is_waited_for() -> None:
    with Endpoint(ScriptedChat()) as endpoint:
        status, reply = sent(endpoint, f"Content-Length: {50 * MIB}")
        assert (status, reply["error"]["code"]) == (413, "request_too_large")
        large: Any = [{"role": "user", "content": "x" * 50 * MIB}]
        with pytest.raises(openai.APIStatusError, match=r"413.*at most 8388608 are taken.*body_bytes"):
            client_of(endpoint).chat.completions.create(model="agent", messages=large)
        assert client_of(endpoint).models.list().data


def test_a_body_is_parsed_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()
    monkeypatch.setattr(routes, "json_of", lambda *given: (seen.append(current_thread().name), json_of(*given))[1])
    with Endpoint(ScriptedChat()) as endpoint:
        assert client_of(endpoint).chat.completions.create(model="agent", messages=HI).choices
    assert seen == ["AnyIO worker thread"]


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
        until(lambda: slots_of(endpoint).statistics().tasks_waiting == 1)
        with pytest.raises(openai.RateLimitError, match="2 requests are being answered and 1 wait") as refused:
            client_of(endpoint).chat.completions.create(model="agent", messages=HI)
        assert refused.value.response.headers["retry-after"] == "1"
        patient = client_of(endpoint, max_retries=60)
        calls.append(pool.submit(patient.chat.completions.create, model="agent", messages=HI))
        gate.opened.set()
        assert [call.result(60).choices[0].message.content for call in calls] == ["heard: hi"] * 4
    assert chat.most == 2


def test_a_key_that_fills_its_slots_and_its_queue_leaves_those_of_others_free() -> None:
    limits = Limits(concurrent=1, queue=0)
    completions = Completions(Mock(), OpenSessions(limits), limits, asyncio.Event())

    def of(key: str) -> AbstractAsyncContextManager[None]:
        return completions.working_for(Mock(scope={"holder": key}, receive=asyncio.Event().wait))

    async def both() -> None:
        async with of("ann"):
            with pytest.raises(ChatError, match="1 requests are being answered"):
                async with of("ann"):
                    pass
            async with of("bob"):
                pass

    asyncio.run(both())


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
        until(lambda: slots_of(endpoint).borrowed_tokens == 1)
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


# Connections of who has no key


HALF = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Half: "


def connected(endpoint: Endpoint, said: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", int(endpoint.address.rpartition(":")[2])), timeout=60)
    made.sendall(said)
    return made


def is_closed(connection: socket.socket) -> bool:
    """Wait until the server has closed a connection, without an answer."""
    with suppress(ConnectionResetError), connection:
        return connection.recv(1) == b""
    return True


HALF_A_BODY = (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-API-Key: KEY\r\n"
               b"Content-Length: 9\r\n\r\nhalf")


@pytest.mark.parametrize("said", [b"", HALF, HALF_A_BODY, b"G"], ids=["nothing", "headers", "a body", "a letter"])
@pytest.mark.parametrize("before", [False, True], ids=["the first", "the second"])
def test_a_request_that_does_not_come_is_not_waited_for(
    said: bytes, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEADERS", 0.1)
    monkeypatch.setattr(server, "BODY", 0.1)
    with Endpoint(ScriptedChat()) as endpoint, connected(endpoint) as connection:
        if before and said:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
        connection.sendall(said.replace(b"KEY", endpoint.api_key.encode()))
        assert is_closed(connection)
        assert client_of(endpoint).models.list().data


def test_connections_without_a_request_give_their_place_to_one_with_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FRESH", 0.0)
    monkeypatch.setattr(server, "most_connections", lambda: 4)
    gate = Gated()
    with ThreadPoolExecutor(1) as pool, Endpoint(ScriptedChat(gate)) as endpoint:
        long = pool.submit(client_of(endpoint).chat.completions.create, model="agent", messages=HI)
        gate.wait_for(1)
        half = [connected(endpoint, HALF) for _ in range(3)]
        assert client_of(endpoint).models.list().data
        assert is_closed(half[0]), "the oldest one went"
        gate.opened.set()
        assert long.result(60).choices, "and not the one that was being answered"
        for each in half[1:]:
            each.close()


def test_there_are_never_more_connections_than_open_files_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < server.most_connections() < max(resource.getrlimit(resource.RLIMIT_NOFILE)[0], server.BACKLOG + 1)
    monkeypatch.setattr(server, "most_connections", lambda: 2)
    with Endpoint(ScriptedChat()) as endpoint:
        fresh = [connected(endpoint, HALF) for _ in range(6)]
        assert [is_closed(each) for each in fresh[2:]] == [True] * 4, "those that are new stay for a moment"
        for each in fresh[:2]:
            each.close()


def test_a_line_that_repeats_is_counted_and_not_written() -> None:
    """asyncio logs each of its attempts to accept a connection when no more files can be opened."""
    def line(words: str, *given: str, later: float = 0.0) -> logging.LogRecord:
        made = logging.LogRecord("asyncio", logging.ERROR, "", 0, words, given, None)
        made.created = later
        return made

    repeats = server.Repeats()
    assert sum(repeats.filter(line("out of system resource")) for _ in range(2000)) == server.OFTEN
    assert repeats.filter(other := line("another %s", "line")) and other.getMessage() == "another line"
    after = line("out of system resource", later=server.MINUTE + 1)
    assert repeats.filter(after)
    assert after.getMessage() == "out of system resource (1,990 more of these lines were left out)"
    server.made_for(server.make_server_app({}, str, Limits()))
    assert all(server.REPEATS in logging.getLogger(name).filters for name in ("asyncio", "uvicorn.error"))
