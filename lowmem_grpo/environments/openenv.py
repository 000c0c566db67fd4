"""Environments of OpenEnv, made from a client and two functions: from reply to action, and from observation to text.

    environment = OpenEnv(lambda: EchoEnv(base_url=url), action=lambda reply: EchoAction(message=reply),
                          text=lambda observation: observation.echoed_message)
    GRPOTrainer(model, environment_factory=environment, ...)

The library is not imported: a client is any object with `reset(**columns)` and `step(action)`, whose results have
`observation`, `reward` and `done`, and with `close()`. The methods are all async, as in OpenEnv's clients, or all
plain, as in those that `.sync()` returns.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

FULL = "CAPACITY_REACHED"  # the server's error code when it takes no more sessions
SHUT = "ConnectionClosed"  # prefix of websockets' errors: a full server often closes before its code is read
Step = tuple[Any, float | None, bool]  # (observation as text or messages, reward, done)


class OpenEnvError(RuntimeError):
    """The client or its server cannot be used; the message says why and what to do."""


class OpenEnv:
    """An `environment_factory` for GRPOTrainer: each call makes an environment with its own client and session."""

    def __init__(self, connect: Callable[[], Any], action: Callable[[str], Any], text: Callable[[Any], Any],
                 columns: Sequence[str] | None = None, name: str = "OpenEnv") -> None:
        """`connect` makes a client and may be async. `action` turns a reply's text into an action, and `text` an
        observation into text or messages. `columns` are the row's columns passed to the client's reset; None passes all
        but `prompt`. `name` is the environment's name in the logs."""
        for what, function in (("connect", connect), ("action", action), ("text", text)):
            if not callable(function):
                hint = "; give a function that makes a client, since each episode needs its own" if what == "connect" \
                    else ""
                raise TypeError(f"OpenEnv: {what} is a {type(function).__name__}, not a function{hint}")
        self.connect, self.action, self.text, self.columns = connect, action, text, columns
        self.__name__ = name
        self.kinds = {kind: type(name, (kind,), {"__doc__": kind.__doc__}) for kind in (PlainClient, AsyncClient)}

    def __call__(self) -> Any:
        if inspect.iscoroutinefunction(self.connect):
            return self.kinds[AsyncClient](None, self)  # connects in reset
        client = self.connect()
        waits = inspect.iscoroutinefunction(getattr(client, "step", None))
        return self.kinds[AsyncClient if waits else PlainClient](client, self)


class Client:
    """The base class of PlainClient and AsyncClient."""

    def __init__(self, client: Any, settings: OpenEnv) -> None:
        self.client, self.settings = client, settings

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        names = self.settings.columns
        return {name: value for name, value in row.items() if (name != "prompt" if names is None else name in names)}

    def read(self, result: Any) -> Step:
        """Return observation, reward and done of a result. OpenEnvError if it lacks one of the three."""
        missing = [name for name in ("observation", "reward", "done") if not hasattr(result, name)]
        if missing:
            raise OpenEnvError(f"the client of OpenEnv returned a {type(result).__name__} without "
                               f"{', '.join(missing)}; a result has observation, reward and done")
        return self.settings.text(result.observation), result.reward, bool(result.done)

    def explain(self, error: Exception) -> Exception:
        """Return an OpenEnvError with advice if the server takes no more sessions, else the error itself."""
        if FULL not in str(error) and not type(error).__name__.startswith(SHUT):
            return error
        what = "takes no more sessions" if FULL in str(error) else "shut a new session, as it does where it is full"
        return OpenEnvError(f"the server of OpenEnv {what} ({error}). Every episode that runs needs a session: start "
                            "the server with max_concurrent_envs of num_generations times the prompts of a step, or "
                            "more (its class needs SUPPORTS_CONCURRENT_SESSIONS = True), and close other clients")


class PlainClient(Client):
    """An environment of OpenEnv with a synchronous client."""

    def reset(self, **row: Any) -> Any:
        try:
            return self.read(self.client.reset(**self.columns(row)))[0]
        except Exception as error:
            raise self.explain(error) from error

    def step(self, reply: str) -> Step:
        return self.read(self.client.step(self.settings.action(reply)))

    def close(self) -> None:
        self.client.close()


class AsyncClient(Client):
    """An environment of OpenEnv with an async client."""

    async def reset(self, **row: Any) -> Any:
        try:
            if self.client is None:
                self.client = await self.settings.connect()
            return self.read(await self.client.reset(**self.columns(row)))[0]
        except Exception as error:
            raise self.explain(error) from error

    async def step(self, reply: str) -> Step:
        return self.read(await self.client.step(self.settings.action(reply)))

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()
