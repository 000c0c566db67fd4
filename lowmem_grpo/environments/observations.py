"""What an environment may return in place of a plain observation: `Anew` and `AskBase`."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class Anew:
    """An observation with which the conversation begins anew: the policy sees the row's prompt and this, and nothing of
    what was said before. What follows is trained as another sequence of the same episode."""

    observation: Any  # a text, messages of a chat, or None


@dataclass(frozen=True)
class AskBase:
    """`reset` or `step` returns it to have the base model (the model without its adapter) say something first. The
    engine of the run samples that, together with what other episodes ask; nothing is trained on it.

    `then` gets the reply as text, and returns what `reset` or `step` would have returned: another AskBase is possible.
    A reply of which `readable` says False is counted (`other/failure_frequency`), and `then` gets it all the same. So
    does an empty reply, which is what a question gets that does not fit into the context. ValueError for other values
    than these.
    """

    messages: Any  # a text of the user, or messages of a chat
    then: Callable[[str], Any]
    readable: Callable[[str], bool] | None = None
    max_tokens: int = 64
    temperature: float = 0.0  # 0: the likeliest reply

    def __post_init__(self) -> None:
        number = isinstance(self.temperature, Real) and 0 <= self.temperature < float("inf")
        wrong = [
            f"{name} is {value!r}, not {expected}" for name, value, expected, right in (
                ("then", self.then, "a function of the reply", callable(self.then)),
                ("readable", self.readable, "a function of the reply, or None",
                 self.readable is None or callable(self.readable)),
                ("max_tokens", self.max_tokens, "a whole number above 0",
                 type(self.max_tokens) is int and self.max_tokens > 0),
                ("temperature", self.temperature, "0 or above", number),
            ) if not right
        ]
        if wrong:
            raise ValueError(f"AskBase: {'; '.join(wrong)}")
