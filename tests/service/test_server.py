"""The socket of a server."""

import socket

from lowmem_grpo.service.server import open_socket


def test_a_reply_is_sent_at_once() -> None:
    """asyncio switches Nagle's delay off for sockets that say that they are TCP, and for no others."""
    found = open_socket("127.0.0.1", 0)
    assert found.proto == socket.IPPROTO_TCP
    found.close()
