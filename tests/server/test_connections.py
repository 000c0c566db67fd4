"""Connections that send nothing, or half a request: each part of a request must come in time, one address has at most
half of the connections, and a process without free files waits for some, and then answers again."""

import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import Mock
from urllib.request import urlopen

import pytest
import uvicorn
from uvicorn.server import ServerState

from lowmem_grpo.server import server
from lowmem_grpo.server.server import BODY, FRESH, HEADERS, Connection

WITHOUT_FILES = """
import os, resource
from lowmem_grpo.server.requests import Limits
from lowmem_grpo.server.server import made_for, make_server_app, open_socket
listening = open_socket("127.0.0.1", 0)
made = made_for(make_server_app({}, lambda key: True, Limits()))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]  # with the server's own, few of the 64 are left
print(listening.getsockname()[1], flush=True)
made.run([listening])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of open files are those of Linux and macOS")
def test_a_server_without_free_files_pauses_without_filling_its_log_and_answers_again() -> None:
    with subprocess.Popen([sys.executable, "-c", WITHOUT_FILES], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process, ExitStack() as files:
        files.callback(process.kill)
        assert process.stdout and process.stderr
        port = int(process.stdout.readline())
        with ExitStack() as strangers:
            for _ in range(60):
                strangers.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            while "out of system resource" not in process.stderr.readline():
                assert process.poll() is None
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as reply:
            assert reply.status == 200
        process.terminate()
        assert process.stderr.read().count("out of system resource") < 20  # asyncio writes it 2,048 times a second
        assert process.wait(60) is not None


class Port:
    """A server's connections without a network, at a clock that the test sets."""

    now = 0.0

    def __init__(self) -> None:
        self.config, self.state, self.timers = uvicorn.Config(Mock(), http=Connection), ServerState(), list[Mock]()
        self.config.load()
        self.loop = Mock(time=lambda: self.now, call_later=self.call_later)
        self.loop.create_task = lambda task, **_: task.close() or Mock()

    def call_later(self, seconds: float, call: Callable[[], None]) -> Mock:
        self.timers.append(Mock(seconds=seconds, call=call))
        return self.timers[-1]

    @property
    def limits(self) -> list[float]:
        """The seconds after which a connection is closed."""
        return [timer.seconds for timer in self.timers if not timer.cancel.called]

    def connect(self, address: str, sent: bytes = b"") -> Connection:
        made = Connection(self.config, self.state, {}, self.loop)
        made.connection_made(Mock(get_extra_info={"peername": (address, 1)}.get, is_closing=lambda: False))
        if sent:
            made.data_received(sent)
        return made


def is_open(connection: Connection) -> bool:
    return not connection.transport.abort.called


HALF = b"POST / HTTP/1.1\r\nHost: a\r\n"


def test_half_sent_headers_and_bodies_have_a_limit_of_time_that_further_bytes_do_not_move() -> None:
    port = Port()
    made = port.connect("10.0.0.1", HALF)
    made.data_received(b"X-Slow: 1\r\n")
    assert port.limits == [HEADERS] and len(port.timers) == 1
    made.data_received(b"Content-Length: 5\r\n\r\n")
    made.data_received(b"1234")
    assert port.limits == [BODY] and len(port.timers) == 2 and is_open(made)
    port.timers[-1].call()
    assert not is_open(made)
    assert port.connect("10.0.0.1", HALF + b"Content-Length: 1\r\n\r\n1").timer is None  # now the server has to answer


def test_one_address_has_half_of_the_connections_and_this_machine_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "most_connections", lambda: 6)
    port = Port()
    assert [is_open(port.connect("10.0.0.1", HALF)) for _ in range(4)] == [True, True, True, False]
    assert is_open(port.connect("10.0.0.2"))
    port = Port()
    assert all(is_open(port.connect("127.0.0.1")) for _ in range(6))


def test_where_all_connections_are_taken_the_oldest_without_a_request_gives_its_place_away(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "most_connections", lambda: 3)
    port = Port()
    made = []
    for sent in (HALF + b"Content-Length: 5\r\n\r\n", b"", b""):
        made.append(port.connect("127.0.0.1", sent))
        port.now += FRESH / 2
    assert not is_open(port.connect("127.0.0.1")) and all(map(is_open, made))  # at work, or fresh
    port.now += 2 * FRESH
    assert is_open(port.connect("127.0.0.1")) and list(map(is_open, made)) == [True, False, True]
