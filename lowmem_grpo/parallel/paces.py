"""What each rank spends its time on, step by step, and a word on one that holds up the others."""

import logging
from statistics import median

logger = logging.getLogger(__name__)

SLOW, STEPS = 1.5, 3  # times the median of the others, over so many steps in a row


class Paces:
    """The seconds that ranks were busy: all of a step but what they waited for each other."""

    def __init__(self) -> None:
        self.slow: dict[int, int] = {}  # steps in a row in which a rank was slow
        self.said: set[int] = set()

    def metrics(self, told: list[dict[str, float]]) -> dict[str, float]:
        """What each rank tells of a step, `busy_s` among it, as metrics ranks/RANK/NAME."""
        self.look([one["busy_s"] for one in told])
        return {f"ranks/{rank}/{name}": value for rank, one in enumerate(told) for name, value in one.items()}

    def look(self, busy: list[float]) -> None:
        """Say once of a rank that it takes longer than the others, step after step."""
        for rank, seconds in enumerate(busy):
            others = median(busy[:rank] + busy[rank + 1 :])
            self.slow[rank] = self.slow.get(rank, 0) + 1 if seconds > SLOW * others else 0
            if self.slow[rank] == STEPS and rank not in self.said:
                self.said.add(rank)
                logger.warning(
                    "rank %d takes %.1f times as long as the others, which wait for it in each step: its card or its "
                    "machine is slower, or busy with something else. All ranks get as many prompts, and train as many "
                    "tokens; with cards of one kind none waits", rank, seconds / others)
