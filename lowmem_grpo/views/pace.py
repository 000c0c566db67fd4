"""How fast a run goes, by the clock on the wall, and when it will be over."""

import time


class Pace:
    """Marks of steps that have been made. The first one warms up, so it counts only until there is another."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, step: int) -> None:
        """The run goes on from here."""
        self.marks = [(step, time.monotonic())]

    def mark(self, step: int) -> None:
        """So many steps have been made by now; telling it twice changes nothing."""
        if step == self.marks[-1][0]:
            return
        self.marks = [*self.marks[:2], (step, time.monotonic())]

    @property
    def per_step(self) -> float | None:
        """Seconds a step; None before the first."""
        if len(self.marks) < 2:
            return None
        (first, began), (last, now) = self.marks[-2:]
        return (now - began) / (last - first)

    def left(self, max_steps: int) -> float | None:
        """Seconds until `max_steps`; None before the first step."""
        each = self.per_step
        return None if each is None else each * max(max_steps - self.marks[-1][0], 0)
