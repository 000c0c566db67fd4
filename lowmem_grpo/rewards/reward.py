"""The base classes of rewards: objects that are called as TRL calls a reward function."""

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from lowmem_grpo.rewards.ready.reading import Place, after, in_tag
from lowmem_grpo.rewards.texts import completion_texts, values_of
from lowmem_grpo.utils import TEXT, TRUTH, Rule, number, require

CONTRACT = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
AMOUNT = number("a finite number", lambda value: abs(value) <= sys.float_info.max)
PLACE: Rule = ("a function that finds the answer in a text, such as rewards.boxed or rewards.in_tag('answer')",
               lambda value: callable(value) and value not in (after, in_tag))
OF_SETTINGS: dict[Any, Rule] = {float: AMOUNT, bool: TRUTH, Place: PLACE}  # by annotation in a rule's signature


class MeanOf(float):
    """The mean of `count` values, for `log_metric`; TRL takes it as a plain number. A plain number counts as the mean
    over all completions of its call. Use MeanOf for a mean over only some of them, so that a batch scored in several
    calls logs the same value as one scored in a single call. ValueError for a count that is not positive."""

    count: float

    def __new__(cls, value: float, count: float) -> "MeanOf":
        if not count > 0:
            raise ValueError(f"a mean of {count} values cannot be logged; if there are no values, log nothing")
        mean = super().__new__(cls, value)
        mean.count = count
        return mean


class Reward(ABC):
    """A reward function with a name and the dataset columns that it reads. It can be pickled. It is called by keyword
    with `completions`, a list of N texts or chats, and with a list of length N for each of its columns; other arguments
    of the contract are ignored. It returns N floats; None means "does not apply". TypeError if a column is missing."""

    by_group = True  # needs only one prompt's group at a time, so it may be called while other groups decode
    after_sampling = False  # uses the rollout engine, so it must be called after sampling
    time_limit: float | None = None  # seconds, in place of GRPOConfig.reward_timeout
    required = False  # if it returns None for a completion, the whole group is left out of the step

    def __init__(self, name: str, columns: tuple[str, ...] = ()) -> None:
        for option, text in (("name", name), *(("column", column) for column in columns)):
            require(option, text, TEXT)
        clashing = sorted({*columns} & {*CONTRACT, "prompt", "completion"})
        if clashing:
            raise ValueError(f"{name} cannot read a column named {clashing[0]}: reward functions get something else "
                             "under that name; rename the column")
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
        return self.pay(self.read(completions), columns, kwargs)

    def read(self, completions: list[Any]) -> list[Any]:
        """Return the text of each completion for `pay`; for a chat, the text of its last assistant message."""
        return completion_texts(completions)

    @abstractmethod
    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        """Return the rewards of N texts. `columns` holds the columns of `self.columns`, `call` all other arguments."""

    def fault_of_row(self, row: dict[str, Any]) -> str | None:
        """Return the reason why a dataset row can never be judged; None if it can. Called before a run."""
        return None

    def __repr__(self) -> str:
        reads = f" (reads {', '.join(self.columns)})" if self.columns else ""
        return f"<reward {self.__name__}{reads}>"


def check_settings(rule: Any, column: str | None, settings: dict[str, Any]) -> None:
    """Raise ValueError for a setting that is not what the rule's annotation says, and for a column that is no name; a
    rule with the argument `label` needs one."""
    kinds = getattr(rule, "__annotations__", {})
    for name, value in settings.items():
        if kinds.get(name) in OF_SETTINGS:
            require(name, value, OF_SETTINGS[kinds[name]])
    if column is not None or "label" in kinds:
        require("column", column, TEXT)


class TextReward(Reward):
    """A reward that applies a rule to each text. With a `column`, the rule also gets the row's value in that column; an
    empty value gives None. `settings` are further arguments of the rule."""

    def __init__(self, name: str, rule: Callable[..., float | None], column: str | None = None,
                 **settings: Any) -> None:
        check_settings(rule, column, settings)
        super().__init__(name, () if column is None else (column,))
        self.rule = partial(rule, **settings)

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        if not self.columns:
            return [self.rule(text) for text in texts]
        pairs = zip(texts, columns[self.columns[0]], strict=True)
        return [self.rule(text, label) if values_of(label) else None for text, label in pairs]


class TokenReward(TextReward):
    """A reward that applies its rule to each completion's token ids as they were sampled, without a chat template; for
    an episode, to the ids that the policy sampled in all turns."""

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        if (ids := call.get("completion_ids")) is None:
            raise TypeError(f"{self.__name__} counts tokens and got no completion_ids; a trainer passes them")
        if "environments" in call and "turns" in call:  # episodes: a dataset hardly has both columns
            ids = [[token for turn in turns for token in turn.completion_ids] for turns in call["turns"]]
        return [self.rule(tokens.tolist() if hasattr(tokens, "tolist") else tokens) for tokens in ids]
