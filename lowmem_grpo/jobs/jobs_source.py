"""The jobs of a server, as its page shows them."""

from dataclasses import replace
from pathlib import Path

from lowmem_grpo.jobs import process
from lowmem_grpo.jobs.job import LIVE, OVER, STOPPING, Job
from lowmem_grpo.jobs.queue import JobQueue, NoSuchJobError
from lowmem_grpo.service.page.sources import Listed, has_adapter
from lowmem_grpo.service.users import JOBS, User
from lowmem_grpo.views.dashboard.runs_folder import is_run, one_run

MOST_LISTED = 500


class JobsSource:
    """A user sees their own jobs, the server's owner all of them, and a key without the right to jobs none."""

    def __init__(self, queue: JobQueue, title: str) -> None:
        self.queue, self.title = queue, title

    def all(self, user: User) -> list[Listed]:
        jobs = self.queue.all(whose(user)) if user.may(JOBS) else []
        jobs = sorted(jobs, key=lambda job: (job.state not in LIVE, -job.id))[:MOST_LISTED]
        return [self.listed(job, user) for job in jobs]

    def one(self, user: User, name: str) -> Listed | None:
        job = self.job(user, name)
        if job is None:
            return None
        path, listed = self.run_of(job), self.listed(job, user)
        export = ("export",) if has_adapter(path) else ()
        return replace(listed, actions=listed.actions + export, run_state=self.run_state(job, path))

    def job(self, user: User, name: str) -> Job | None:
        """The job of this number; None where it is none, or another user's."""
        if not user.may(JOBS) or not (name.isascii() and name.isdecimal() and len(name) < 16):
            return None
        try:
            return self.queue.one(int(name), whose(user))
        except NoSuchJobError:
            return None

    def folder(self, user: User, name: str) -> tuple[Path, Path | None] | None:
        job = self.job(user, name)
        return None if job is None else (self.run_of(job), self.queue.folder_of(job) / process.LOG)

    def act(self, user: User, name: str, action: str) -> None:
        job = self.job(user, name)
        if job is None:
            raise NoSuchJobError(f"there is no job {name!r}")
        if action == "stop":
            self.queue.cancel(job.id, whose(user))
        elif action == "resume":
            self.queue.resume(job.id, [], whose(user))
        else:
            raise ValueError(f"a job can be stopped, resumed and exported; {action!r} is none of these")

    def run_of(self, job: Job) -> Path:
        """The folder of its run."""
        return self.queue.folder_of(job) / process.FOLDER

    def listed(self, job: Job, user: User) -> Listed:
        """A job in the list."""
        actions = ("resume",) if job.state in OVER else () if job.state == STOPPING else ("stop",)
        asked_by = "" if job.owner == user.name else job.owner
        told = ", ".join(filter(None, (asked_by, " ".join(job.options), job.why)))
        when = job.ended or job.began or job.came
        return Listed(str(job.id), f"{job.id} {job.recipe}", job.state, job.state, told, when, actions,
                      can_show=is_run(self.run_of(job)))

    def run_state(self, job: Job, path: Path) -> str:
        """What its run does, beside what its summary says."""
        if job.state in LIVE:
            return "running"
        run = one_run(path.parent, path.name)
        return "" if run is None or run.state == "running" else run.state


def whose(user: User) -> str | None:
    """Whose jobs a user sees; None for all."""
    return None if user.is_owner else user.name
