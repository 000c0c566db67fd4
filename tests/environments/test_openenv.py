"""Clients of OpenEnv as environments: what they are given, what is read of them, and how they fail.

The client is a pretended one, with OpenEnv's names.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from lowmem_grpo.environments.openenv import OpenEnv, OpenEnvError


@dataclass
class StepResult:
    observation: Any
    reward: float | None = None
    done: bool = False


class PretendClient:
    """Counts up by each action; ends at 5."""

    def __init__(self) -> None:
        self.total, self.calls = 0, []  # type: ignore[var-annotated]

    def reset(self, **columns: Any) -> StepResult:
        self.calls.append(columns)
        return StepResult({"total": self.total})

    def step(self, action: int) -> StepResult:
        self.total += action
        return StepResult({"total": self.total}, float(action), self.total >= 5)

    def close(self) -> None:
        self.calls.append("closed")


class PretendAsyncClient:
    def __init__(self) -> None:
        self.plain = PretendClient()

    async def reset(self, **columns: Any) -> StepResult:
        return self.plain.reset(**columns)

    async def step(self, action: int) -> StepResult:
        return self.plain.step(action)

    async def close(self) -> None:
        self.plain.close()


async def connect_later() -> PretendAsyncClient:
    return PretendAsyncClient()


def finished(value: Any) -> Any:
    """A value, or what a coroutine returns."""
    return asyncio.run(value) if asyncio.iscoroutine(value) else value


def openenv(connect: Any, **options: Any) -> OpenEnv:
    return OpenEnv(connect, action=int, text=lambda seen: f"total {seen['total']}", **options)


@pytest.mark.parametrize("connect", [PretendClient, PretendAsyncClient, connect_later])
def test_an_episode_is_played_by_text_with_every_kind_of_client(connect: Any) -> None:
    environment = openenv(connect)()
    assert finished(environment.reset(prompt="p", seed=3)) == "total 0"
    assert finished(environment.step("2")) == ("total 2", 2.0, False)
    assert finished(environment.step("3")) == ("total 5", 3.0, True)
    finished(environment.close())
    client = getattr(environment.client, "plain", environment.client)
    assert client.calls == [{"seed": 3}, "closed"]


def test_each_environment_has_a_client_of_its_own_and_all_are_of_one_class_with_the_given_name() -> None:
    factory = openenv(PretendClient, columns=("level",), name="Counting")
    first, second = factory(), factory()
    assert first.client is not second.client and type(first) is type(second) and type(first).__name__ == "Counting"
    first.reset(prompt="p", seed=3, level=1)
    assert first.client.calls == [{"level": 1}]


def test_an_async_client_that_never_began_can_be_closed() -> None:
    finished(openenv(connect_later)().close())


class ConnectionClosedOK(Exception):  # noqa: N818 - the name that websockets gives it
    """What a client meets that reads after the server shut the connection."""


@pytest.mark.parametrize("kind", [PretendClient, PretendAsyncClient])
@pytest.mark.parametrize(("error", "says"), [
    (RuntimeError("Server error: at capacity: 1/1 sessions active. (code: CAPACITY_REACHED)"), "takes no more.*1/1"),
    (ConnectionClosedOK("received 1000 (OK)"), "shut a new session"),
])
def test_a_full_server_says_how_many_sessions_it_needs(error: Exception, says: str, kind: Any) -> None:
    environment = openenv(kind)()

    def full(**_: Any) -> Any:
        raise error

    getattr(environment.client, "plain", environment.client).reset = full
    with pytest.raises(OpenEnvError, match=says + ".*max_concurrent_envs of num_generations times"):
        finished(environment.reset())


def test_a_result_that_is_none_of_openenv_s_is_named() -> None:
    with pytest.raises(OpenEnvError, match="returned a tuple without observation, reward, done"):
        openenv(PretendClient)().read(("total", 1.0))


@pytest.mark.parametrize(("given", "says"), [
    ({"connect": PretendClient()}, "connect is a PretendClient.*each episode needs its own"),
    ({"action": "x"}, "action is a str, not a function"), ({"text": None}, "text is a NoneType"),
])
def test_what_is_no_function_is_refused_at_once(given: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        OpenEnv(**{"connect": PretendClient, "action": int, "text": str} | given)
