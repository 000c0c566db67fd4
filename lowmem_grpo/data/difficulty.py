"""Difficulty pools: rows that taught nothing rest for a while, and come back."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

LONGEST_REST = 8  # epochs


@dataclass(frozen=True)
class Visit:
    """What the last visit of a row came to."""

    reward: float | None = None  # of all completions, where they earned the same
    fruitless: int = 0  # visits without a spread of rewards, since the last one with
    back: int = 0  # the epoch in which the row is sampled again


class DifficultyPools:
    """Remembers rows by their last visit. After the first visit in a row without a spread of rewards a row is left out
    for 1 epoch, then for 2, 4 and 8; a visit with a spread ends that.

    "easy" are resting rows that earned the best reward seen in the run, "hard" those that earned less, or where
    nothing better than the worst was seen yet; "learning" are rows with a spread.
    """

    def __init__(self) -> None:
        self.rows: dict[int, Visit] = {}
        self.worst: float | None = None  # rewards seen in the run
        self.best: float | None = None

    def rests(self, index: int, epoch: int) -> bool:
        """Whether a row is left out in an epoch."""
        return index in self.rows and epoch < self.rows[index].back

    def record(self, index: int, epoch: int, rewards: Iterable[float | None]) -> None:
        """Take a visit of a row in an epoch; completions without a reward are left out, and so is a visit of such."""
        scored = [reward for reward in rewards if reward is not None]
        if not scored:
            return
        low, high = min(scored), max(scored)
        self.worst = low if self.worst is None else min(self.worst, low)
        self.best = high if self.best is None else max(self.best, high)
        before = self.rows.get(index, Visit())
        rest = min(2**before.fruitless, LONGEST_REST)
        self.rows[index] = Visit() if low < high else Visit(low, before.fruitless + 1, epoch + 1 + rest)

    def wake(self) -> None:
        """All rows come back at once; how often they were fruitless stays known."""
        self.rows = {index: replace(visit, back=0) for index, visit in self.rows.items()}

    def metrics(self) -> dict[str, float]:
        """How many of the rows visited so far are in each pool, by their last visit."""
        same = [visit.reward for visit in self.rows.values() if visit.reward is not None]
        told = self.best is not None and self.worst is not None and self.worst < self.best
        easy = sum(told and reward == self.best for reward in same)
        return {
            "data/pool_easy": easy, "data/pool_hard": len(same) - easy,
            "data/pool_learning": len(self.rows) - len(same),
        }

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON."""
        rows = [[index, visit.reward, visit.fruitless, visit.back] for index, visit in self.rows.items()]
        return {"rows": rows, "worst": self.worst, "best": self.best}

    def restore(self, state: dict[str, Any]) -> None:
        """Undo `state`."""
        self.rows = {index: Visit(*rest) for index, *rest in state["rows"]}
        self.worst, self.best = state["worst"], state["best"]
