"""Servers of a small model, which are closed after a test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tinker_server import Server

from lowmem_grpo.server.users import Allowances


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts a server over a folder of this name, the first time or anew."""
    started = list[Server]()

    def begin(name: str = "", allowances: Allowances | None = None) -> Server:
        started.append(Server(tmp_path / name, allowances))
        return started[-1]

    yield begin
    for server in started:
        server.close()


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start()
