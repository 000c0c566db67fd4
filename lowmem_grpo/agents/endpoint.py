"""Trajectories recorded from an endpoint's session or a coroutine's calls, or yielded inside a coroutine."""

import asyncio
from collections.abc import Awaitable, Coroutine
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

from openai.types.chat.chat_completion import Choice

from lowmem_grpo.agents.trajectories import History, Metadata, Metrics, Trajectory
from lowmem_grpo.server.openai.endpoint import Endpoint
from lowmem_grpo.server.openai.sessions import RECORDER, SESSION, RecordedConversation, Session
from lowmem_grpo.server.requests import Limits


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
    """Await a coroutine in a new task, in which these variables have these values."""
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
    """Hand a trajectory to the `capture_yielded_trajectory` that runs this coroutine. Without one do nothing, as in
    ART: the coroutine can also be run alone."""
    taken = YIELDED.get()
    if taken is not None:
        taken.append(trajectory)


async def capture_yielded_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Run a coroutine, and return the last trajectory that it yields (`yield_trajectory`). RuntimeError if none."""
    taken: list[Trajectory] = []
    await run_with(coroutine, {YIELDED: taken})
    if not taken:
        raise RuntimeError("the coroutine ended without yield_trajectory(trajectory)")
    return taken[-1]
