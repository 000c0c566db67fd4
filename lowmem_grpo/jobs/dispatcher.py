"""`Dispatcher`: starts the next job when it has room, and notes what became of those that ran."""

import logging
import threading
import time
from pathlib import Path

from lowmem_grpo.jobs import process
from lowmem_grpo.jobs.job import DONE, FAILED, STOPPED, STOPPING, Job
from lowmem_grpo.jobs.keeper import BY_ASKING, BY_TIME
from lowmem_grpo.jobs.queue import JobQueue
from lowmem_grpo.jobs.room import Weighed, Weighing, obstacle, too_large
from lowmem_grpo.runs.records import SUMMARY
from lowmem_grpo.units import time_text

logger = logging.getLogger(__name__)
EVERY = 0.5  # seconds between looks
COMES_UP = 20.0  # seconds in which a keeper takes its lock
AGAIN = 30.0  # seconds after which the card is looked at again for a job that found no room
MOST_GOES = 5  # starts of a job whose process vanishes each time
LOST = "its process ended without a word (was the machine started again?)"


class Dispatcher:
    """One thread beside the server. What it knows is in the queue and in the jobs' folders, so another server's
    dispatcher goes on where this one ended."""

    def __init__(
        self, queue: JobQueue, recipes: Path | None = None, reserved: float = 0.0, has_card: bool = False
    ) -> None:
        """`recipes` is the folder of recipe files that jobs may name; `reserved` is the share of the card that the
        server's own model has. Without a card no plans are made, and shares are those of the processor."""
        self.queue, self.recipes, self.reserved, self.has_card = queue, recipes, reserved, has_card
        self.weighing: Weighing | None = None
        self.plans: dict[int, tuple[Weighed, float]] = {}  # of jobs that wait, and when they were made
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.work, name="lowmem-grpo jobs", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        """End the thread. Jobs that run go on; the next server finds them."""
        self.closing.set()
        self.thread.join()
        if self.weighing is not None:
            self.weighing.close()

    def work(self) -> None:
        while not self.closing.wait(EVERY):
            try:
                self.look()
            except OSError as error:  # a full disk, say: the jobs are still there, and so will this thread be
                logger.warning("jobs: %s", error)

    def look(self) -> None:
        """One round: what ended is noted, then what has room is started."""
        for job in self.queue.live():
            self.look_at(job)
        for job in self.queue.waiting():
            if why := self.why_not(job):
                self.explain(job, why)
                break
            self.begin(job)

    def look_at(self, job: Job) -> None:
        """Whether a job that runs has ended, and how."""
        folder = self.queue.folder_of(job)
        if job.state == STOPPING:
            process.stop(folder)
        if (end := process.ended(folder)) is not None:
            self.note(job, end["code"], end["why"])
        elif time.time() - (job.began or 0.0) > COMES_UP and not process.is_alive(folder):
            self.lost(job)

    def note(self, job: Job, code: int, why: str | None) -> None:
        """Write down how a job ended that its keeper saw end."""
        if why in (BY_TIME, BY_ASKING):
            limit = f"its time limit of {time_text(job.time_limit or 0.0)} was over"
            self.queue.end(job, STOPPED, f"{limit if why == BY_TIME else 'stopped as asked'}; "
                                         f"`lowmem-grpo resume {job.id}` goes on", code)
        elif code == 0:
            self.queue.end(job, DONE, "", code)
        else:
            cause = f"signal {-code}" if code < 0 else f"exit status {code}"
            self.queue.end(job, FAILED, f"{self.last_words(job) or 'it ended'} ({cause}); `lowmem-grpo logs {job.id}` "
                                        "says more", code)

    def lost(self, job: Job) -> None:
        """A job whose process is gone, and whose keeper too: what the run itself wrote says whether it was over."""
        summary = self.queue.folder_of(job) / process.FOLDER / SUMMARY
        known = process.read(summary) or {}
        status = known.get("status") if known and summary.stat().st_mtime > (job.began or 0.0) else None
        if status == "finished":
            self.queue.end(job, DONE, "", None)
        elif status == "failed":
            self.queue.end(job, FAILED, str(known.get("error"))[:300], None)
        elif job.state == STOPPING:
            self.queue.end(job, STOPPED, f"{LOST}; `lowmem-grpo resume {job.id}` goes on", None)
        elif job.goes >= MOST_GOES:
            self.queue.end(job, FAILED, f"{LOST}, {job.goes} times", None)
        else:
            self.queue.again(job, f"{LOST}; it goes on from its last checkpoint")

    def last_words(self, job: Job) -> str:
        """The last line of a job's log, which names the error."""
        try:
            lines = (self.queue.folder_of(job) / process.LOG).read_bytes()[-4096:].decode(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")

    def why_not(self, job: Job) -> str:
        """Why the next job does not start; "" where it does. One that fits no card at all is ended here."""
        plan, made = self.plans.get(job.id, (None if self.has_card else Weighed(), 0.0))
        found = obstacle(job, plan, self.queue.live(), self.reserved)
        if plan is None:
            self.weigh(job)
        elif words := too_large(plan, job):
            self.queue.end(job, FAILED, words, None)
            return words
        elif found and time.time() - made > AGAIN:  # another program may have ended meanwhile
            self.plans.pop(job.id, None)
        return found

    def weigh(self, job: Job) -> None:
        """Have the plan of a job made, and take it when it is there."""
        if self.weighing is None or self.weighing.job != job.id:
            if self.weighing is not None:
                self.weighing.close()
            self.weighing = Weighing(job.id, process.arguments_of(job, self.queue.folder_of(job), self.recipes))
        if (plan := self.weighing.found()) is not None:
            self.plans[job.id], self.weighing = (plan, time.time()), None
            self.queue.change(job, peak_bytes=plan.peak_bytes)

    def explain(self, blocked: Job, why: str) -> None:
        """Say of every job that waits what it waits for: the first one has no room, and the others are behind it."""
        for place, job in enumerate(self.queue.waiting()):
            ahead = "one job is" if place == 1 else f"{place} jobs are"
            self.queue.explain(job, why if job.id == blocked.id else f"{ahead} before it in the queue")

    def begin(self, job: Job) -> None:
        """Start it. That it begins is written first: a job that is started twice finds its folder taken."""
        begun = self.queue.began(job)
        self.plans.pop(job.id, None)
        process.start(begun, self.queue.folder_of(job), self.recipes)
        logger.info("job %d (%s) begins", job.id, job.recipe)
