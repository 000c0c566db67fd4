"""The socket of a server, the signals that end it, and its folder: one server at a time, and an address that only its
owner can read."""

import json
import signal
import socket
import sys
from pathlib import Path

import pytest
from fastapi import APIRouter
from fastapi.testclient import TestClient
from programs import usual_signals

from lowmem_grpo.server.requests import Limits
from lowmem_grpo.server.server import ended_by_signals, make_server_app, open_socket
from lowmem_grpo.server.server_dir import ADDRESS, Address, ServerDir, read_address

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a server needs the locks of Linux and macOS")


def test_a_reply_is_sent_at_once() -> None:
    """asyncio switches Nagle's delay off for sockets that say that they are TCP, and for no others."""
    found = open_socket("127.0.0.1", 0)
    assert found.proto == socket.IPPROTO_TCP
    found.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_closes_what_is_open_and_a_second_one_does_not_disturb_that(number: int) -> None:
    closed = []
    with usual_signals():
        with pytest.raises(SystemExit) as left, ended_by_signals():
            try:
                signal.raise_signal(number)
                closed.append("too late")
            finally:
                signal.raise_signal(number)
                closed.append("all")
        assert {signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)} == {signal.SIG_DFL}
    assert left.value.code == 143 and closed == ["all"]


def test_a_closed_terminal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_one_server_at_a_time_has_a_folder(tmp_path: Path) -> None:
    with ServerDir(tmp_path).owned(), pytest.raises(OSError, match="another server has"), ServerDir(tmp_path).owned():
        pass
    with ServerDir(tmp_path).owned() as database:
        assert database.rows("SELECT 1 AS one") == [{"one": 1}]


def test_the_address_is_for_its_owner_only_and_the_key_stays(tmp_path: Path) -> None:
    home = ServerDir(tmp_path / "server")
    with home.owned():
        address = Address("http://127.0.0.1:1", home.key())
        path = home.announce(address)
        assert home.announce(address) == path
    assert path.stat().st_mode & 0o077 == 0 and (tmp_path / "server").stat().st_mode & 0o077 == 0
    assert read_address(path) == read_address(tmp_path / "server") == address
    assert ServerDir(tmp_path / "server").key() == address.key


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", json.dumps({"url": "http://x"})])
def test_a_missing_or_damaged_address_is_told_with_what_to_do(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / ADDRESS).write_text(text)
    with pytest.raises(OSError, match="no server is known here" if text is None else "does not say where a server is"):
        read_address(tmp_path)
    assert ServerDir(tmp_path).key().startswith("tml-")


def test_an_unknown_route_is_answered_with_the_routes_that_there_are() -> None:
    few, many = APIRouter(), APIRouter()
    few.add_api_route("/models", lambda: {})
    few.add_api_route("/chat", lambda: {}, methods=["POST"])
    for number in range(5):
        many.add_api_route(f"/{number}", lambda: {})
    app = make_server_app({"/v1": few, "/api": many}, lambda key: True, Limits())
    reply = TestClient(app, "http://localhost").get("/v1/chat/x", headers={"Authorization": "Bearer key"})
    assert reply.status_code == 404 and reply.json()["error"]["message"] == (
        "there is no GET /v1/chat/x; there are GET /health, GET /v1/models, POST /v1/chat, the routes below /api")
