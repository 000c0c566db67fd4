"""Why a judge gave no scores, in words with a fix, and not the same ones every second."""

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

QUIET_SECONDS = 300.0  # between two warnings of the same kind


@dataclass(frozen=True)
class Trouble:
    """One reason for which a question has no answer."""

    kind: str
    problem: str
    fix: str


class Complaints:
    """Warns of each kind of trouble when it first comes, and again after a while, with how often it has come."""

    def __init__(self, quiet_seconds: float = QUIET_SECONDS) -> None:
        self.quiet_seconds = quiet_seconds
        self.said: dict[str, float] = {}  # when, by kind
        self.unsaid: dict[str, int] = {}  # how often since
        self.lock = threading.Lock()

    def say(self, judge: str, trouble: Trouble, what: str = "those completions have no reward") -> None:
        with self.lock:
            now, before = time.monotonic(), self.said.get(trouble.kind)
            if before is not None and now - before < self.quiet_seconds:
                self.unsaid[trouble.kind] = self.unsaid.get(trouble.kind, 0) + 1
                return
            self.said[trouble.kind], more = now, self.unsaid.pop(trouble.kind, 0)
        often = f" ({more} more times since this was last said)" if more else ""
        logger.warning("judge %s: %s%s; %s. What helps: %s", judge, trouble.problem, often, what, trouble.fix)

    def __getstate__(self) -> dict[str, Any]:
        return {"quiet_seconds": self.quiet_seconds, "said": {}, "unsaid": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.Lock())
