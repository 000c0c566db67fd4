"""The socket of a server, the signals that end it, and its folder: one server at a time, and an address that only its
owner can read."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from fastapi import APIRouter
from fastapi.testclient import TestClient
from programs import usual_signals

from lowmem_grpo.server.requests import Limits
from lowmem_grpo.server.server import ended_by_signals, make_server_app, open_socket
from lowmem_grpo.server.server_dir import ADDRESS, Address, RemoteError, ServerClient, ServerDir, read_address

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
    assert home.announce(address) == path, "without the server's umask too"
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


@pytest.mark.parametrize("large", [False, True])
def test_an_address_that_is_a_pipe_or_has_gigabytes_is_refused_unread(large: bool, tmp_path: Path) -> None:
    if large:
        (tmp_path / ADDRESS).write_text("{}")
        os.truncate(tmp_path / ADDRESS, 3 << 30)
    else:
        os.mkfifo(tmp_path / ADDRESS, 0o600)
    with (patch.object(Path, "open", side_effect=AssertionError("it is read")),
          pytest.raises(OSError, match=r"does not say where a server is \(.*(a pipe|at most 1\.0 MiB)")):
        read_address(tmp_path)


@pytest.mark.parametrize("text", ["[" * 10**5, json.dumps({"key": "a", "url": "http://" + "q" * 10**5}),
                                  json.dumps({"key": "a", "url": "q" * 10**5}), '{"key": "a", "key": "b", "url": "http://a"}'],
                         ids=["deep", "long url", "no url", "twice"])
def test_what_is_wrong_in_an_address_is_told_in_a_short_line(text: str, tmp_path: Path) -> None:
    (tmp_path / ADDRESS).write_text(text)
    with pytest.raises(OSError, match="does not say where a server is") as refused:
        read_address(tmp_path)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("reply", [b"<html>", b"", b"[" * 10**5, b"\xff", b'{"a": 1, "a": 2}'])
def test_what_is_no_reply_of_a_server_is_told_in_a_line(reply: bytes) -> None:
    client = ServerClient(Address("http://127.0.0.1:1", GOOD))
    client.ask = Mock(return_value=reply)  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match="does not answer as `lowmem-grpo serve` does"):
        client.get("/jobs")


@pytest.mark.parametrize("url", ["http://[", "http://", "http://127.0.0.1:x", "http://a b"])
def test_an_address_that_is_none_is_not_reached(url: str) -> None:
    with pytest.raises(RemoteError, match="is not reached"):
        ServerClient(Address(url, GOOD)).get("/jobs")


GOOD = "tml-a-key-of-24-characters-or-more"
WEAK = ["", None, "a", 12345678901234567890123456, " " * 40, [GOOD], {"key": GOOD}, True, f"{GOOD} ", f"{GOOD}\n",
        GOOD[:10], f"{GOOD}\u00e9", "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"]


@pytest.mark.parametrize("key", WEAK, ids=str)
def test_a_saved_key_that_anyone_can_guess_is_replaced_and_that_is_said(
    key: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last one is the hash of the empty text by `printf "" | sha256sum`: in a key file it would stand for a key."""
    (tmp_path / ADDRESS).write_text(json.dumps({"url": "http://127.0.0.1:1", "key": key}))
    with caplog.at_level(logging.WARNING):
        found = ServerDir(tmp_path).key()
    assert found.startswith("tml-") and len(found) > 40 and found != key
    assert "A new key is made" in caplog.text
    if not isinstance(key, str) or not re.fullmatch("[!-~]+", key):  # it could not even be sent
        with pytest.raises(OSError, match="the key"):
            read_address(tmp_path)


def test_a_good_saved_key_stays_unless_others_could_have_written_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ADDRESS).write_text(json.dumps({"url": "http://127.0.0.1:1", "key": GOOD}))
    (tmp_path / ADDRESS).chmod(0o644)
    assert ServerDir(tmp_path).key() == GOOD and not caplog.text
    (tmp_path / ADDRESS).chmod(0o666)
    assert ServerDir(tmp_path).key() != GOOD and "can be changed by other users" in caplog.text


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a file away")
def test_a_saved_key_in_a_file_of_another_user_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ADDRESS).write_text(json.dumps({"url": "http://127.0.0.1:1", "key": GOOD}))
    os.chown(tmp_path / ADDRESS, 12345, -1)
    assert ServerDir(tmp_path).key() != GOOD


def test_only_the_owner_reads_what_the_server_writes_also_in_a_folder_that_others_can_open(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path.chmod(0o755)
    (outside := tmp_path_factory.mktemp("outside")).chmod(0o755)
    old = [tmp_path / "jobs/1/run", tmp_path / "models/saved", tmp_path / "jobs/1/log.txt", tmp_path / "server.sqlite"]
    for path in old:  # as an earlier version left them
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch() if path.suffix else path.mkdir()
        path.chmod(0o644 if path.suffix else 0o755)
    (tmp_path / "jobs/1/elsewhere").symlink_to(outside)
    mask = os.umask(0o022)
    try:
        home = ServerDir(tmp_path)
        with home.owned():
            home.announce(Address("http://127.0.0.1:1", home.key()))
            (home.jobs / "2").mkdir()
            (home.jobs / "2/log.txt").write_text("")
            subprocess.run([sys.executable, "-c", "open('of_a_job', 'w')"], cwd=home.jobs / "2", check=True)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(mask)
    kept = [path for path in tmp_path.rglob("*") if not path.is_symlink()]
    assert len(kept) > 8 and not [path for path in kept if path.stat().st_mode & 0o077]
    assert [each.stat().st_mode & 0o777 for each in (tmp_path, outside)] == [0o755, 0o755], "others' stay as they were"


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
