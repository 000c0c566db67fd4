"""Servers of a small model, which are closed after a test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from served import Serving, serving
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


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    """One server for all tests of a file, with the file's ALLOWANCES."""
    made = Server(tmp_path_factory.mktemp("server"), getattr(request.module, "ALLOWANCES", None))
    yield made
    made.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Serving]:
    """A server at an address for all tests of a file, with the file's options SERVED."""
    with serving(tmp_path_factory.mktemp("served"), **getattr(request.module, "SERVED", {})) as made:
        yield made
