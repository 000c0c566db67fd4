"""How rows were last sampled, so that rows whose completions all earn the same can rest."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

LONGEST_REST = 8  # epochs


@dataclass(frozen=True)
class Visit:
    """The record of a row's visits; a visit is the sampling of a row in an epoch."""

    reward: float | None = None  # if all completions earned the same
    fruitless: int = 0  # visits without a spread of rewards, since the last one with a spread
    back: int = 0  # the epoch from which the row is sampled again


class DifficultyPools:
    """Remembers how each row was last sampled. A row whose completions all earn the same reward rests for 1 epoch; if
    that happens again, for 2, 4 and then 8 epochs. A spread of rewards ends the rests, and the row is "learning". A row
    without a spread is "easy" if it earned the best reward seen in the run, and "hard" if it earned less, or if only
    one reward has been seen."""

    def __init__(self) -> None:
        self.rows: dict[int, Visit] = {}
        self.worst: float | None = None  # rewards seen in the run
        self.best: float | None = None

    def rests(self, index: int, epoch: int) -> bool:
        return index in self.rows and epoch < self.rows[index].back

    def record(self, index: int, epoch: int, rewards: Iterable[float | None]) -> None:
        """Record a visit of a row. Completions without a reward are ignored, and so is a visit without any reward."""
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
        self.rows = {index: replace(visit, back=0) for index, visit in self.rows.items()}

    def metrics(self) -> dict[str, float]:
        same = [visit.reward for visit in self.rows.values() if visit.reward is not None]
        told = self.best is not None and self.worst is not None and self.worst < self.best
        easy = sum(told and reward == self.best for reward in same)
        return {
            "data/pool_easy": easy, "data/pool_hard": len(same) - easy,
            "data/pool_learning": len(self.rows) - len(same),
        }

    def state(self) -> dict[str, Any]:
        rows = [[index, visit.reward, visit.fruitless, visit.back] for index, visit in self.rows.items()]
        return {"rows": rows, "worst": self.worst, "best": self.best}

    def restore(self, state: dict[str, Any]) -> None:
        self.rows = {index: Visit(*rest) for index, *rest in state["rows"]}
        self.worst, self.best = state["worst"], state["best"]
