"""An endpoint: who may reach it, what it answers to everybody else, and how it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any
from urllib.request import Request, urlopen

import openai
import pytest
from programs import program
from scripted_chat import Gated, ScriptedChat, client_of, plain_client
from tables import every_row

from lowmem_grpo.agents.endpoint import Endpoint

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with Endpoint(ScriptedChat()) as endpoint:
        yield endpoint


def asked(endpoint: Endpoint, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """(status, headers, JSON) of a request by hand."""
    connection = HTTPConnection(endpoint.address.removeprefix("http://"), timeout=60)
    connection.request(method, path, body, {"Authorization": f"Bearer {endpoint.api_key}"} | headers)
    reply = connection.getresponse()
    said = reply.read()
    connection.close()
    return reply.status, reply.headers, json.loads(said)


def test_the_openai_client_gets_replies_models_and_streams(endpoint: Endpoint) -> None:
    client = client_of(endpoint)
    reply = client.chat.completions.create(model="agent", messages=HI)
    assert (reply.choices[0].message.content, reply.choices[0].turn[:5]) == ("heard: hi", "turn-")  # type: ignore[attr-defined]
    assert [model.id for model in client.models.list()] == ["agent", "base/model"]
    assert client.models.retrieve("base/model").owned_by == "lowmem-grpo"
    chunks = list(client.chat.completions.create(model="agent", messages=HI, stream=True,
                                                 stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "heard: hi"
    assert chunks[-1].usage is not None and chunks[-2].choices[0].finish_reason == "stop"


def test_a_stream_is_server_sent_events_that_end_with_done(endpoint: Endpoint) -> None:
    body = json.dumps({"model": "agent", "messages": HI, "stream": True}).encode()
    request = Request(f"{endpoint.base_url}/chat/completions", body, {"Authorization": f"Bearer {endpoint.api_key}"})
    with urlopen(request, timeout=60) as reply:
        kind, lines = reply.headers["content-type"], reply.read().split(b"\n\n")
    assert kind.startswith("text/event-stream") and lines[-2:] == [b"data: [DONE]", b""]
    assert all(json.loads(line.removeprefix(b"data: "))["object"] == "chat.completion.chunk" for line in lines[:-2])


NO_KEY = "Authorization: Bearer KEY"


@every_row("method, path, body, headers, status, code, said", [
    ("GET", "/v1/models", None, {"Authorization": ""}, 401, "invalid_api_key", NO_KEY),
    ("GET", "/v1/models", None, {"Authorization": "Bearer sk-other"}, 401, "invalid_api_key", NO_KEY),
    ("GET", "/v1/models", None, {"Authorization": "Basic abc"}, 401, "invalid_api_key", NO_KEY),
    ("GET", "/v1/models", None, {"Authorization": "Bearer k\xe9y"}, 401, "invalid_api_key", NO_KEY),
    ("GET", "/openapi.json", None, {"Authorization": ""}, 401, "invalid_api_key", NO_KEY),
    ("OPTIONS", "/v1/models", None, {"Authorization": "", "Origin": "http://a.b"}, 401, "invalid_api_key", NO_KEY),
    ("GET", "/v1/models", None, {"Host": "evil.example"}, 421, "wrong_host", "base_url"),
    ("GET", "/health", None, {"Host": "evil.example:80"}, 421, "wrong_host", "evil.example"),
    ("GET", "/v1/models", None, {"Host": "127.0.0.1.evil.example"}, 421, "wrong_host", "this machine"),
    ("GET", "/openapi.json", None, {}, 404, "unknown_route", "/v1/chat/completions"),
    ("POST", "/v1/responses", "{}", {}, 404, "unknown_route", "/v1/chat/completions"),
    ("GET", "/v1/chat/completions", None, {}, 405, "method_not_allowed", "POST"),
    ("GET", "/v1/models/other", None, {}, 404, "model_not_found", "agent, base/model"),
    ("POST", "/s/other/v1/chat/completions", json.dumps({"model": "agent", "messages": HI}), {}, 404,
     "session_not_found", "base_url"),
    ("POST", "/v1/chat/completions", "{", {}, 400, "invalid_json", "JSON"),
    ("POST", "/v1/chat/completions", b"\xff\xfe", {}, 400, "invalid_json", "JSON"),
    ("POST", "/v1/chat/completions", "[]", {}, 400, "invalid_json", "list"),
    ("POST", "/v1/chat/completions", "[" * 100_000, {}, 400, "invalid_json", "nested"),
    ("POST", "/v1/chat/completions", "", {}, 400, "invalid_json", "JSON"),
    ("GET", "/v1/models", None, {"X-Long": "x" * 20_000}, 431, "headers_too_large", "header_bytes"),
    ("GET", "/v1/models?" + "x" * 20_000, None, {}, 431, "headers_too_large", "header_bytes"),
])
def test_what_is_not_answered_says_why_in_openais_form(
    endpoint: Endpoint, method: str, path: str, body: Any, headers: dict[str, str], status: int, code: str, said: str,
) -> None:
    got, _, reply = asked(endpoint, method, path, body, **headers)
    assert (got, reply["error"]["code"]) == (status, code) and said in reply["error"]["message"]
    assert set(reply["error"]) == {"message", "type", "param", "code"}


def test_no_browser_page_is_let_in_and_health_needs_no_key(endpoint: Endpoint) -> None:
    assert asked(endpoint, "GET", "/health", Authorization="")[::2] == (200, {"status": "ok"})
    _, headers, _ = asked(endpoint, "GET", "/v1/models", Origin="http://evil.example")
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_an_error_in_the_program_tells_the_client_nothing_of_its_inside() -> None:
    async def fails(messages: list[dict[str, Any]]) -> str:
        raise RuntimeError("secret words")

    with Endpoint(ScriptedChat(fails)) as endpoint:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="RuntimeError") as failed:
                client_of(endpoint).chat.completions.create(model="agent", messages=HI, stream=stream)
            assert "secret" not in str(failed.value)
        assert client_of(endpoint).models.list().data


def test_keys_and_sessions_are_another_each_time() -> None:
    with Endpoint(ScriptedChat()) as one, Endpoint(ScriptedChat()) as other:
        names = {one.api_key, other.api_key, *(endpoint.session().name for endpoint in (one, one, other))}
        assert len(names) == 5 and min(map(len, names)) >= 22
        with pytest.raises(openai.AuthenticationError):
            client_of(one, api_key=other.api_key).models.list()


@every_row("options, said", [
    ({"host": "0.0.0.0"}, "ssh -L"), ({"host": "192.168.0.1"}, "127.0.0.1 only"), ({"port": 70_000}, "65535"),
    ({"port": "80"}, "65535"), ({"port": True}, "65535"),
])
def test_another_host_or_port_is_refused_with_the_fix(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Endpoint(ScriptedChat(), **options)


def test_of_two_programs_on_one_port_the_second_is_told_and_the_first_goes_on(endpoint: Endpoint) -> None:
    port = int(endpoint.address.rpartition(":")[2])
    with pytest.raises(OSError, match=f"cannot have port {port}.*port=0"):
        Endpoint(ScriptedChat(), port=port)
    assert client_of(endpoint).models.list().data
    with socket.socket() as listener:  # of another program
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(OSError, match="another program"):
            Endpoint(ScriptedChat(), port=listener.getsockname()[1])


def test_requests_that_wait_when_it_closes_are_told_so_what_it_owns_is_closed_once_and_its_port_is_free_again() -> None:
    gate, closed = Gated(), list[int]()
    endpoint = Endpoint(ScriptedChat(gate), owned=[lambda: closed.append(1), lambda: closed.append(2)])
    port = int(endpoint.address.rpartition(":")[2])
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(client_of(endpoint, max_retries=2).chat.completions.create, model="agent", messages=HI,
                             stream=number % 2 == 0) for number in range(4)]
        gate.wait_for(4)
        endpoint.close()
        for call in calls:
            with pytest.raises(openai.InternalServerError, match=r"503.*closed"):
                call.result(60)
    assert not endpoint.thread.is_alive()
    with pytest.raises(openai.APIConnectionError):
        client_of(endpoint).models.list()
    with pytest.raises(RuntimeError, match="closed"):
        endpoint.session()
    endpoint.close()
    assert closed == [1, 2]
    with Endpoint(ScriptedChat(), port=port) as again:
        assert client_of(again).models.list().data


PROGRAM = """
import sys, threading
sys.path.insert(0, {support!r})
from scripted_chat import Gated, ScriptedChat
from lowmem_grpo.agents.endpoint import Endpoint
gate = Gated()
endpoint = Endpoint(ScriptedChat(gate), owned=[lambda: print("closed", flush=True)])
print(endpoint.base_url, endpoint.api_key, flush=True)
try:
    gate.wait_for(1)
    print("asked", flush=True)
    threading.Event().wait()
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


@pytest.mark.slow
def test_a_program_ends_while_a_request_waits_and_ctrl_c_is_its_own() -> None:
    code = PROGRAM.format(support=os.path.join(os.path.dirname(__file__), "..", "..", "support"))
    with ThreadPoolExecutor(1) as pool, program(sys.executable, "-c", code, stderr=subprocess.PIPE) as ends:
        url, key = ends.stdout.readline().split()
        client = plain_client().with_options(base_url=url, api_key=key)
        waiting = pool.submit(client.chat.completions.create, model="agent", messages=HI)
        assert ends.stdout.readline() == "asked\n"
        ends.send_signal(signal.SIGINT)
        with pytest.raises(openai.InternalServerError, match="503"):
            waiting.result(60)
        assert ends.stdout.read() == "stopped\nclosed\n"
        assert ends.wait(60) == 0 and "Traceback" not in ends.stderr.read()
