"""Trajectories that nobody writes down: of the calls that a coroutine makes, or handed over from deep inside of it."""

from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

from lowmem_grpo.agents.endpoint import RolloutSession
from lowmem_grpo.agents.trajectories import Trajectory
from lowmem_grpo.service.errors import Limits
from lowmem_grpo.service.rollouts import RECORDER, SESSION


class Capture:
    """The trajectory of a coroutine whose calls are recorded."""

    def __init__(self) -> None:
        self.trajectory = Trajectory()
        self.session = RolloutSession("model.openai_client()", "", Limits(), lambda name: None)

    def refresh(self) -> Trajectory:
        """The trajectory with all that has been said so far."""
        if self.session.replies:
            said = self.session.trajectory()
            for name in ("messages_and_choices", "tools", "additional_histories"):
                setattr(self.trajectory, name, getattr(said, name))
        return self.trajectory


CAPTURE: ContextVar[Capture | None] = ContextVar("lowmem_grpo_capture", default=None)
YIELDED: ContextVar[list[Trajectory] | None] = ContextVar("lowmem_grpo_yielded", default=None)


@contextmanager
def set_to(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Inside, the variable has this value; afterwards it is as before."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def auto_trajectory(*, required: bool = False) -> Trajectory | None:
    """The trajectory of the coroutine that `capture_auto_trajectory` runs, with all calls so far; to set its reward.
    Outside of one None, or RuntimeError if it is required."""
    capture = CAPTURE.get()
    if capture is not None:
        return capture.refresh()
    if required:
        raise RuntimeError("there is no auto trajectory here: run this coroutine with capture_auto_trajectory(...)")
    return None


async def capture_auto_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """The trajectory of all calls that a coroutine makes through `model.openai_client()` of a model in training; a new
    conversation becomes a further history. Other clients are not seen: for these, see `model.serve()`.

    Raises ValueError if it made no call.
    """
    capture = Capture()
    with ExitStack() as stack:
        for variable, value in ((CAPTURE, capture), (RECORDER, capture.session), (SESSION, uuid4().hex)):
            stack.enter_context(set_to(variable, value))
        await coroutine
    if not capture.session.replies:
        raise ValueError("the coroutine called no model through model.openai_client(), so that there is nothing to "
                         "train on; what another client asks is recorded at an address of model.serve().session()")
    return capture.refresh().finish()


def yield_trajectory(trajectory: Trajectory) -> None:
    """Hand a trajectory to the `capture_yielded_trajectory` that runs this coroutine. RuntimeError without one."""
    taken = YIELDED.get()
    if taken is None:
        raise RuntimeError("nobody takes this trajectory: run this coroutine with capture_yielded_trajectory(...)")
    taken.append(trajectory)


async def capture_yielded_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """The last trajectory that a coroutine hands over with `yield_trajectory`. RuntimeError without one."""
    taken: list[Trajectory] = []
    with set_to(YIELDED, taken):
        await coroutine
    if not taken:
        raise RuntimeError("the coroutine ended without yield_trajectory(trajectory)")
    return taken[-1]
