"""An address on this machine where the model answers as OpenAI's servers do, for as long as the program runs."""

import asyncio
import atexit
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from lowmem_grpo.server.errors import Limits
from lowmem_grpo.server.openai.chat_handler import ChatHandler
from lowmem_grpo.server.openai.routes import Completions, listed_routes, openai_router
from lowmem_grpo.server.openai.sessions import OpenSessions, Session
from lowmem_grpo.server.server import CLOSE, HOSTS, LOOPBACK, made_for, make_server_app, open_socket
from lowmem_grpo.server.users import Users

START = 30.0  # seconds in which the server comes up
S = TypeVar("S", bound=Session)


class Endpoint:
    """Serves a ChatHandler at `base_url`, in a thread of this process, to whoever on this machine has `api_key`. It
    ends with the program, or with `close`, which answers what waits with 503; Ctrl-C stays with the main thread."""

    def __init__(
        self, chat: ChatHandler, *, port: int = 0, host: str = LOOPBACK, limits: Limits | None = None,
        owned: Sequence[Callable[[], object]] = (),
    ) -> None:
        """`port` 0 takes a free one. `owned` is called at `close`, such as that of what `chat` works with. ValueError
        for another host or what is no port, OSError for a port that cannot be had."""
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
        self.server = made_for(make_server_app(routers, Users(self.api_key), self.limits,
                                               routes=listed_routes(routers)))
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
        """Return an address whose calls are recorded, one for each rollout. RuntimeError for too many, or once
        closed."""
        return self.start_session(Session)

    def start_session(self, kind: type[S]) -> S:
        """A session of this class, whose address answers from now on."""
        if self.closed:
            raise RuntimeError("the endpoint is closed; begin a session before it is")
        session = kind(self.address, self.api_key, self.limits, self.sessions.forget)
        self.sessions.add(session)
        return session

    def close(self) -> None:
        """Answers what waits with 503, and ends. Twice is as once."""
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
    """Raise ValueError for a host that is not this machine only, and for what is no port."""
    if host not in HOSTS:
        raise ValueError(f"host is {host!r}; an endpoint answers on {LOOPBACK} only, since whoever reaches it uses "
                         "this machine. Leave host out, and reach it from elsewhere through a tunnel: "
                         "ssh -L 8000:127.0.0.1:PORT MACHINE")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 2**16:
        raise ValueError(f"port is {port!r}; it must be a whole number from 0 to 65535, where 0 takes a free one")
