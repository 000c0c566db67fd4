"""`Gaps`: numbers of requests that never came, while later ones wait for them."""

import threading
import time

GAP = 60.0  # seconds in which a request may come after later ones
SOON = 2.0  # the same where its user was refused a body that could not be read: it was that request, most likely


class Gaps:
    """Any thread may use it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.since: dict[str, tuple[int, float]] = {}  # by model: the request that is missing, and since when it is
        self.refused: dict[str, float] = {}  # by user: when a request was refused that is not known to be whose

    def refuse(self, owner: str) -> None:
        """A body of this user could not be read, so that its model and number are not known."""
        self.refused[owner] = time.monotonic()

    def is_over(self, model: str, owner: str, missing: int | None) -> bool:
        """Whether a missing request had its time to come; None is missing where all that should be there is."""
        now = time.monotonic()
        with self.lock:
            if missing is None:
                self.since.pop(model, None)
                return False
            seq, since = self.since.get(model, (missing, now))
            self.since[model] = (missing, now) if seq != missing else (seq, since)
            recent = self.refused.get(owner, -GAP) > since - GAP
            if seq != missing or now - since < (min(SOON, GAP) if recent else GAP):
                return False
            del self.since[model]
            return True
