"""`Dispatcher`: starts the next job when the GPU has room for it, and records how jobs ended.

`python -m lowmem_grpo.server.jobs.dispatcher RECIPE [key=value ...]` prints a recipe's plan for this GPU as a line of
JSON."""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem_grpo.runs.records import SUMMARY
from lowmem_grpo.server.jobs import keeper
from lowmem_grpo.server.jobs.queue import DONE, FAILED, STOPPED, STOPPING, WAITING, Job, JobQueue
from lowmem_grpo.server.page.run_follower import json_file, log_tail
from lowmem_grpo.utils import size_text, time_text

logger = logging.getLogger(__name__)
TINY = 1e-6  # rounding tolerance: shares 0.3, 0.3 and 0.4 add up to one
EVERY = 0.5  # seconds between polls
COMES_UP = 20.0  # seconds that a keeper may need to take its lock
AGAIN = 30.0  # seconds until a job that found no room is planned again
MOST_GOES = 5  # most starts of a job whose process vanishes each time
LOST = "its process ended without a word (was the machine started again?)"


@dataclass(frozen=True)
class JobPlan:
    """The GPU memory that a job's plan predicts. All are None if no plan can be made, as on a CPU."""

    peak_bytes: int | None = None  # peak of the run
    card_bytes: int | None = None  # that the run may use of an empty GPU
    free_bytes: int | None = None  # free on the GPU now
    advice: str = ""  # what to change if the run does not fit an empty GPU


class Planning:
    """A subprocess that plans one job, since planning imports torch and opens a CUDA context."""

    def __init__(self, job: int, arguments: Sequence[str]) -> None:
        """`job` is the job's number; `arguments` are its recipe and options."""
        self.job, self.began = job, time.time()
        command = [sys.executable, "-m", "lowmem_grpo.server.jobs.dispatcher", *arguments]
        self.process = subprocess.Popen(command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL)
        self.plan: JobPlan | None = None

    def result(self) -> JobPlan | None:
        """Return the plan; None while the process runs, and an empty plan if it failed."""
        if self.plan is None and self.process.poll() is not None:
            lines = self.process.communicate()[0].strip().splitlines()
            try:
                self.plan = JobPlan(**json.loads(lines[-1]))
            except (IndexError, ValueError, TypeError):
                self.plan = JobPlan()
        return self.plan

    def close(self) -> None:
        with self.process:  # waits, and closes the pipe
            self.process.kill()


def obstacle(job: Job, plan: JobPlan | None, live: Sequence[Job]) -> str:
    """Return the reason why a job cannot start now; "" if it can."""
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
    """Return the error of a job that would not fit its share of an empty GPU; "" if it fits."""
    if plan.peak_bytes is None or plan.card_bytes is None or plan.peak_bytes <= plan.card_bytes:
        return ""
    share = f" ({job.share:.0%} of it)" if job.share < 1 else ""
    return (f"the plan says that it needs {size_text(plan.peak_bytes)}, and it may fill {size_text(plan.card_bytes)} "
            f"of this card{share}. {plan.advice}").rstrip()


def plan_recipe(recipe: str, arguments: list[str]) -> JobPlan:
    """Return a recipe's plan on this GPU; an empty plan without a GPU or if the recipe has no presets."""
    import torch

    if not torch.cuda.is_available():
        return JobPlan()
    from lowmem_grpo.memory.peaks import keep_to, this_card
    from lowmem_grpo.recipes.options import fill
    from lowmem_grpo.recipes.presets import planned, prepare
    from lowmem_grpo.recipes.recipe_file import find_recipe

    module: Any = find_recipe(recipe)
    if not hasattr(module, "PRESETS"):
        return JobPlan()
    setup = prepare(fill(module.OPTIONS, arguments), module.DEFAULTS, module.PRESETS)
    keep_to(setup.card_share)
    card = this_card(torch.device("cuda"))
    plan = planned(setup, card)
    return JobPlan(plan.peak, card.budget, torch.cuda.mem_get_info()[0], "; ".join(plan.advice))


class Dispatcher:
    """The thread that starts jobs. Its state is on the disk, so that the next server continues where this one ended."""

    def __init__(self, queue: JobQueue, recipes: Path | None = None, has_card: bool = False) -> None:
        """`recipes` is the folder of recipe files that jobs may name. Without a GPU only shares limit jobs."""
        self.queue, self.recipes, self.has_card = queue, recipes and recipes.resolve(), has_card
        self.planning: Planning | None = None  # for the first job in line
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.work, name="lowmem-grpo jobs", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        """End the thread. Running jobs continue, and the next server finds them."""
        self.closing.set()
        self.thread.join()
        self.drop_plan()

    def work(self) -> None:
        while not self.closing.wait(EVERY):
            try:
                self.poll()
            except OSError as error:  # such as a full disk: the jobs are intact, so try again
                logger.warning("jobs: %s", error)

    def poll(self) -> None:
        """Record the jobs that ended, then start waiting jobs in order until one has no room."""
        for job in self.queue.live():
            self.check_run(job)
        why, waiting = "", self.queue.waiting()
        while waiting and not (why := self.why_not(waiting[0])):
            self.start_run(waiting.pop(0))
        for place, job in enumerate(waiting):
            words = f"{'one job is' if place == 1 else f'{place} jobs are'} before it in the queue" if place else why
            if job.why != words:
                self.queue.change(job, why=words)

    def check_run(self, job: Job) -> None:
        """Record the end or loss of a live job, and pass on a request to stop."""
        folder = self.queue.folder_of(job)
        if job.state == STOPPING:
            keeper.ask_to_stop(folder)
        # checked before ENDED is read: a keeper writes it just before it exits
        is_gone = time.time() - (job.began or 0.0) > COMES_UP and not keeper.is_alive(folder)
        if end := json_file(folder / keeper.ENDED):
            self.record_end(job, end["code"], end["why"])
        elif is_gone:
            self.record_loss(job)

    def record_end(self, job: Job, code: int, why: str | None) -> None:
        """Record the end of a run with exit status `code`; `why` it was told to stop, or None if it was not."""
        if why is not None:
            limit = f"its time limit of {time_text(job.time_limit or 0.0)} was over"
            cause = limit if why == keeper.BY_TIME else "stopped as asked"
            self.queue.end_job(job, STOPPED, f"{cause}; `lowmem-grpo resume {job.id}` goes on", code)
        elif code == 0:
            self.queue.end_job(job, DONE, "", code)
        else:
            cause = f"{self.last_line(job) or 'it ended'} ({f'signal {-code}' if code < 0 else f'exit status {code}'})"
            self.queue.end_job(job, FAILED, f"{cause}; `lowmem-grpo logs {job.id}` says more", code)

    def record_loss(self, job: Job) -> None:
        """Record the end of a job whose run and keeper vanished, from the run's summary; without one, requeue it."""
        summary = self.queue.run_of(job) / SUMMARY
        said = json_file(summary) if summary.exists() and summary.stat().st_mtime > (job.began or 0.0) else {}
        if said.get("status") == "finished":
            self.queue.end_job(job, DONE, "", None)
        elif said.get("status") == "failed":
            self.queue.end_job(job, FAILED, str(said.get("error"))[:300], None)
        elif job.state == STOPPING:
            self.queue.end_job(job, STOPPED, f"{LOST}; `lowmem-grpo resume {job.id}` goes on", None)
        elif job.goes >= MOST_GOES:
            self.queue.end_job(job, FAILED, f"{LOST}, {job.goes} times", None)
        else:
            self.queue.change(job, state=WAITING, why=f"{LOST}; it goes on from its last checkpoint", resume=True)

    def last_line(self, job: Job) -> str:
        """Return the last line of a job's log, which usually names the error."""
        lines = log_tail(self.queue.folder_of(job) / keeper.LOG).splitlines()
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")

    def why_not(self, job: Job) -> str:
        """Return why the next job cannot start; "" if it can. A job that would not fit an empty GPU fails here."""
        plan = self.plan_of(job) if self.has_card else JobPlan()
        if plan is not None and (words := too_large(plan, job)):
            self.queue.end_job(job, FAILED, words, None)
            return words
        return obstacle(job, plan, self.queue.live())

    def plan_of(self, job: Job) -> JobPlan | None:
        """Return the plan of the next job; None while it is made. An old one is given once more, then made anew, since
        another program may have ended meanwhile."""
        if self.planning is None or self.planning.job != job.id:
            self.drop_plan()
            self.planning = Planning(job.id, self.arguments_of(job))
        if (plan := self.planning.result()) is not None and time.time() - self.planning.began > AGAIN:
            self.drop_plan()
        if plan is not None and plan.peak_bytes != job.peak_bytes:
            self.queue.change(job, peak_bytes=plan.peak_bytes)
        return plan

    def drop_plan(self) -> None:
        if self.planning is not None:
            self.planning.close()
        self.planning = None

    def start_run(self, job: Job) -> None:
        """Start a job. The database is updated first; if a job is started twice, the keeper's lock ends the second."""
        job = self.queue.start_job(job)
        self.drop_plan()
        command = [sys.executable, "-m", "lowmem_grpo", "run", *self.arguments_of(job)]
        keeper.start_keeper(self.queue.folder_of(job), command, job.time_limit)
        logger.info("job %d (%s) begins", job.id, job.recipe)

    def arguments_of(self, job: Job) -> list[str]:
        """Return a job's recipe and options, with those that the queue sets itself."""
        run = self.queue.run_of(job)
        recipe = str(self.recipes / job.recipe) if self.recipes and job.recipe.endswith(".py") else job.recipe
        own = [f"output_dir={run}"]
        own += [f"card_share={job.share:g}"] if job.share < 1 else []
        own += ["resume=true"] if job.resume and run.is_dir() else []
        return [recipe, *job.options, *own]


if __name__ == "__main__":
    print(json.dumps(vars(plan_recipe(sys.argv[1], sys.argv[2:]))))
