"""Verifiers, which judge whether a completion is right; `Verifier.reward` makes a reward function of one."""

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from lowmem_grpo.rewards.reward import AMOUNT, MeanOf, Reward, check_settings
from lowmem_grpo.rewards.texts import labels_of
from lowmem_grpo.utils import require

logger = logging.getLogger(__name__)

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
        """`judge` takes a completion's text, a label if there is a column, and the `settings`. A list is several
        labels, any of which is right; None means that there is no label, and gives no verdict."""
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
    """A reward that pays for a verifier's verdicts. It logs the share of right verdicts as `verdicts/NAME`, which does
    not depend on the amounts."""

    def __init__(self, verifier: Verifier, right: float, wrong: float, name: str) -> None:
        super().__init__(name, verifier.columns)
        for option, amount in (("right", right), ("wrong", wrong)):
            require(option, amount, AMOUNT)
        self.verifier, self.right, self.wrong = verifier, float(right), float(wrong)
        self.said_unread = False  # True once `say_unread` has warned

    def pay(self, texts: list[str], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        needed = {name: columns[name] for name in self.columns}
        verdicts = self.verifier.verdicts(texts, **needed)
        self.say_unread(verdicts, next(iter(needed.values()), []))
        return self.paid(verdicts, call)

    def say_unread(self, verdicts: list[Verdict], labels: list[Any]) -> None:
        """Warn once if labels give no verdict. Missing labels do not count: they give none on purpose."""
        unread = [label for verdict, label in zip(verdicts, labels, strict=False)
                  if verdict is None and any(map(str, labels_of(label)))]
        if unread and not self.said_unread:
            self.said_unread = True
            logger.warning(
                "%s gives no verdict on %d of %d completions, and no reward: it cannot compare with the label %.80r in "
                "the column %r. Write the answer alone, or as \"#### 43\", \\boxed{43} or \"The answer is 43.\"",
                self.__name__, len(unread), len(verdicts), unread[0], self.columns[0])

    def paid(self, verdicts: list[Verdict], call: dict[str, Any]) -> list[float | None]:
        """Return the rewards for these verdicts, and log the share of right ones."""
        said = [verdict for verdict in verdicts if verdict is not None]
        if said and callable(log := call.get("log_metric")):
            log(f"verdicts/{self.__name__}", MeanOf(sum(said) / len(said), len(said)))
        return [None if verdict is None else self.right if verdict else self.wrong for verdict in verdicts]
