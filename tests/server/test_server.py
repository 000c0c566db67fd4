"""The socket of a server, and the signals that end it."""

import signal
import socket

import pytest
from programs import usual_signals

from lowmem_grpo.server.server import ended_by_signals, open_socket


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
