"""Tools of MCP servers, through the official client library: `pip install lowmem-grpo[mcp]`.

    with mcp_tools(command=["python", "server.py"]) as tools:
        trainer = GRPOTrainer(..., tools=[*tools, my_function])

A session ends with `close` or the `with` statement, or when its tools are garbage collected, or with the program.
"""

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from lowmem_grpo.environments.tools.results import ToolError, ToolOutage, described
from lowmem_grpo.environments.tools.toolbox import Tool
from lowmem_grpo.rewards.calling.background import BackgroundLoop

logger = logging.getLogger(__name__)
CLOSE_SECONDS = 10.0  # for a server to end; the library kills it after 4 s
PACKAGE = "tools of an MCP server need the package mcp: pip install 'mcp>=2.0'"


class MCPTools(list[Tool]):
    """The tools of one server, which can be passed to a Toolbox as functions."""

    def __init__(self, tools: list[Tool], session: "MCPSession") -> None:
        super().__init__(tools)
        self.session = session

    def close(self) -> None:
        self.session.close()

    def __enter__(self) -> "MCPTools":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def mcp_tools(command: Sequence[str] | None = None, url: str | None = None, *, server: Any = None,
              names: Sequence[str] | None = None, prefix: str = "", env: dict[str, str] | None = None,
              start_seconds: float = 60.0) -> MCPTools:
    """Return the tools of a server that `command` starts (stdio), or that listens at `url` (streamable HTTP).

    `server` is anything else that mcp.Client takes: a transport with your own headers, or a server in this process.
    `names` selects tools, all by default; `prefix` is put before each name, for two servers with a tool of the same
    name. `env` holds environment variables for the command, in addition to those that the library passes on.

    Raises ValueError for an unknown name, or unless exactly one server is given; ImportError without the library; and
    ToolOutage if the server does not answer within `start_seconds`.
    """
    sources = [source for source in (command, url, server) if source is not None]
    if len(sources) != 1 or not sources[0] or isinstance(command, str):
        raise ValueError("give one of command=[\"program\", \"argument\", ...], url=\"http://...\" and server=...; "
                         f"got command={command!r}, url={url!r}, server={server!r}")
    try:
        from mcp import Client, StdioServerParameters
    except ImportError as error:
        raise ImportError(PACKAGE) from error
    source: Any = sources[0]
    if command is not None:
        source = StdioServerParameters(command=command[0], args=[*command[1:]], env=env)
    session = MCPSession(Client(source), " ".join(command) if command else str(sources[0]))
    offered = {tool.name: tool for tool in session.open(start_seconds)}
    if unknown := [name for name in names or () if name not in offered]:
        session.close()
        raise ValueError(f"{session.name} has no tool {unknown[0]!r}; it has {', '.join(offered)}")
    return MCPTools([tool_of(offered[name], prefix, session) for name in names or offered], session)


def tool_of(offered: Any, prefix: str, session: "MCPSession") -> Tool:
    name = prefix + offered.name

    async def call(**arguments: Any) -> str:
        return await session.call(offered.name, arguments)

    call.__qualname__ = name  # the name in the message of a LateError
    return Tool(name, {"type": "function", "function": {
        "name": name, "description": offered.description or "", "parameters": offered.input_schema}}, call)


class MCPSession:
    """The session of one MCP client, in its own event loop."""

    def __init__(self, client: Any, name: str) -> None:
        self.name, self.client, self.loop = name, client, BackgroundLoop(f"mcp {name}")

    def open(self, seconds: float) -> list[Any]:
        """Start the session and return the server's tools. ToolOutage if it fails, or takes more than `seconds`."""
        stop, ready = asyncio.Event(), Future[tuple[asyncio.Task[Any], list[Any]]]()
        ended = self.loop.submit(partial(serve, self.client, stop, ready))
        self.close = weakref.finalize(self, end, self.loop, stop, ended)
        try:
            self.serving, tools = ready.result(seconds)
        except TimeoutError as error:
            self.close()
            raise ToolOutage(f"the MCP server {self.name} did not answer within {seconds:g} s") from error
        except Exception as error:
            self.close()
            raise ToolOutage(f"the MCP server {self.name} does not work: {innermost(error)}") from error
        return tools

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a tool's result. ToolError if the tool fails, ToolOutage if the server does."""
        if self.serving.done():
            raise ToolOutage(f"the session with the MCP server {self.name} has ended")
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            call = partial(self.client.call_tool, name, arguments)
            result = await asyncio.wrap_future(self.loop.submit(partial(answer_to, call, self.serving)))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise ToolOutage(f"the MCP server {self.name} is gone: {error.message}") from error
            raise ToolError(error.message) from error
        except Exception as error:
            raise ToolOutage(f"the MCP server {self.name} does not work: {innermost(error)}") from error
        return text_of(result)


async def serve(client: Any, stop: asyncio.Event, ready: "Future[tuple[asyncio.Task[Any], list[Any]]]") -> None:
    """Keep a session open until `stop` is set. A method would keep the MCPSession from being garbage collected."""
    try:
        async with client:
            task: Any = asyncio.current_task()
            ready.set_result((task, await all_tools(client)))
            await stop.wait()
    except BaseException as error:
        if not ready.done():
            ready.set_exception(error)
        logger.debug("the session with an MCP server ended with %s", innermost(error))  # calls report it themselves
        if not isinstance(error, Exception):
            raise


async def answer_to(call: Callable[[], Coroutine[Any, Any, Any]], serving: "asyncio.Task[Any]") -> Any:
    """Return the result of a call. RuntimeError if the session ends first, which the call itself may not notice."""
    answer = asyncio.ensure_future(call())
    try:
        await asyncio.wait([answer, serving], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise RuntimeError("its session has ended")
        return await answer
    finally:
        answer.cancel()


async def all_tools(client: Any) -> list[Any]:
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def end(loop: BackgroundLoop, stop: asyncio.Event, ended: "Future[None]") -> None:
    if loop.loop is None or ended.done():
        return
    loop.loop.call_soon_threadsafe(stop.set)
    if threading.current_thread() is not loop.thread:  # garbage collection may run in the loop's own thread
        wait([ended], CLOSE_SECONDS)
        ended.cancel()


def text_of(result: Any) -> str:
    """Return the text of an mcp.types.CallToolResult. ToolError for a failure, and for images and sound."""
    parts = [block.text for block in result.content if block.type == "text"]
    if result.is_error:
        raise ToolError("\n".join(parts) or "the tool failed without a message")
    if other := {block.type for block in result.content} - {"text"}:
        raise ToolError(f"the tool returned content other than text: {', '.join(sorted(other))}")
    return "\n".join(parts)


def innermost(error: BaseException) -> str:
    """Return the first error inside nested exception groups as text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return described(error)
