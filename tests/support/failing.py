"""Memory that runs out when a test says so."""

from collections.abc import Callable
from typing import Any

import torch

WORDS = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.00 GiB"


class Failing:
    """A hook that raises at some of its calls, counted from 0."""

    def __init__(self, *calls: int, error: Callable[[], BaseException] = lambda: torch.OutOfMemoryError(WORDS)) -> None:
        self.at, self.calls, self.error, self.raised = set(calls), 0, error, 0

    def __call__(self, *args: Any) -> None:
        number, self.calls = self.calls, self.calls + 1
        if number in self.at:
            self.raised += 1
            raise self.error()
