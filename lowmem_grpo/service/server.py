"""An HTTP server in the main thread of a program, until Ctrl-C or SIGTERM."""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp

from lowmem_grpo.service.error_replies import answer_errors
from lowmem_grpo.service.gate import HOSTS, Gate
from lowmem_grpo.service.limits import Limits
from lowmem_grpo.service.users import Users

READ_AHEAD = 64 * 1024  # bytes of headers that the server holds at most, whatever `Limits` say
CLOSE = 5.0  # seconds in which replies are ended
IDLE = 60  # seconds after which a connection without requests is ended: longer than most steps of training
BACKLOG = 2048  # connections that wait to be taken


def make_server_app(routers: dict[str, APIRouter], users: Users, limits: Limits, everywhere: bool = False) -> ASGIApp:
    """An application with routers by their prefixes, behind the gate. `everywhere` takes requests for any name of this
    machine, not only for loopback."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    for prefix, router in routers.items():
        app.include_router(router, prefix=prefix)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    answer_errors(app, ", ".join(["GET /health", *(f"those below {prefix}" for prefix in routers)]))
    return Gate(app, users, limits, None if everywhere else HOSTS)


def is_loopback(host: str) -> bool:
    return host in HOSTS


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; OSError says what to do where the port cannot be had."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # by which asyncio knows TCP: else a
    # reply's head waits 40 ms for the client's acknowledgement before its body is sent
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        raise OSError(error.errno, f"the server cannot have port {port} of {host} ({error.strerror}): another program "
                                   "may have it; give another one with --port, or 0 for a free one") from error
    return found


def made_for(app: ASGIApp) -> uvicorn.Server:
    """What answers by an application until Ctrl-C or SIGTERM, and writes no log of its own."""
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
