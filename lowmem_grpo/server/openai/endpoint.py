"""`Endpoint`: an OpenAI-compatible HTTP server for the model in this process, on a loopback address."""

import asyncio
import atexit
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from lowmem_grpo.server.openai.chat_handler import ChatHandler
from lowmem_grpo.server.openai.routes import Completions, openai_router
from lowmem_grpo.server.openai.sessions import OpenSessions, Session
from lowmem_grpo.server.requests import Limits
from lowmem_grpo.server.server import CLOSE, HOSTS, LOOPBACK, made_for, make_server_app, open_socket
from lowmem_grpo.server.users import Users

ROUTES = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models and GET /health"
START = 30.0  # seconds that the server may need to start
S = TypeVar("S", bound=Session)


class Endpoint:
    """An HTTP server for a ChatHandler at `base_url`, in a thread of this process, for clients on this machine that
    have `api_key`. It ends with the program or with `close`; the main thread still handles Ctrl-C."""

    def __init__(
        self, chat: ChatHandler, *, port: int = 0, host: str = LOOPBACK, limits: Limits | None = None,
        owned: Sequence[Callable[[], object]] = (),
    ) -> None:
        """`port` 0 picks a free port. `close` calls the functions in `owned`, such as the `close` of chat's worker.
        ValueError for a host that is not loopback or an invalid port, OSError if the port is not available."""
        self.chat, self.limits = chat, Limits() if limits is None else limits
        check_address(host, port)
        self.socket = open_socket(LOOPBACK, port)
        self.api_key = secrets.token_urlsafe(32)
        self.address = f"http://{LOOPBACK}:{self.socket.getsockname()[1]}"
        self.base_url = f"{self.address}/v1"
        self.closing, self.sessions, self.owned = asyncio.Event(), OpenSessions(self.limits), owned
        self.completions = Completions(lambda holder: chat, self.sessions, self.limits, self.closing)
        routers = {"/v1": openai_router(self.completions),
                   "/s/{session}/v1": openai_router(self.completions, texts=False)}
        self.server = made_for(make_server_app(routers, Users(self.api_key), self.limits, routes=ROUTES))
        self.lock, self.closed = threading.Lock(), False
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()), name="lowmem-grpo endpoint",
                                       daemon=True)
        self.thread.start()
        self.wait_until_it_answers()
        atexit.register(self.close)

    async def serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.server.serve(sockets=[self.socket])

    def wait_until_it_answers(self) -> None:
        until = time.monotonic() + START
        while not self.server.started:
            if not self.thread.is_alive() or time.monotonic() > until:
                self.socket.close()
                raise RuntimeError(f"the endpoint did not start within {START:g} seconds; the log says why")
            time.sleep(0.005)

    def session(self) -> Session:
        """Open a session for one rollout: an address that records its calls. RuntimeError if too many sessions are
        open, or after `close`."""
        return self.start_session(Session)

    def start_session(self, kind: type[S]) -> S:
        """Open a session of this class, and return it; its address answers at once."""
        if self.closed:
            raise RuntimeError("the endpoint is closed; begin a session before it is")
        session = kind(self.address, self.api_key, self.limits, self.sessions.forget)
        self.sessions.add(session)
        return session

    def close(self) -> None:
        """Answer pending requests with 503, stop the server, and close `owned`. A second call does nothing."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
        atexit.unregister(self.close)
        self.loop.call_soon_threadsafe(self.closing.set)
        self.server.should_exit = True
        if threading.current_thread() is not self.thread:
            self.thread.join(CLOSE + 5)
        for close in self.owned:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def check_address(host: str, port: int) -> None:
    """Raise ValueError for a host that is not loopback, or an invalid port."""
    if host not in HOSTS:
        raise ValueError(f"host is {host!r}; an endpoint answers on {LOOPBACK} only, since whoever reaches it uses "
                         "this machine. Leave host out, and reach it from elsewhere through a tunnel: "
                         "ssh -L 8000:127.0.0.1:PORT MACHINE")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 2**16:
        raise ValueError(f"port is {port!r}; it must be a whole number from 0 to 65535, where 0 takes a free one")
