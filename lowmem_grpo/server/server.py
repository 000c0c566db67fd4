"""The HTTP server: the gate that checks every request, the application, and a server until Ctrl-C or SIGTERM."""

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from lowmem_grpo.server.requests import CLOSED, NO_RETRY, ChatError, Limits, shown

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")  # others are refused, so that no web page reaches the server by DNS rebinding
WITHOUT_KEY = "/health"
CLOSE_CONNECTION = {"Connection": "close"}  # the rest of the body is not read
READ_AHEAD = 64 * 1024  # most bytes of headers that uvicorn buffers, whatever `Limits` says
CLOSE = 5.0  # seconds that running replies get to finish
IDLE = 60  # seconds until an idle connection is closed: longer than most training steps
BACKLOG = 2048  # connections that wait to be accepted
HEADERS, BODY = 30.0, 300.0  # seconds until a connection is closed whose headers, or body, are not complete
SPARE = 256  # open files that are not for connections
FRESH = 2.0  # seconds for which a connection without a request is not closed for others
OFTEN, MINUTE = 10, 60.0  # lines of one kind that a log gets in a minute


class Gate:
    """The middleware that checks headers, host, key and body size, and answers refusals in OpenAI's format."""

    def __init__(
        self, app: ASGIApp, holds: Callable[[str], object], limits: Limits, hosts: Sequence[str] | None = HOSTS,
    ) -> None:
        """`holds` maps a key to its holder, which routes read as `request.scope["holder"]`; a key without a holder is
        refused. `hosts` are the allowed names in the Host header; None allows any."""
        self.app, self.holds, self.limits, self.hosts = app, holds, limits, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server is made without websockets and lifespan"
        try:
            self.check(scope)
        except ChatError as error:
            await as_response(error)(scope, receive, send)
        else:
            await self.app(scope, self.bounded(receive), send)

    def check(self, scope: Scope) -> None:
        """Raise ChatError if a request's headers, host, key or declared body size are refused."""
        headers = Headers(scope=scope)
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) for k, v in headers.raw)
        if size > self.limits.header_bytes:
            raise ChatError(431, f"the request's line and headers have {size} bytes; at most "
                                 f"{self.limits.header_bytes} are taken (header_bytes of Limits)", None,
                            "headers_too_large", CLOSE_CONNECTION)
        name, _, port = (host := headers.get("host", "")).partition(":")  # any port, for SSH tunnels
        if self.hosts is not None and not (name.lower() in self.hosts and (port or "0").isdigit()):
            raise ChatError(421, f"the request is for the host {host!r}; this endpoint is {' or '.join(self.hosts)}, "
                                 "on this machine only: use its base_url", None, "wrong_host", CLOSE_CONNECTION)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        key = headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        scope["holder"] = self.holds(key)
        if scope["path"] != WITHOUT_KEY and not scope["holder"]:
            raise ChatError(401, "the key is missing or wrong; send the header 'Authorization: Bearer KEY' with the "
                                 "api_key of this endpoint, which is another in each run", None, "invalid_api_key",
                            CLOSE_CONNECTION | {"WWW-Authenticate": "Bearer"})
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self.limits.body_bytes:
            raise self.too_large(f"{int(length)} bytes")

    def bounded(self, receive: Receive) -> Receive:
        """Wrap `receive` so that it raises ChatError as soon as the body exceeds its limit."""
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limits.body_bytes:
                raise self.too_large(f"more than {self.limits.body_bytes} bytes")
            return message

        return counted

    def too_large(self, size: str) -> ChatError:
        return ChatError(413, f"the request's body has {size}; at most {self.limits.body_bytes} are taken: send less "
                              "in one request, or raise body_bytes of Limits (lowmem-grpo serve cannot raise it)", None,
                         "request_too_large", CLOSE_CONNECTION)


def as_response(error: ChatError) -> JSONResponse:
    headers = NO_RETRY if error.status == CLOSED else {}
    return JSONResponse(error.body(), error.status, error.headers | headers)


def routes_text(prefix: str, router: APIRouter) -> str:
    """Return the methods and paths of a router's routes; of more than four, only their prefix."""
    routes = [route for route in router.routes if isinstance(route, APIRoute)]
    if not 0 < len(routes) < 5:
        return f"the routes below {prefix or '/'}"
    return ", ".join(f"{min(route.methods)} {prefix}{route.path.replace(':path', '')}" for route in routes)


def make_server_app(
    routers: Mapping[str, APIRouter], holds: Callable[[str], object], limits: Limits, everywhere: bool = False,
) -> ASGIApp:
    """Return an application of `routers` by prefix, behind a `Gate`. `everywhere` accepts any Host header."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    for prefix, router in routers.items():
        app.include_router(router, prefix=prefix)
    routes = ", ".join(["GET /health", *(routes_text(*each) for each in routers.items() if "{" not in each[0])])

    @app.get(WITHOUT_KEY)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.exception_handler(ChatError)
    async def refuse(request: Request, error: ChatError) -> Response:
        return as_response(error)

    @app.exception_handler(RequestValidationError)
    async def name_parameter(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        words = f"{first['loc'][-1]} is {shown(first['input'])}; {first['msg'].replace('Input should', 'it must')}"
        return as_response(ChatError(400, words, str(first["loc"][-1]), "invalid"))

    @app.exception_handler(HTTPException)
    async def name_routes(request: Request, error: HTTPException) -> Response:
        code = {404: "unknown_route", 405: "method_not_allowed"}.get(error.status_code)
        return as_response(ChatError(error.status_code, f"there is no {request.method} {request.url.path}; there are "
                                                        f"{routes}", None, code, dict(error.headers or {})))

    @app.exception_handler(Exception)  # clients see no internals
    async def fail(request: Request, error: Exception) -> Response:
        return as_response(ChatError(500, f"the request failed here ({type(error).__name__}); the program's log says "
                                          "more", None, "internal_error", CLOSE_CONNECTION))

    return Gate(app, holds, limits, None if everywhere else HOSTS)


def is_loopback(host: str) -> bool:
    return host in HOSTS


def open_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. OSError, with advice, if the port is not available."""
    # asyncio sets TCP_NODELAY only if the protocol is given; without it a reply's body waits 40 ms for an ACK
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        advice = ("another program may have it; take another one, or 0 (port=0, --port 0), which finds a free one"
                  if error.errno in (errno.EADDRINUSE, errno.EACCES) else "name an address of this machine (--host)")
        raise OSError(error.errno, f"cannot have port {port} of {host} ({error.strerror}): {advice}") from error
    return listening


def made_for(app: ASGIApp) -> uvicorn.Server:
    """Return a server that runs an application until Ctrl-C or SIGTERM, and writes no log of requests."""
    for name in ("asyncio", "uvicorn.error"):  # asyncio repeats "too many open files" thousands of times a second
        logging.getLogger(name).addFilter(REPEATS)
    return uvicorn.Server(uvicorn.Config(
        app, http=Connection, ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False,
        server_header=False, h11_max_incomplete_event_size=READ_AHEAD, timeout_graceful_shutdown=int(CLOSE),
        timeout_keep_alive=IDLE,
    ))


class Connection(H11Protocol):
    """A connection whose requests must come in time. If all connections are taken, one that waits for a request gives
    its place away: the oldest. Half of them are for one address, but for this machine's, where proxies and tunnels
    are."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.state: Any = None
        self.timer: asyncio.TimerHandle | None = None
        self.watch()
        here, most = self.client[0] if self.client else LOOPBACK, most_connections()
        others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
        if here != LOOPBACK and sum(each.client is not None and each.client[0] == here for each in others) >= most // 2:
            transport.abort()
        elif len(others) >= most:
            idle = [each for each in others if each.is_idle and self.since - each.since > FRESH]
            min(idle, key=lambda each: each.since, default=self).transport.abort()

    @property
    def is_idle(self) -> bool:
        return self.conn.their_state.__name__ == "IDLE"

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timer is not None:
            self.timer.cancel()

    def watch(self) -> None:
        """Begin the time limit of the part of a request that is awaited now, unless it runs already."""
        if self.conn.their_state is self.state:
            return
        self.state, self.since = self.conn.their_state, self.loop.time()
        if self.timer is not None:
            self.timer.cancel()
        seconds = {"IDLE": HEADERS, "SEND_BODY": BODY}.get(self.state.__name__)  # h11's names
        self.timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


def most_connections() -> int:
    """Return how many connections fit into the files that this process may open."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return BACKLOG
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(files - SPARE, files // 2) if files > 0 else BACKLOG


class Repeats(logging.Filter):
    """Lets at most OFTEN lines of one kind into the log in a MINUTE, and says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[str, str], tuple[float, int]] = {}  # the first of a minute, and the lines since

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.name, str(record.msg)[:200]
        began, lines = self.seen.get(kind, (float("-inf"), 0))
        if record.created - began > MINUTE:
            if lines > OFTEN:
                record.msg = f"{record.msg} ({lines - OFTEN:,} more of these lines were left out)"
            self.seen = {} if len(self.seen) > BACKLOG else self.seen
            began, lines = record.created, 0
        self.seen[kind] = began, lines + 1
        return lines < OFTEN


REPEATS = Repeats()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM, and SIGHUP unless it is ignored (nohup), into SystemExit inside the block, so that cleanup runs and
    the process ends with status 143. A second signal does not interrupt the cleanup. A uvicorn server inside the block
    handles SIGTERM itself, finishes its replies, and raises it again."""
    came: list[int] = []

    def end(number: int, *_: object) -> None:
        if not came:
            came.append(number)
            raise SystemExit(128 + number)

    handlers: dict[int, Callable[..., None]] = {signal.SIGTERM: end}
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = lambda *_: signal.raise_signal(signal.SIGTERM)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
