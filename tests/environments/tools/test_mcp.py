"""Tools of MCP servers: found, called, failed and ended, against real servers over standard input and output, and over
HTTP."""

import asyncio
import gc
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import program
from scripted import run_tool
from template_tokenizers import tiny_with

from lowmem_grpo.environments.tools import mcp as tools_of_mcp
from lowmem_grpo.environments.tools.mcp import PACKAGE, MCPTools, mcp_tools
from lowmem_grpo.environments.tools.results import ToolError, ToolOutage
from lowmem_grpo.environments.tools.toolbox import Toolbox

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the package mcp is not installed")
SERVER = '''
import asyncio, os, sys
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("shop")
meetings = {calls: asyncio.Barrier(calls) for calls in (1, 2, 4)}

@server.tool()
def price(what: str, count: int = 1) -> str:
    """The price of something."""
    return f"{count} {what} for {count * 3} euros"

@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ValueError(why)

@server.tool()
async def wait(calls: int) -> dict:
    """Wait until so many calls wait."""
    await meetings[calls].wait()
    return {"pid": os.getpid()}

@server.tool()
def picture() -> Image:
    """A picture."""
    return Image(data=b"x", format="png")

@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)

server.run(*sys.argv[1:2], **{"port": int(port) for port in sys.argv[2:]})
'''


@pytest.fixture
def server(tmp_path: Path) -> list[str]:
    (tmp_path / "server.py").write_text(SERVER)
    return [sys.executable, str(tmp_path / "server.py")]


def start(server: list[str], **options: object) -> MCPTools:
    return mcp_tools(server, env={"PYTHONPATH": os.pathsep.join(sys.path)}, **options)


@pytest.fixture
def url(server: list[str]) -> Iterator[str]:
    """Where the same server listens: at a port that the system gives it, of which it tells."""
    with program(*server, "streamable-http", "0", stderr=subprocess.STDOUT,
                 env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as process:
        lines = iter(process.stdout or ())
        found = next(filter(None, (re.search(r"running on (http://127\.0\.0\.1:\d+)", line) for line in lines)))
        threading.Thread(target=list, args=(lines,), daemon=True).start()  # else it would wait until they are read
        yield f"{found[1]}/mcp"


def process_of(box: Toolbox, wait: str = "wait") -> int:
    return int(run_tool(box, wait, calls=1).partition('"pid":')[2].strip(" }\n"))


def has_ended(process: int) -> bool:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def side_by_side(box: Toolbox) -> str:
    """The answer of a call after four that wait for each other and one that was given up."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: run_tool(box, "wait", calls=4), range(4)))
    with pytest.raises(TimeoutError, match=r"wait took more than 0\.1 s"):
        run_tool(box, "wait", 0.1, calls=2)
    return run_tool(box, "price", what="tea")


def test_the_tools_of_a_server_are_tools_like_others_and_end_with_it(server: list[str]) -> None:
    with start(server) as tools:
        box = Toolbox(tools, tiny_with("qwen3"), 256)
        assert list(box.tools) == ["price", "fail", "wait", "picture", "leave"]
        assert box.schemas[0]["function"]["description"] == "The price of something."
        assert box.schemas[0]["function"]["parameters"]["properties"]["count"]["type"] == "integer"
        assert run_tool(box, "price", what="tea", count=2) == "2 tea for 6 euros"
        for name, arguments, why in (("price", {"what": 3}, "error: price: what must be string, got 3"),
                                     ("fail", {"why": "x"}, "Error executing tool fail"),
                                     ("picture", {}, "content other than text: image")):
            with pytest.raises(ToolError, match=why):
                run_tool(box, name, **arguments)
        process = process_of(box)
    assert has_ended(process)
    with pytest.raises(ToolOutage, match=r"session with the MCP server .* has ended"):
        run_tool(box, "price", what="tea")


@pytest.mark.slow
def test_a_server_that_listens_at_a_url_gives_its_tools_and_outlives_the_session(url: str) -> None:
    with mcp_tools(url=url) as tools:
        box = Toolbox(tools, tiny_with("qwen3"), 64)
        assert list(box.tools) == ["price", "fail", "wait", "picture", "leave"]
        assert side_by_side(box) == "1 tea for 3 euros"
        with pytest.raises(ToolError, match="Error executing tool fail"):
            run_tool(box, "fail", why="x")
    with pytest.raises(ToolOutage, match=r"session with the MCP server http://127\.0\.0\.1:\d+/mcp has ended"):
        run_tool(box, "price", what="tea")
    with mcp_tools(url=url, names=["leave", "price"]) as tools:  # it still listens
        box = Toolbox(tools, tiny_with("qwen3"), 64)
        for name, arguments in (("leave", {}), ("price", {"what": "tea"})):
            with pytest.raises(ToolOutage, match="the MCP server"):
                run_tool(box, name, **arguments)


def test_a_url_at_which_no_server_answers_says_so(url: str) -> None:
    with pytest.raises(ToolOutage, match=r"/elsewhere does not work: .*Not Found"):
        mcp_tools(url=url.replace("/mcp", "/elsewhere"))
    with socket.socket() as deaf, pytest.raises(ToolOutage, match="does not work: ConnectError"):
        deaf.bind(("127.0.0.1", 0))
        mcp_tools(url=f"http://127.0.0.1:{deaf.getsockname()[1]}/mcp")


def test_a_server_that_is_gone_is_an_outage_and_not_the_policys_failure(server: list[str]) -> None:
    with start(server) as tools:
        box = Toolbox(tools, tiny_with("qwen3"), 64)
        for name, arguments in (("leave", {}), ("price", {"what": "tea"})):
            with pytest.raises(ToolOutage, match="the MCP server"):
                run_tool(box, name, **arguments)


def test_a_call_that_a_dying_session_never_answers_is_an_outage_and_is_not_waited_for() -> None:
    class Dying:
        """A client whose session ends while a call waits, which does not notice it."""

        async def __aenter__(self) -> None:
            self.called = asyncio.Event()
            self.death = asyncio.ensure_future(self.die())

        async def die(self) -> None:
            await self.called.wait()
            session.serving.cancel()

        async def __aexit__(self, *_: object) -> None:
            pass

        async def list_tools(self) -> Any:
            return SimpleNamespace(tools=[], next_cursor=None)

        async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
            self.called.set()
            await asyncio.Event().wait()

    session = tools_of_mcp.MCPSession(Dying(), "dying")
    session.open(60)
    with pytest.raises(ToolOutage, match="the MCP server dying does not work: RuntimeError: its session has"):
        asyncio.run(asyncio.wait_for(session.call("price", {}), 60))
    with pytest.raises(ToolOutage, match="the session with the MCP server dying has ended"):
        asyncio.run(session.call("price", {}))


@pytest.mark.slow
def test_a_session_ends_when_nothing_holds_its_tools(server: list[str]) -> None:
    box = Toolbox([*start(server, names=["wait"], prefix="a_")], tiny_with("qwen3"), 64)
    assert list(box.tools) == ["a_wait"]
    process = process_of(box, "a_wait")
    del box
    gc.collect()
    assert has_ended(process)


def test_a_server_that_does_not_start_or_answer_says_so(server: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ToolOutage, match=r"/no/such/program does not work: .*No such file"):
        mcp_tools(["/no/such/program"])
    with pytest.raises(ToolOutage, match="does not work"):
        mcp_tools([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(ValueError, match="has no tool 'prise'; it has price, fail"):
        start(server, names=["prise"])
    monkeypatch.setattr("lowmem_grpo.environments.tools.mcp.CLOSE_SECONDS", 0.1)
    with pytest.raises(ToolOutage, match=r"did not answer within 0\.5 s"):
        mcp_tools([sys.executable, "-c", "import sys; sys.stdin.read()"], start_seconds=0.5)


@pytest.mark.parametrize("given", [{}, {"command": ["a"], "url": "http://b"}, {"command": "a b"}, {"command": []}])
def test_one_server_is_named_in_one_way(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="give one of command="):
        mcp_tools(**given)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ImportError, match=PACKAGE.replace("(", r"\(")):
        mcp_tools(["a"])
