"""`Dispatcher`: starts the next job when the GPU has room for it, and records how jobs ended.

`python -m lowmem_grpo.server.jobs.dispatcher RECIPE [key=value ...]` is the first command of each job: it waits until
the GPU has enough free memory for the recipe."""

import errno
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from lowmem_grpo.models.card_check import driver_version
from lowmem_grpo.runs.records import SUMMARY
from lowmem_grpo.server.jobs import keeper
from lowmem_grpo.server.jobs.queue import DONE, FAILED, RUNNING, STOPPED, STOPPING, WAITING, Job, JobQueue, JobRequest
from lowmem_grpo.server.page.run_follower import json_file, log_tail
from lowmem_grpo.utils import size_text

logger = logging.getLogger(__name__)
PLANNED = "planned.json"  # in a job's folder: peak_bytes, and why it waits
TOO_LARGE = 75  # exit status
COMMAND = (f'"$0" -m lowmem_grpo.server.jobs.dispatcher "$@" 2>/dev/null; [ $? != {TOO_LARGE} ] || exit {TOO_LARGE}; '
           'exec "$0" -m lowmem_grpo run "$@"')  # for the shell; a job whose planning fails runs all the same
EVERY = 0.5  # seconds between polls
COMES_UP = 20.0  # seconds that a keeper may need to take its lock
AGAIN = 30.0  # seconds until a job that found no room looks again
MOST_GOES = 5  # most starts of a job whose process vanishes each time
LOST = "its process ended without a word (was the machine started again?)"


class Dispatcher:
    """The thread that starts jobs. All state is on the disk, so that a restarted server continues."""

    def __init__(self, queue: JobQueue, recipes: Path | None = None) -> None:
        """`recipes` is the folder of recipe files that jobs may name."""
        self.queue, self.recipes, self.closing = queue, recipes and recipes.resolve(), threading.Event()
        self.thread = threading.Thread(target=self.work, name="lowmem-grpo jobs", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        """End the thread. Running jobs continue."""
        self.closing.set()
        self.thread.join()

    def work(self) -> None:
        said = ""
        while not self.closing.wait(EVERY):
            try:
                self.poll()
                said = ""
            except BaseException as error:  # such as a full disk: the jobs are intact, so try again
                if said != (said := f"{type(error).__name__}: {error}"):  # twice a second would fill the log
                    logger.warning("jobs: %s; trying again", said, exc_info=not isinstance(error, OSError))

    def poll(self) -> None:
        """Record what became of running jobs, then start waiting jobs in order until one does not fit on the GPU."""
        for job in self.queue.live():
            try:
                self.check_run(job)
            except (LookupError, TypeError, ValueError, OverflowError) as error:  # the job wrote its files itself
                self.queue.end_job(job, FAILED, f"its files cannot be read ({type(error).__name__}: {error})")
        why = ""
        for job in self.queue.waiting():
            if not (why := "waits for the jobs before it in the queue" if why else self.why_not(job)):
                self.start_run(job)
            elif job.why != why:
                self.queue.change(job, why=why)

    def check_run(self, job: Job) -> None:
        """Record a running job's planned memory, its end or its disappearance, and forward a request to stop."""
        folder = self.queue.folder_of(job)
        if job.state == STOPPING:
            keeper.ask_to_stop(folder)
        elif (told := {"peak_bytes": None, "why": ""} | json_file(folder / PLANNED)) != {
                "peak_bytes": job.peak_bytes, "why": job.why}:
            self.queue.change(job, peak_bytes=told["peak_bytes"], why=told["why"])
        # checked before ENDED is read: a keeper writes it just before it exits
        is_gone = time.time() - (job.began or 0.0) > COMES_UP and not keeper.is_alive(folder)
        if end := json_file(folder / keeper.ENDED):
            self.record_end(job, end["code"], end["why"])
        elif is_gone:
            self.record_loss(job)

    def record_end(self, job: Job, code: int, why: str | None) -> None:
        """Record the end of a run with exit status `code`, and `why` it was stopped (None: it ended by itself)."""
        if why is not None:
            self.queue.end_job(job, STOPPED, f"{why}; `lowmem-grpo resume {job.id}` goes on", code)
        elif code == 0:
            self.queue.end_job(job, DONE, "", code)
        else:  # the last line of a log usually names the error
            lines = log_tail(self.queue.folder_of(job) / keeper.LOG).strip().splitlines() or ["it ended"]
            cause = f"{lines[-1].strip()[:300]} ({f'signal {-code}' if code < 0 else f'exit status {code}'})"
            self.queue.end_job(job, FAILED, f"{cause}; `lowmem-grpo logs {job.id}` says more", code)

    def record_loss(self, job: Job) -> None:
        """Requeue a job whose processes vanished. End the job instead if its run had finished, if the job was to stop,
        or after MOST_GOES starts."""
        summary = self.queue.folder_of(job) / "run" / SUMMARY
        if (summary.exists() and summary.stat().st_mtime > (job.began or 0.0)
                and json_file(summary).get("status") == "finished"):
            self.queue.end_job(job, DONE, "")
        elif job.state == STOPPING:
            self.queue.end_job(job, STOPPED, f"{LOST}; `lowmem-grpo resume {job.id}` goes on")
        elif job.goes >= MOST_GOES:
            self.queue.end_job(job, FAILED, f"{LOST}, {job.goes} times")
        else:
            self.queue.change(job, state=WAITING, why=f"{LOST}; it goes on from its last checkpoint", resume=True)

    def why_not(self, job: Job) -> str:
        """Return why a job must wait; "" if its share of the GPU is free."""
        live = self.queue.live()
        taken = sum(other.share for other in live)
        if job.share + taken < 1.000001:  # shares 0.3, 0.3 and 0.4 add up to one
            return ""
        names = " and ".join(f"job {other.id}" for other in live)
        return (f"waits for {names}, which {'has' if len(live) == 1 else 'have'} {taken:.0%} of the card; it asks for "
                f"{job.share:.0%}")

    def start_run(self, job: Job) -> None:
        """Start a job. One that cannot be started fails, so that those behind it are not held up. OSError, and the job
        waits, if the disk is full."""
        try:
            JobRequest.from_json({"recipe": job.recipe, "options": job.options})  # an older version took any
            self.start_command(job)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (None, errno.ENOSPC, errno.EDQUOT):  # None: the database
                raise
            self.queue.end_job(self.queue.one(job.id), FAILED, f"it could not be started ({error})")
            logger.warning("job %d could not be started", job.id, exc_info=True)

    def start_command(self, job: Job) -> None:
        """Mark a job as running in the database, then start it, unless it was cancelled in the meantime."""
        folder = self.queue.folder_of(job)
        folder.mkdir(parents=True, exist_ok=True)
        for old in (keeper.ENDED, keeper.STOP, PLANNED):
            (folder / old).unlink(missing_ok=True)
        if self.queue.start_job(job).state == RUNNING:
            recipe = str(self.recipes / job.recipe) if self.recipes and job.recipe.endswith(".py") else job.recipe
            own = [f"output_dir={folder / 'run'}"]
            own += [f"card_share={job.share:g}"] if job.share < 1 else []
            own += ["resume=true"] if job.resume and (folder / "run").is_dir() else []
            command = ["sh", "-c", COMMAND, sys.executable, recipe, *job.options, *own]
            keeper.start_keeper(folder, command, job.time_limit)
            logger.info("job %d (%s) begins", job.id, job.recipe)


def wait_for_room(recipe: str, arguments: list[str]) -> None:
    """Wait until the GPU has enough free memory for a recipe's planned peak, and write the plan to the file PLANNED.
    Without a GPU, or for a recipe without PRESETS, return at once. SystemExit if the peak exceeds the job's share of
    the GPU."""
    if driver_version() is None:
        return
    import torch

    from lowmem_grpo.memory.peaks import keep_to, this_card
    from lowmem_grpo.recipes.options import fill
    from lowmem_grpo.recipes.presets import planned, prepare
    from lowmem_grpo.recipes.recipe_file import find_recipe

    module: Any = find_recipe(recipe)
    if not hasattr(module, "PRESETS"):
        return
    setup = prepare(fill(module.OPTIONS, arguments), module.DEFAULTS, module.PRESETS)
    keep_to(setup.card_share)
    card = this_card(torch.device("cuda"))
    plan = planned(setup, card)
    if plan.peak > card.budget:
        share = f" ({setup.card_share:.0%} of it)" if setup.card_share < 1 else ""
        print(f"the plan says that it needs {size_text(plan.peak)}, and it may fill {size_text(card.budget)} of this "
              f"card{share}. {'; '.join(plan.advice)}")
        raise SystemExit(TOO_LARGE)
    shell = os.getppid()
    while os.getppid() == shell:  # a job that lost its keeper is stopped by a signal to the shell alone
        free = torch.cuda.mem_get_info()[0]
        why = "" if plan.peak <= free else (f"needs {size_text(plan.peak)}, and {size_text(free)} of the card are "
                                            "free: another program has the rest")
        told = json.dumps({"peak_bytes": plan.peak, "why": why})
        (Path(setup.config.output_dir).parent / PLANNED).write_text(told, encoding="utf-8")
        if not why:
            return
        time.sleep(AGAIN)


if __name__ == "__main__":
    wait_for_room(sys.argv[1], sys.argv[2:])
