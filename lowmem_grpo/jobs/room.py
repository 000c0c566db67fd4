"""Whether a job has room: alone on the card, or beside others that share it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.jobs.job import Job
from lowmem_grpo.units import size_text

TINY = 1e-6  # shares such as 0.3, 0.3 and 0.4 add up to one


@dataclass(frozen=True)
class Weighed:
    """What the plan of a job says. All are None where no plan can be made, as on a CPU."""

    peak_bytes: int | None = None
    """What the run needs on the card."""
    card_bytes: int | None = None
    """What the run may fill of the card, were it empty."""
    free_bytes: int | None = None
    """What nobody has of it now."""
    advice: str = ""
    """What to change where it does not fit an empty card."""


class Weighing:
    """The plan of one job, made in a process of its own: it imports torch, and looks at the card."""

    def __init__(self, job: int, arguments: Sequence[str]) -> None:
        """`arguments` are the recipe and its options, of the job with this number."""
        self.job = job
        self.process = subprocess.Popen([sys.executable, "-m", "lowmem_grpo.jobs.weigh", *arguments], text=True,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def found(self) -> Weighed | None:
        """The plan; None while it is being made."""
        if self.process.poll() is None:
            return None
        said = (self.process.stdout.read() if self.process.stdout else "").strip().splitlines()
        try:
            return Weighed(**json.loads(said[-1]))
        except (IndexError, ValueError, TypeError):
            return Weighed()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def obstacle(job: Job, plan: Weighed | None, live: Sequence[Job], reserved: float) -> str:
    """Why a job cannot start now, in words; "" where it can. `reserved` is the share of the card that the server's own
    model has."""
    names = [f"job {other.id}" for other in live] + (["the model that is served"] if reserved else [])
    free = 1.0 - reserved - sum(other.share for other in live)
    if job.share > free + TINY:
        have = "has" if len(names) == 1 else "have"
        return (f"waits for {' and '.join(names)}, which {have} {1.0 - free:.0%} of the card; it asks for "
                f"{job.share:.0%}")
    if plan is None:
        return "its memory is being planned"
    if plan.peak_bytes is None or plan.free_bytes is None or plan.peak_bytes <= plan.free_bytes:
        return ""
    return (f"needs {size_text(plan.peak_bytes)}, and {size_text(plan.free_bytes)} of the card are free: another "
            "program has the rest")


def too_large(plan: Weighed, job: Job) -> str:
    """What is wrong with a job that does not fit its share of an empty card; "" where it does."""
    if plan.peak_bytes is None or plan.card_bytes is None or plan.peak_bytes <= plan.card_bytes:
        return ""
    share = f" ({job.share:.0%} of it)" if job.share < 1 else ""
    return (f"the plan says that it needs {size_text(plan.peak_bytes)}, and it may fill {size_text(plan.card_bytes)} "
            f"of this card{share}. {plan.advice}").rstrip()


def to_text(plan: Weighed) -> str:
    """One line of JSON."""
    values: dict[str, Any] = vars(plan)
    return json.dumps(values)
