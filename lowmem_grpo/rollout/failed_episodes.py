"""Environments that fail: what the log says of it, and when a run ends because of it."""

import logging
import traceback
from collections.abc import Iterable
from pathlib import Path

from lowmem_grpo.environments.protocol import EnvironmentFailedError
from lowmem_grpo.types import Rollout

logger = logging.getLogger(__name__)
MOST = 3  # batches in a row without an episode that did not fail, after one that had such; before it, one is too many
SAID = 3  # failures of a batch that the log names
PACKAGE = str(Path(__file__).parents[1])
Failure = tuple[str, BaseException]  # (what to say, the error)


class Outages:
    """The failures in the batches of a run."""

    def __init__(self) -> None:
        self.worked = False  # whether an episode has not failed
        self.batches = 0  # in a row, in which all episodes failed
        self.shown: set[str] = set()  # lines of users that are in the log

    def settle(self, rollouts: list[Rollout], failures: list[Failure]) -> None:
        """Tell what failed in a batch; EnvironmentFailedError where an environment seems to be broken."""
        self.say(failures)
        failed = all(rollout.failed for rollout in rollouts)
        self.worked, self.batches = self.worked or not failed, self.batches + 1 if failed else 0
        if self.batches >= (MOST if self.worked else 1):
            in_a_row = f" in {self.batches} batches in a row" if self.worked else ""
            said, error = failures[-1]
            raise EnvironmentFailedError(f"all {len(rollouts)} episodes failed{in_a_row}, so there is nothing to train "
                                         f"on: {said}. Mend the environment, then begin again or go on") from error

    def say(self, failures: list[Failure]) -> None:
        """Name the first failures in the log, each kind once with the user's own lines."""
        for said, error in failures[:SAID]:
            lines = where_it_failed(error)
            logger.warning("an environment failed: %s%s", said, "" if lines in self.shown else lines)
            self.shown.add(lines)
        if len(failures) > SAID:
            logger.warning("environments failed %d times in this batch", len(failures))


def where_it_failed(error: BaseException) -> str:
    """The user's own lines of the error behind this one, for the log; empty where there are none."""
    if error.__cause__ is None:
        return ""
    told = traceback.TracebackException.from_exception(error.__cause__)
    own = [frame for frame in told.stack if not frame.filename.startswith(PACKAGE)]
    told.stack = traceback.StackSummary.from_list(own)
    return "\n" + "".join(told.format(chain=False)).rstrip() if told.stack else ""


def say_too_long(tokens: Iterable[int], context: int) -> None:
    """Tell that first prompts of so many tokens did not fit."""
    if lengths := list(tokens):
        logger.warning("what reset returned did not fit in %d episodes: the first prompt has %d tokens, and the "
                       "context has room for %d. Return less, or load the model with a larger max_seq_length",
                       len(lengths), max(lengths), context)
