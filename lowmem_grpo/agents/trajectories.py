"""What a rollout in plain Python returns: the messages of an agent, and what the whole was worth.

The tokens are not here. A `Choice` that came from `model.openai_client()` names the turn that it was made of (`turn`),
and the turn holds the ids as the engine returned them.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, Field

Metadata = float | int | str | bool | None


class History(BaseModel):
    """One conversation of a rollout."""

    messages_and_choices: list[Choice | dict[str, Any]] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = None

    def messages(self) -> list[dict[str, Any]]:
        """All as messages, as they are sent to a model."""
        return [message_of(one) for one in self.messages_and_choices]


class Trajectory(History):
    """One rollout: its conversation, further ones of the same rollout, and the reward that all of them share."""

    additional_histories: list[History] = Field(default_factory=list)
    reward: float = 0.0
    initial_policy_version: int | None = None
    final_policy_version: int | None = None
    metrics: dict[str, float | int | bool] = Field(default_factory=dict)
    metadata: dict[str, Metadata] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)
    start_time: datetime = Field(default_factory=datetime.now, exclude=True)

    @property
    def histories(self) -> list[History]:
        """All conversations, the first one first."""
        return [self, *self.additional_histories]


class FailedRollout(BaseModel):
    """What a rollout raised."""

    type: str
    message: str
    traceback: str


class TrajectoryGroup(BaseModel):
    """Rollouts of one task, which are compared with each other; and what those raised that failed."""

    trajectories: list[Trajectory]
    exceptions: list[FailedRollout] = Field(default_factory=list)
    metadata: dict[str, Metadata] = Field(default_factory=dict)
    metrics: dict[str, float | int | bool] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)


def message_of(given: Choice | dict[str, Any]) -> dict[str, Any]:
    """A choice as the assistant's message; a message as it is, with a text as content."""
    if not isinstance(given, Choice):
        return {**given, "content": given.get("content") or ""}
    message: dict[str, Any] = {"role": "assistant", "content": given.message.content or ""}
    calls = [call.model_dump(mode="json") for call in given.message.tool_calls or []]
    return message | ({"tool_calls": calls} if calls else {})
