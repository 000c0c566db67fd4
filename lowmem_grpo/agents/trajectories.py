"""The results of rollouts: an agent's messages and its reward. A choice's `turn` names its sampled tokens."""

import copy
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Any, Self, TypeVar

from openai.types.chat.chat_completion import ChatCompletionMessage, Choice
from pydantic import BaseModel, ConfigDict, Field, InstanceOf

from lowmem_grpo.agents.progress import CURRENT, Progress, described, together

Copied = TypeVar("Copied", bound=BaseModel)
Metadata = float | int | str | bool | None
Metrics = dict[str, float | int | bool]


def with_own_containers(copied: Copied) -> Copied:
    """Return the shallow copy `copied` after copying its lists and dictionaries too, as ART's groups do."""
    for name, value in vars(copied).items():
        vars(copied)[name] = copy.copy(value) if isinstance(value, list | dict) else value
    return copied


class History(BaseModel):
    """One conversation of a rollout."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")  # NaN is read back as it was

    messages_and_choices: list[Choice | dict[str, Any] | InstanceOf[ChatCompletionMessage]] = Field(
        default_factory=list)
    tools: list[dict[str, Any]] | None = None

    def __copy__(self) -> Self:
        return with_own_containers(super().__copy__())

    def messages(self) -> list[dict[str, Any]]:
        """Return messages and choices as plain messages, as they are sent to a model."""
        return [message_of(entry) for entry in self.messages_and_choices]


class Trajectory(History):
    """One rollout: its conversation, further ones of the same rollout, and the reward that all of them share."""

    additional_histories: list[History] = Field(default_factory=list)
    reward: float = 0.0
    initial_policy_version: int | None = None
    final_policy_version: int | None = None
    metrics: Metrics = Field(default_factory=dict)
    metadata: dict[str, Metadata] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)
    start_time: datetime = Field(default_factory=datetime.now, exclude=True)

    @property
    def histories(self) -> list[History]:
        return [self, *self.additional_histories]

    def log(self, message: str) -> None:
        self.logs.append(message)

    def finish(self) -> "Trajectory":
        """Set the metric `duration`, the seconds since the start; returns self."""
        self.metrics["duration"] = (datetime.now() - self.start_time).total_seconds()
        return self

    @asynccontextmanager
    async def track_duration(self, metric_name: str) -> AsyncIterator[None]:
        """Add the seconds of the enclosed block to the metric NAME_duration."""
        began, name = time.monotonic(), f"{metric_name}_duration"
        try:
            yield
        finally:
            self.metrics[name] = self.metrics.get(name, 0.0) + time.monotonic() - began

    def count_tokens(self) -> None:
        """Set the metric `completion_tokens` to the tokens of all choices, if every choice gives its number."""
        choices = [entry for history in self.histories for entry in history.messages_and_choices
                   if isinstance(entry, Choice)]
        counts = list(map(tokens_of, choices))
        if counts and all(counts):
            self.metrics["completion_tokens"] = sum(count or 0 for count in counts)

    def numbers(self) -> dict[str, float]:
        """Return the reward and the metrics. TypeError for a value that is not a number."""
        return {name: as_number(name, value) for name, value in {"reward": self.reward, **self.metrics}.items()}

    def for_logging(self) -> dict[str, Any]:
        """Return the trajectory as plain data; each message has `trainable`, true for choices."""
        messages = [message | {"trainable": isinstance(entry, Choice)}
                    for entry, message in zip(self.messages_and_choices, self.messages(), strict=True)]
        return {**self.model_dump(exclude={"messages_and_choices", "additional_histories"}), "messages": messages}

    def __str__(self) -> str:
        return f"Trajectory(reward={self.reward}, metrics={self.metrics}, metadata={self.metadata})"


class FailedRollout(BaseModel):
    """The error that a rollout raised."""

    type: str
    message: str
    traceback: str


class Grouped(type(BaseModel)):  # type: ignore[misc]
    """A metaclass that makes `TrajectoryGroup(...)` awaitable if any of the given rollouts has not ended."""

    def __call__(cls, trajectories: Iterable[Any] = (), **options: Any) -> Any:
        members = members_of(trajectories)
        make = partial(super().__call__, **options)
        return PendingGroup(members, make) if any(map(is_awaitable, members)) else make(members)


class TrajectoryGroup(BaseModel, metaclass=Grouped):
    """The rollouts of one task, which are compared with each other, and the errors of those that failed.

    Members are trajectories, errors, or rollouts that have not ended: with any of the latter, `await
    TrajectoryGroup(...)` returns the group. Anything else counts as a failed rollout. The given order is kept."""

    model_config = History.model_config

    trajectories: list[Trajectory]
    exceptions: list[FailedRollout] = Field(default_factory=list)
    metadata: dict[str, Metadata] = Field(default_factory=dict)
    metrics: Metrics = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)

    def __init__(
        self, trajectories: Iterable[Any] = (), *, exceptions: Iterable[Any] = (),
        metadata: dict[str, Metadata] | None = None, metrics: Metrics | None = None, logs: list[str] | None = None,
    ) -> None:
        members = members_of(trajectories)
        kept = [member for member in members if isinstance(member, Trajectory | Mapping)]
        lost = [member for member in members if not isinstance(member, Trajectory | Mapping)]
        super().__init__(
            trajectories=kept, exceptions=list(map(failure_of, (*lost, *exceptions))), metadata=metadata or {},
            metrics=metrics or {}, logs=logs or [],
        )

    def __copy__(self) -> Self:
        return with_own_containers(super().__copy__())

    def log(self, message: str) -> None:
        self.logs.append(message)

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)


class PendingGroup(Awaitable[TrajectoryGroup]):
    """A group whose rollouts have not all ended. Awaiting it runs them concurrently."""

    def __init__(self, members: list[Any], make: Callable[[list[Any]], TrajectoryGroup]) -> None:
        self.members, self.make = members, make

    def __len__(self) -> int:
        return len(self.members)

    def __await__(self) -> Generator[Any, None, TrajectoryGroup]:
        return self.settle().__await__()

    async def settle(self) -> TrajectoryGroup:
        """Return the group once all rollouts have ended. Raises a rollout's error if more fail than is allowed."""
        progress = CURRENT.get(None) or Progress(total=len(self))  # outside of a gathering no rollout may fail

        async def finish(member: Any) -> Any:
            if is_awaitable(member):
                member = await progress.watch(member, (Trajectory,), "its Trajectory")
            if isinstance(member, Trajectory):
                progress.done(member)
            return member

        return self.make(await together(map(finish, self.members)))


def is_awaitable(value: object) -> bool:
    return hasattr(value, "__await__")


def members_of(
    members: Any, taker: str = "TrajectoryGroup takes a list of rollouts or trajectories",
    right: str = "TrajectoryGroup(rollout(model, task) for _ in range(8))",
) -> list[Any]:
    """Return `members` as a list. TypeError for a single member, with the texts `taker` and `right`."""
    if is_awaitable(members) or isinstance(members, BaseModel | str | Mapping) or not isinstance(members, Iterable):
        if hasattr(members, "close"):
            members.close()  # a coroutine that will not be awaited
        raise TypeError(f"{taker}, and got {described(members)}: write {right}")
    return list(members)


def failure_of(failure: Any) -> FailedRollout | Mapping[str, Any]:
    if isinstance(failure, FailedRollout | Mapping):
        return failure
    if not isinstance(failure, BaseException):
        failure = TypeError(f"{described(failure)} stands in place of a Trajectory")
    words = "".join(traceback.format_exception(failure))
    return FailedRollout(type=type(failure).__name__, message=str(failure), traceback=words)


def tokens_of(choice: Choice) -> int | None:
    """Return a choice's number of tokens, from its field `completion_tokens` or its logprobs; None without either."""
    said = (choice.model_extra or {}).get("completion_tokens")
    logged = choice.logprobs and (choice.logprobs.content or choice.logprobs.refusal)
    return said if isinstance(said, int) else len(logged) if logged else None


def message_of(entry: Any) -> dict[str, Any]:
    """Return a choice as an assistant message, or a message with its content as text. TypeError for anything else."""
    if isinstance(entry, Choice):
        message: dict[str, Any] = {"role": "assistant", "content": entry.message.content or ""}
        calls = [call.model_dump(mode="json") for call in entry.message.tool_calls or []]
        return message | ({"tool_calls": calls} if calls else {})
    if isinstance(entry, BaseModel):  # a message object of the client
        entry = entry.model_dump(mode="json", exclude_none=True)
    if not isinstance(entry, Mapping) or "role" not in entry:
        raise TypeError(f"messages_and_choices holds {described(entry)}; it takes the choices of a completion "
                        "(completion.choices[0]) and messages such as {'role': 'user', 'content': 'Hello'}")
    return {**entry, "content": entry.get("content") or ""}


def as_number(name: str, value: Any) -> float:
    """Return a reward or a metric, which may be numpy's or torch's scalar, as a float. TypeError for anything else."""
    with suppress(TypeError, ValueError, RuntimeError):  # the last is torch's, for several elements
        if not isinstance(value, str):
            return float(value)
    raise TypeError(f"{name} is {described(value)}; a reward or a metric must be a number, such as 1.0")
