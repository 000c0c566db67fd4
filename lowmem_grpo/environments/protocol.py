"""The environment protocol: an object, one per episode, that answers the policy's replies.

A class with `step` follows our protocol, with Gym's names:

    reset(**row) -> observation             # a text, chat messages, or None
    step(reply) -> (observation, reward, done)
    both may return an AskBase instead, to query the base model first; an observation may be Anew
    optional: tools (functions that the policy may call), get_reward(), state_key(), close()

A class without `step` follows TRL's: its public methods are the tools, and a turn without a call ends the episode. It
may also have no tools, and only make the task in `reset`. In both protocols, methods may be async.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from lowmem_grpo.data.prompt_inputs import HALF
from lowmem_grpo.environments.tools.results import refuse_images
from lowmem_grpo.environments.workers import LateError
from lowmem_grpo.types import Message
from lowmem_grpo.utils import TEMPERATURE

NO_TOOLS = ("reset", "get_reward", "close", "state_key", "step")  # public methods that the policy may not call
ROLES = ("user", "tool", "system", "assistant")


class EnvironmentFailedError(RuntimeError):
    """An environment failed, or returned an unusable value; the message names the call."""


@dataclass(frozen=True)
class Anew:
    """An observation that restarts the conversation: the policy sees only the row's prompt and this observation, not
    the earlier turns. The turns that follow are trained as another sequence of the same episode."""

    observation: Any  # a text, chat messages, or None


@dataclass(frozen=True)
class AskBase:
    """A question to the base model (the model without its adapter), returned by `reset` or `step`. The run's engine
    samples the reply, which is not trained on.

    `then` gets the reply as text, and returns what `reset` or `step` would have returned, possibly another AskBase. A
    reply for which `readable` returns False is counted (`other/failure_frequency`) and passed to `then` all the same.
    If the question does not fit into the context, the reply is empty. ValueError for invalid values.
    """

    messages: Any  # a text of the user, or chat messages
    then: Callable[[str], Any]
    readable: Callable[[str], bool] | None = None
    max_tokens: int = 64
    temperature: float = 0.0  # 0: greedy

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is {value!r}, not {expected}" for name, value, expected, right in (
                ("then", self.then, "a function of the reply", callable(self.then)),
                ("readable", self.readable, "a function of the reply, or None",
                 self.readable is None or callable(self.readable)),
                ("max_tokens", self.max_tokens, "a whole number above 0",
                 type(self.max_tokens) is int and self.max_tokens > 0),
                ("temperature", self.temperature, TEMPERATURE[0], TEMPERATURE[1](self.temperature)),
            ) if not right
        ]
        if wrong:
            raise ValueError(f"AskBase: {'; '.join(wrong)}")


@dataclass
class Answer:
    """The answer of the environment or the tools to a turn of the policy."""

    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    done: bool = False
    state: str | None = None  # key of the state in which the policy acts next
    calls: int = 0  # tool calls
    failures: int = 0  # tool calls that failed
    anew: bool = False  # True if the messages restart the conversation
    asks: AskBase | None = None  # a question to the base model first; all other fields are then unset


class EnvHandle:
    """An environment for one episode. Its calls may be slow or raise EnvironmentFailedError, so they run in workers."""

    def __init__(self, made: Any, run: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """`run` calls a function, or awaits an async one, within the time limit per call."""
        self.made, self.run = made, run
        self.steps = callable(getattr(made, "step", None))
        self.closed = False

    def reset(self, row: Mapping[str, Any]) -> Answer:
        """Return the first observation; the environment's `reset` gets the row's columns that its signature accepts."""
        accepted = inspect.signature(self.made.reset).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        columns = {name: value for name, value in row.items() if takes_all or name in accepted}
        return self.begun(self.call("reset", **columns))

    def begun(self, returned: Any) -> Answer:
        """Return the result of `reset`, or of a later `AskBase.then`, as an Answer."""
        if isinstance(returned, AskBase):
            return Answer(asks=replace(returned, messages=messages_of(returned.messages, "AskBase")))
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            returned = returned[0]  # Gym's (observation, info)
        return self.observed(returned, "reset")

    def step(self, reply: str) -> Answer:
        return self.stepped(self.call("step", reply))

    def stepped(self, returned: Any) -> Answer:
        """Return the result of `step`, or of a later `AskBase.then`, as an Answer."""
        if isinstance(returned, AskBase):
            return self.begun(returned)
        if not isinstance(returned, tuple) or len(returned) not in (3, 4, 5):
            raise EnvironmentFailedError(f"{self.name}.step returned {short(returned)}; expected is (observation, "
                                         "reward, done)")
        observation, reward, done, *more = returned
        answer = self.observed(observation, "step")
        answer.reward = number(reward, f"{self.name}.step")
        truncated = [flag for flag in more[:1] if len(more) == 2 or isinstance(plain(flag), bool)]  # else info
        answer.done = max(is_done(flag, f"{self.name}.step") for flag in (done, *truncated))
        return answer

    def observed(self, observation: Any, method: str) -> Answer:
        anew = isinstance(observation, Anew)
        observation = observation.observation if anew else observation
        return Answer(messages_of(observation, method), state=self.state(), anew=anew)

    def pass_reply(self, ask: AskBase, said: str, first: bool) -> tuple[Answer, bool]:
        """Pass the base model's reply to `ask`; return the answer and whether the reply was readable. `first`: the
        question came from `reset`, not `step`."""
        read = ask.readable is None or bool(self.tried("AskBase.readable", ask.readable, said))
        returned = self.tried("AskBase.then", ask.then, said)
        return self.begun(returned) if first else self.stepped(returned), read

    def pay(self) -> float | None:
        if not callable(getattr(self.made, "get_reward", None)):
            return None
        return number(self.call("get_reward"), f"{self.name}.get_reward")

    def state(self) -> str | None:
        if not callable(getattr(self.made, "state_key", None)):
            return None
        key = self.call("state_key")
        return None if key is None else str(key)

    def close(self) -> None:
        if not self.closed and callable(getattr(self.made, "close", None)):
            self.closed = True
            self.call("close")

    @property
    def name(self) -> str:
        return type(self.made).__name__

    def call(self, method: str, *values: Any, **named: Any) -> Any:
        """Call a method of the environment; any error, except from a late call, becomes an
        EnvironmentFailedError."""
        return self.tried(method, getattr(self.made, method), *values, **named)

    def tried(self, method: str, function: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Call a function. Errors other than LateError become EnvironmentFailedError, whose message names `method`."""
        try:
            return self.run(function, values, named)
        except LateError:
            raise
        except Exception as error:
            said = f"{self.name}.{method} raised {type(error).__name__}: {short(error)}"
            raise EnvironmentFailedError(said) from error


def tools_of(made: Any) -> list[Callable[..., Any]]:
    """Return an environment's tools: the functions in `tools` if there is a `step`, else the public methods."""
    if callable(getattr(made, "step", None)):
        tools = getattr(made, "tools", None) or []
        try:
            return list(tools() if callable(tools) else tools)
        except TypeError as error:
            raise TypeError(f"{type(made).__name__}.tools is {short(tools)}; it must be a list of functions, or a "
                            f"method that returns one ({error})") from error
    names = [name for name, _ in inspect.getmembers(type(made), inspect.isfunction)]
    return [getattr(made, name) for name in names if not name.startswith("_") and name not in NO_TOOLS]


def messages_of(observation: Any, method: str) -> list[Message]:
    """Return an observation (a text of the user, messages or None) as messages; EnvironmentFailedError for others."""
    if observation is None:
        return []
    if isinstance(observation, str):
        observation = {"role": "user", "content": observation}
    messages = [observation] if isinstance(observation, dict) else observation
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        refuse_images(content if isinstance(content, list) else [message], method)
    if not isinstance(messages, list) or not all(is_message(message) for message in messages):
        raise EnvironmentFailedError(f"{method} gave {short(observation)} as its observation; expected is a text, or "
                                "messages with `role` and `content`")
    # A content block becomes a user message, and "?" stands for half of a surrogate pair, as in results of tools.
    return [(message if "role" in message else {"role": "user"}) | {"content": HALF.sub("?", text_in(message) or "")}
            for message in messages]


def is_message(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role", "user") in ROLES and text_in(message) is not None


def text_in(message: Message) -> str | None:
    """Return the text of a message or of TRL's content block, with text parts joined; None if a part is not text."""
    content = message.get("content", None if "role" in message else message.get("text"))
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text"
                                         and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else None


def plain(value: Any) -> Any:
    """Return Python's value of a scalar tensor; other values unchanged."""
    return value.item() if callable(getattr(value, "item", None)) and getattr(value, "ndim", 1) == 0 else value


def number(value: Any, source: str) -> float | None:
    """Return a finite number (also from a scalar tensor) or None; EnvironmentFailedError for anything else."""
    if (value := plain(value)) is None:
        return None
    if not isinstance(value, Real) or not math.isfinite(value):
        raise EnvironmentFailedError(f"{source} gave {short(value)} as its reward; expected is a finite number, such "
                                     "as 1.0, or None")
    return float(value)


def is_done(value: Any, source: str) -> bool:
    """Return a flag (also a scalar tensor; None is False) as a bool; EnvironmentFailedError for anything else."""
    if (value := plain(value)) is not None and (not isinstance(value, Real) or value not in (0, 1)):
        raise EnvironmentFailedError(f"{source} gave {short(value)} as its done; expected is True or False")
    return bool(value)


def short(value: Any) -> str:
    text = str(value) if isinstance(value, Exception) else getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 160 else f"{text[:150]}..."
