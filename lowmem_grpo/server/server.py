"""An HTTP server: the gate that every request passes, the application, and the server, until Ctrl-C or SIGTERM."""

import errno
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lowmem_grpo.server.errors import CLOSED, NO_RETRY, ChatError, Limits

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")  # whatever name else a page gives this machine, it is not asked for here
WITHOUT_KEY = "/health"
CLOSE_CONNECTION = {"Connection": "close"}  # what is left of a body is not read
READ_AHEAD = 64 * 1024  # bytes of headers that the server holds at most, whatever `Limits` say
CLOSE = 5.0  # seconds in which replies are ended
IDLE = 60  # seconds after which a connection without requests is ended: longer than most steps of training
BACKLOG = 2048  # connections that wait to be taken


class Gate:
    """Starlette's middlewares for host and body answer with a text of their own (400, 413), and a body that is too
    large only once it is asked for; this one answers in OpenAI's form and before a byte of the body is read."""

    def __init__(
        self, app: ASGIApp, holds: Callable[[str], object], limits: Limits, hosts: Sequence[str] | None = HOSTS,
    ) -> None:
        """`holds` says who has a key, which routes read as `request.scope["holder"]`: nobody (false) is refused.
        `hosts` are the names that a request may ask for; None takes any."""
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
        """Raise ChatError for a request that goes no further."""
        headers = Headers(scope=scope)
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) for k, v in headers.raw)
        if size > self.limits.header_bytes:
            raise ChatError(431, f"the request's line and headers have {size} bytes; at most "
                                 f"{self.limits.header_bytes} are taken (header_bytes of Limits)", None,
                            "headers_too_large", CLOSE_CONNECTION)
        name, _, port = (host := headers.get("host", "")).partition(":")  # any port: a tunnel may lead here
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
        """Return `receive`, which raises ChatError as soon as the body is larger than it may be."""
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
        return ChatError(413, f"the request's body has {size}; at most {self.limits.body_bytes} are taken: send fewer "
                              "or shorter messages, or raise body_bytes of Limits", None, "request_too_large",
                         CLOSE_CONNECTION)


def as_response(error: ChatError) -> JSONResponse:
    headers = NO_RETRY if error.status == CLOSED else {}
    return JSONResponse(error.body(), error.status, error.headers | headers)


def make_server_app(
    routers: Mapping[str, APIRouter], holds: Callable[[str], object], limits: Limits, everywhere: bool = False,
    routes: str = "",
) -> ASGIApp:
    """Return an application with routers by their prefixes, behind the gate, which asks `holds` for who has a key.
    `everywhere` takes requests for any name of this machine, not only for loopback. `routes` says which there are."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    for prefix, router in routers.items():
        app.include_router(router, prefix=prefix)
    routes = routes or ", ".join(["GET /health", *(f"those below {prefix}" for prefix in routers)])

    @app.get(WITHOUT_KEY)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.exception_handler(ChatError)
    async def refuse(request: Request, error: ChatError) -> Response:
        return as_response(error)

    @app.exception_handler(HTTPException)
    async def name_routes(request: Request, error: HTTPException) -> Response:
        code = {404: "unknown_route", 405: "method_not_allowed"}.get(error.status_code)
        return as_response(ChatError(error.status_code, f"there is no {request.method} {request.url.path}; there are "
                                                        f"{routes}", None, code, dict(error.headers or {})))

    @app.exception_handler(Exception)  # its client is told nothing of our inside
    async def fail(request: Request, error: Exception) -> Response:
        return as_response(ChatError(500, f"the request failed here ({type(error).__name__}); the program's log says "
                                          "more", None, "internal_error", CLOSE_CONNECTION))

    return Gate(app, holds, limits, None if everywhere else HOSTS)


def is_loopback(host: str) -> bool:
    return host in HOSTS


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens; OSError says what to do where the port cannot be had."""
    # asyncio knows TCP by the last word: else a reply's head waits 40 ms for an acknowledgement before its body is sent
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
    """Return a server for an application that answers until Ctrl-C or SIGTERM, and writes no log of its own."""
    return uvicorn.Server(uvicorn.Config(
        app, http="h11", ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False,
        server_header=False, h11_max_incomplete_event_size=READ_AHEAD, timeout_graceful_shutdown=int(CLOSE),
        timeout_keep_alive=IDLE,
    ))


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM (of systemd, Docker or Slurm) and SIGHUP (of a terminal that closes) leave the block as an error
    does, so that all that is open is closed; then the process ends with 143, as after SIGTERM. A second one, as tools
    such as `timeout` send it, does not disturb the closing. SIGHUP that was ignored before (nohup) stays so.

    A server that runs inside takes SIGTERM itself, ends its replies, and then sends it again."""
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
