"""What the task of a rollout carries with it, so that calls in the process are known to be its own."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol


class Recorder(Protocol):
    """What keeps the calls of a rollout."""

    def record(
        self, body: Mapping[str, Any], choices: list[dict[str, Any]], continues: Callable[[str], str | None]
    ) -> None: ...


SESSION: ContextVar[str] = ContextVar("lowmem_grpo_session", default="")  # its name; its turns belong together
RECORDER: ContextVar[Recorder | None] = ContextVar("lowmem_grpo_recorder", default=None)
