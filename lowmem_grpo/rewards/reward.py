"""A reward turns completions into numbers: an object that is called as TRL calls a reward function."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from lowmem_grpo.rewards.texts import completion_texts

CONTRACT = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


class MeanOf(float):
    """The mean of `count` values, for `log_metric`: a number like any other, for TRL too.

    A plain number counts as a mean over all completions of its call. A share of some of them alone says how many these
    are, so that a batch scored in several calls logs what a single call would. Raises ValueError for a count that is
    not positive.
    """

    count: float

    def __new__(cls, value: float, count: float) -> "MeanOf":
        if not count > 0:
            raise ValueError(f"a mean of {count} values cannot be; log nothing where there is none")
        mean = super().__new__(cls, value)
        mean.count = count
        return mean


class Reward(ABC):
    """A reward function with a name of its own and the dataset columns that it reads; it can be pickled.

    Called by keyword with `completions`, a list of N texts or chats, and a list of length N for each of its columns;
    what else the contract passes is taken, and ignored where it is not used. Returns N floats, or None for "does not
    apply". Raises TypeError for a column that is missing.
    """

    by_group = True  # looks at no completion beyond its prompt's group: may be called while other groups decode
    after_sampling = False  # uses the rollout engine itself: is called when nothing decodes any more
    time_limit: float | None = None  # seconds that it keeps to by itself, in place of GRPOConfig.reward_timeout
    required = False  # None from it takes the whole group out of the step, whatever other functions pay

    def __init__(self, name: str, columns: tuple[str, ...] = ()) -> None:
        clashing = sorted({*columns} & {*CONTRACT, "prompt", "completion"})
        if clashing:
            raise ValueError(f"{name} cannot read a column named {clashing[0]}: reward functions get that as something "
                             "else; rename the column")
        self.__name__, self.columns = name, columns
        keyword = inspect.Parameter.KEYWORD_ONLY
        named = [inspect.Parameter(argument, keyword) for argument in ("completions", *dict.fromkeys(columns))]
        self.__signature__ = inspect.Signature([*named, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)])

    def __call__(self, *, completions: list[Any], **kwargs: Any) -> list[float | None]:
        missing = [name for name in self.columns if name not in kwargs]
        if missing:
            there = ", ".join(sorted(set(kwargs) - set(CONTRACT))) or "none"
            raise TypeError(f"{self.__name__} reads the dataset column {missing[0]!r}; the columns are: {there}")
        columns = {name: kwargs[name] for name in self.columns}
        return self.pay(completion_texts(completions), columns, kwargs)

    @abstractmethod
    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        """N rewards of N texts; `columns` are those that it reads, `call` is everything that was passed."""

    def __repr__(self) -> str:
        reads = f" (reads {', '.join(self.columns)})" if self.columns else ""
        return f"<reward {self.__name__}{reads}>"


class TextReward(Reward):
    """A reward of each text by itself, with no column."""

    def __init__(self, name: str, rule: Callable[[str], float | None]) -> None:
        super().__init__(name)
        self.rule = rule

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        return [self.rule(text) for text in texts]


class LabelReward(Reward):
    """A reward of each text by its row's value of one column; None where the row has none."""

    def __init__(self, name: str, rule: Callable[[str, Any], float | None], column: str) -> None:
        super().__init__(name, (column,))
        self.rule = rule

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        pairs = zip(texts, columns[self.columns[0]], strict=True)
        return [None if label is None else self.rule(text, label) for text, label in pairs]


class TokenReward(Reward):
    """A reward of each completion's token ids, which no chat template and no decoding has touched."""

    def __init__(self, name: str, rule: Callable[[list[int]], float]) -> None:
        super().__init__(name)
        self.rule = rule

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        if (ids := call.get("completion_ids")) is None:
            raise TypeError(f"{self.__name__} counts tokens and got no completion_ids; a trainer passes them")
        return [self.rule(one) for one in ids]
