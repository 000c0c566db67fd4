"""The base classes of rewards, which are called as TRL calls reward functions, and of verifiers."""

import functools
import inspect
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lowmem_grpo.rewards.reading import Finder, after, in_tag
from lowmem_grpo.rewards.texts import completion_texts, labels_of, values_of
from lowmem_grpo.utils import TEXT, TRUTH, Rule, number, require

logger = logging.getLogger(__name__)

CONTRACT = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
AMOUNT = number("a finite number", lambda value: abs(value) <= sys.float_info.max)
FINDER: Rule = ("a function that finds the answer in a text, such as rewards.boxed or rewards.in_tag('answer')",
               lambda value: callable(value) and value not in (after, in_tag))
OF_SETTINGS: dict[Any, Rule] = {float: AMOUNT, bool: TRUTH, Finder: FINDER}  # by annotation in a rule's signature


def is_model(func: Any) -> bool:
    """Return whether a value is a reward model: a torch module, or a model's name. This does not import torch."""
    return isinstance(func, str) or any(cls.__module__.startswith("torch.nn.") for cls in type(func).__mro__)


class MeanOf(float):
    """The mean of `count` values, for `log_metric`; TRL takes it as a plain number. A plain number counts as the mean
    over all completions of a call: use MeanOf for a mean over fewer. ValueError for a count that is not positive."""

    count: float

    def __new__(cls, value: float, count: float) -> "MeanOf":
        if not count > 0:
            raise ValueError(f"a mean of {count} values cannot be logged; if there are no values, log nothing")
        mean = super().__new__(cls, value)
        mean.count = count
        return mean


class Reward(ABC):
    """A reward function with a name and the dataset columns that it reads. It is called by keyword with `completions`,
    a list of N texts or chats, and a list of length N for each column; it ignores other arguments. It returns N floats,
    with None for "does not apply". TypeError if a column is missing."""

    by_group = True  # needs only one prompt's group at a time, so it may be called while other groups decode
    after_sampling = False  # uses the rollout engine, so it must be called after sampling
    time_limit: float | None = None  # seconds, in place of GRPOConfig.reward_timeout
    said_unread = False  # True once `say_unread` has warned
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
        others = "others" if "kwargs" in columns else "kwargs"  # IFEval has a column of that name
        self.__signature__ = inspect.Signature([*named, inspect.Parameter(others, inspect.Parameter.VAR_KEYWORD)])

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

    def say_unread(self, results: Sequence[float | None], labels: list[Any]) -> None:
        """Warn once if labels give no result. Missing labels do not count, as they are meant to give none."""
        unread = [label for result, label in zip(results, labels, strict=False)
                  if result is None and any(str(each).strip() for each in labels_of(label))]
        if unread and not self.said_unread:
            self.said_unread = True
            logger.warning(
                "%s gives no verdict on %d of %d completions, and no reward: it cannot compare with the label %.80r in "
                "the column %r. Write the answer alone, as text or a number, or as \"#### 43\", \\boxed{43} or \"The "
                "answer is 43.\"", self.__name__, len(unread), len(results), unread[0], self.columns[0])

    def fault_of_row(self, row: dict[str, Any]) -> str | None:
        """Return the reason why a dataset row can never be judged; None if it can. Called before a run."""
        return None

    def __repr__(self) -> str:
        reads = f" (reads {', '.join(self.columns)})" if self.columns else ""
        return f"<reward {self.__name__}{reads}>"


def check_settings(rule: Any, column: str | None, settings: dict[str, Any]) -> None:
    """Raise ValueError for a setting that does not match its annotation in the function `rule`, for an invalid column
    name, and for a missing column if `rule` has the argument `label`."""
    kinds = getattr(rule, "__annotations__", {})
    for name, value in settings.items():
        if kinds.get(name) in OF_SETTINGS:
            require(name, value, OF_SETTINGS[kinds[name]])
    if column is not None or "label" in kinds:
        require("column", column, TEXT)


class TextReward(Reward):
    """A reward that applies the function `rule` to each text. With a `column`, the function also gets the row's value
    in that column; an empty value gives None. `settings` are further arguments of the function."""

    def __init__(self, name: str, rule: Callable[..., float | None], column: str | None = None,
                 **settings: Any) -> None:
        check_settings(rule, column, settings)
        super().__init__(name, () if column is None else (column,))
        self.rule = partial(rule, **settings)

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        if not self.columns:
            return [self.rule(text) for text in texts]
        labels = columns[self.columns[0]]
        rewards = [self.rule(text, label) if values_of(label) else None
                   for text, label in zip(texts, labels, strict=True)]
        self.say_unread(rewards, labels)
        return rewards


class TokenReward(TextReward):
    """A reward that applies a function to each completion's token ids as they were sampled, without a chat template.
    For an episode, these are the ids that the policy sampled in all turns."""

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        if (ids := call.get("completion_ids")) is None:
            raise TypeError(f"{self.__name__} counts tokens and got no completion_ids; a trainer passes them")
        if "environments" in call and "turns" in call:  # episodes: a dataset hardly has both columns
            ids = [[token for turn in turns for token in turn.completion_ids] for turns in call["turns"]]
        return [self.rule(tokens.tolist() if hasattr(tokens, "tolist") else tokens) for tokens in ids]


Verdict = bool | None  # None: no verdict, for example because the label is not a number


class Verifier(ABC):
    """A judge of completions: right, wrong, or None. It is not a reward function; `.reward(right, wrong)` makes one."""

    name: str
    columns: tuple[str, ...] = ()  # dataset columns that it reads

    @abstractmethod
    def verdicts(self, completions: list[str], **columns: list[Any]) -> list[Verdict]:
        """Return a verdict on each of N texts. `columns` has a list of length N for each of `self.columns`."""

    def verify(self, completion: str, **columns: Any) -> Verdict:
        """Return the verdict on one text, with the values of its columns by name."""
        return self.verdicts([completion], **{name: [value] for name, value in columns.items()})[0]

    def reward(self, right: float = 1.0, wrong: float = 0.0, name: str | None = None) -> "VerifiedReward":
        """Return a reward function that pays `right` or `wrong`, and None if there is no verdict."""
        return VerifiedReward(self, right, wrong, name or self.name)


class TextVerifier(Verifier):
    """A verifier that judges each text alone, or compares it with its row's value in a `column`."""

    def __init__(self, name: str, judge: Callable[..., Verdict], column: str | None = None, **settings: Any) -> None:
        """`judge` takes a text, a label if there is a column, and the `settings`. Each item of a list in the column is
        a label, and any label may be right; None is no label, and gives no verdict."""
        check_settings(judge, column, settings)
        self.name, self.judge = name, functools.partial(judge, **settings)
        self.columns = () if column is None else (column,)

    def verdicts(self, completions: list[str], **columns: list[Any]) -> list[Verdict]:
        if not self.columns:
            return [self.judge(text) for text in completions]
        return [any_of(label, functools.partial(self.judge, text))
                for text, label in zip(completions, columns[self.columns[0]], strict=True)]


def any_of(label: Any, judge: Callable[[Any], Verdict]) -> Verdict:
    """Return whether `judge` accepts the label, or any of a list of labels; None if no label gives a verdict."""
    said = [judge(each) for each in labels_of(label)]
    return True if True in said else False if False in said else None


class VerifiedReward(Reward):
    """A reward that pays for a verifier's verdicts, and logs the share of right ones as `verdicts/NAME`."""

    def __init__(self, verifier: Verifier, right: float, wrong: float, name: str) -> None:
        super().__init__(name, verifier.columns)
        for option, amount in (("right", right), ("wrong", wrong)):
            require(option, amount, AMOUNT)
        self.verifier, self.right, self.wrong = verifier, float(right), float(wrong)

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        needed = {name: columns[name] for name in self.columns}
        verdicts = self.verifier.verdicts(texts, **needed)
        self.say_unread(verdicts, next(iter(needed.values()), []))
        return self.paid(verdicts, call)

    def paid(self, verdicts: list[Verdict], call: dict[str, Any]) -> list[float | None]:
        """Return the rewards for these verdicts, and log the share of right ones."""
        said = [verdict for verdict in verdicts if verdict is not None]
        if said and callable(log := call.get("log_metric")):
            log(f"verdicts/{self.__name__}", MeanOf(sum(said) / len(said), len(said)))
        return [None if verdict is None else self.right if verdict else self.wrong for verdict in verdicts]
