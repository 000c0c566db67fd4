"""An HTTP server's application, and the server, until Ctrl-C or SIGTERM."""

import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from lowmem_grpo.service.errors import ChatError, Limits
from lowmem_grpo.service.gate import CLOSE_CONNECTION, HOSTS, WITHOUT_KEY, Gate, as_response

READ_AHEAD = 64 * 1024  # bytes of headers that the server holds at most, whatever `Limits` say
CLOSE = 5.0  # seconds in which replies are ended
IDLE = 60  # seconds after which a connection without requests is ended: longer than most steps of training
BACKLOG = 2048  # connections that wait to be taken


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
        raise OSError(error.errno, f"cannot have port {port} of {host} ({error.strerror}): another program may have "
                                   "it; take another one, or 0 (port=0, --port 0), which finds a free one") from error
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
