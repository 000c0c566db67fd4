"""The room for a job: alone on the card, or beside others that share it. `python -m lowmem_grpo.jobs.admission RECIPE
[key=value ...]` prints what the plan of a recipe says for this card, as one line of JSON."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.jobs.queue import Job
from lowmem_grpo.units import size_text

TINY = 1e-6  # shares such as 0.3, 0.3 and 0.4 add up to one


@dataclass(frozen=True)
class JobPlan:
    """The memory that the plan of a job says. All are None where no plan can be made, as on a CPU."""

    peak_bytes: int | None = None  # that the run needs on the card
    card_bytes: int | None = None  # that the run may fill of the card, were it empty
    free_bytes: int | None = None  # that nobody has of it now
    advice: str = ""  # what to change where it does not fit an empty card


class Planning:
    """The plan of one job, made in a process of its own: it imports torch, and looks at the card."""

    def __init__(self, job: int, arguments: Sequence[str]) -> None:
        """`arguments` are the recipe and its options, of the job with this number."""
        self.job = job
        self.process = subprocess.Popen([sys.executable, "-m", "lowmem_grpo.jobs.admission", *arguments], text=True,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def result(self) -> JobPlan | None:
        if self.process.poll() is None:
            return None
        lines = self.process.communicate()[0].strip().splitlines()
        try:
            return JobPlan(**json.loads(lines[-1]))
        except (IndexError, ValueError, TypeError):
            return JobPlan()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def obstacle(job: Job, plan: JobPlan | None, live: Sequence[Job]) -> str:
    """Return why a job cannot start now, in words; "" where it can."""
    free = 1.0 - sum(other.share for other in live)
    if job.share > free + TINY:
        names = " and ".join(f"job {other.id}" for other in live)
        return (f"waits for {names}, which {'has' if len(live) == 1 else 'have'} {1.0 - free:.0%} of the card; it asks "
                f"for {job.share:.0%}")
    if plan is None:
        return "its memory is being planned"
    if plan.peak_bytes is None or plan.free_bytes is None or plan.peak_bytes <= plan.free_bytes:
        return ""
    return (f"needs {size_text(plan.peak_bytes)}, and {size_text(plan.free_bytes)} of the card are free: another "
            "program has the rest")


def too_large(plan: JobPlan, job: Job) -> str:
    """Return what is wrong with a job that does not fit its share of an empty card; "" where it does."""
    if plan.peak_bytes is None or plan.card_bytes is None or plan.peak_bytes <= plan.card_bytes:
        return ""
    share = f" ({job.share:.0%} of it)" if job.share < 1 else ""
    return (f"the plan says that it needs {size_text(plan.peak_bytes)}, and it may fill {size_text(plan.card_bytes)} "
            f"of this card{share}. {plan.advice}").rstrip()


def plan_recipe(recipe: str, arguments: list[str]) -> JobPlan:
    """Return a recipe's plan on this card; an empty one without a card, and for a recipe without presets."""
    import torch

    from lowmem_grpo.memory.peaks import keep_to, this_card
    from lowmem_grpo.recipes.options import fill
    from lowmem_grpo.recipes.planned import planned
    from lowmem_grpo.recipes.presets import prepare
    from lowmem_grpo.recipes.recipe_file import find_recipe

    module: Any = find_recipe(recipe) if torch.cuda.is_available() else None
    if not hasattr(module, "PRESETS"):
        return JobPlan()
    setup = prepare(fill(module.OPTIONS, arguments), module.DEFAULTS, module.PRESETS)
    keep_to(setup.card_share)
    card = this_card(torch.device("cuda"))
    plan = planned(setup, card)
    return JobPlan(plan.peak, card.budget, torch.cuda.mem_get_info()[0], "; ".join(plan.advice))


if __name__ == "__main__":
    print(json.dumps(vars(plan_recipe(sys.argv[1], sys.argv[2:]))))
