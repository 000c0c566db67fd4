"""`Endpoint`: an OpenAI-compatible HTTP server on loopback; and trajectories recorded from an agent's calls."""

import asyncio
import atexit
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from typing import Any, Self, TypeVar
from uuid import uuid4

from openai.types.chat.chat_completion import Choice

from lowmem_grpo.agents.trajectories import History, Metadata, Metrics, Trajectory
from lowmem_grpo.server.openai.chat_handler import ChatHandler
from lowmem_grpo.server.openai.routes import Completions, openai_router
from lowmem_grpo.server.openai.sessions import RECORDER, SESSION, OpenSessions, RecordedConversation, Session
from lowmem_grpo.server.requests import Limits
from lowmem_grpo.server.server import CLOSE, HOSTS, LOOPBACK, made_for, make_server_app, open_socket
from lowmem_grpo.server.users import Users

START = 30.0  # seconds that the server may need to start
S = TypeVar("S", bound=Session)


class Endpoint:
    """An HTTP server at `base_url`, in a thread of this process, for clients on this machine that have `api_key`. It
    ends with the program or with `close`."""

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
        self.server = made_for(make_server_app(routers, Users(self.api_key), self.limits))
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


class RolloutSession(Session):
    """The recorded calls of one rollout, which make up its trajectory."""

    def trajectory(
        self, reward: float = 0.0, metrics: Metrics | None = None, metadata: dict[str, Metadata] | None = None,
        logs: list[str] | None = None,
    ) -> Trajectory:
        """Return this session's conversations as histories of one trajectory. ValueError if nothing was recorded."""
        histories = list(map(history_of, self.conversations()))
        if not histories:
            raise ValueError("nothing was said in this session, so that there is nothing to train on: the agent must "
                             f"call {self.base_url} (base_url of the session, not that of the endpoint), with the name "
                             "of the model that is trained, and get a reply")
        first, *others = histories
        return Trajectory(**dict(first), additional_histories=others, reward=reward, metrics=metrics or {},
                          metadata=metadata or {}, logs=logs or [])


class AgentEndpoint(Endpoint):
    """The endpoint for rollouts that `model.serve()` returns."""

    def session(self) -> RolloutSession:
        """Open an address for one rollout: a context manager with `base_url`, `api_key` and `trajectory`."""
        return self.start_session(RolloutSession)


def history_of(conversation: RecordedConversation) -> History:
    entries = conversation.messages_and_choices
    said: list[Any] = [Choice.model_validate(entry) if "turn" in entry else entry for entry in entries]
    return History(messages_and_choices=said, tools=conversation.tools)


class Capture:
    """The trajectory of a coroutine, with the session that records its calls."""

    def __init__(self) -> None:
        self.trajectory = Trajectory()
        self.session = RolloutSession("model.openai_client()", "", Limits(), lambda name: None)

    def refresh(self) -> Trajectory:
        """Return the trajectory, updated with all calls so far."""
        if self.session.replies:
            said = self.session.trajectory()
            for name in ("messages_and_choices", "tools", "additional_histories"):
                setattr(self.trajectory, name, getattr(said, name))
        return self.trajectory


CAPTURE: ContextVar[Capture | None] = ContextVar("lowmem_grpo_capture", default=None)
YIELDED: ContextVar[list[Trajectory] | None] = ContextVar("lowmem_grpo_yielded", default=None)


async def run_with(coroutine: Awaitable[Any], values: dict[ContextVar[Any], Any]) -> None:
    """Await a coroutine in a new task, in which context variables have these values."""
    async def run() -> None:
        for variable, value in values.items():
            variable.set(value)
        await coroutine

    await asyncio.create_task(run())


def auto_trajectory(*, required: bool = False) -> Trajectory | None:
    """Return the trajectory so far of the coroutine that `capture_auto_trajectory` runs, to set its reward. Outside of
    such a coroutine return None, or raise RuntimeError if `required`."""
    capture = CAPTURE.get()
    if capture is not None:
        return capture.refresh()
    if required:
        raise RuntimeError("there is no auto trajectory here: run this coroutine with capture_auto_trajectory(...)")
    return None


async def capture_auto_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Run a coroutine, and return the trajectory of all its calls through `model.openai_client()`, each new
    conversation as a further history; other clients are recorded only by `model.serve()`. ValueError without a call."""
    capture = Capture()
    await run_with(coroutine, {CAPTURE: capture, RECORDER: capture.session, SESSION: uuid4().hex})
    if not capture.session.replies:
        raise ValueError("the coroutine called no model through model.openai_client(), so that there is nothing to "
                         "train on; what another client asks is recorded at an address of model.serve().session()")
    return capture.refresh().finish()


def yield_trajectory(trajectory: Trajectory) -> None:
    """Hand a trajectory to the `capture_yielded_trajectory` that runs this coroutine; without one, do nothing."""
    taken = YIELDED.get()
    if taken is not None:
        taken.append(trajectory)


async def capture_yielded_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Run a coroutine, and return the last trajectory that it yields (`yield_trajectory`). RuntimeError without one."""
    taken: list[Trajectory] = []
    await run_with(coroutine, {YIELDED: taken})
    if not taken:
        raise RuntimeError("the coroutine ended without yield_trajectory(trajectory)")
    return taken[-1]
