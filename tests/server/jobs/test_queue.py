"""The queue keeps what it was told: order, owners, and states over a restart."""

from pathlib import Path

import pytest

from lowmem_grpo.server.jobs.queue import (
    CANCELLED,
    DONE,
    RUNNING,
    STOPPED,
    STOPPING,
    WAITING,
    JobQueue,
    JobRequest,
    NoSuchJobError,
)
from lowmem_grpo.server.server_dir import Database


@pytest.fixture
def queue(tmp_path: Path) -> JobQueue:
    return JobQueue(Database(tmp_path / "server.sqlite"), tmp_path / "jobs")


def submit(queue: JobQueue, owner: str = "me", **fields: object) -> int:
    return queue.submit(JobRequest.from_json({"recipe": "arithmetic", **fields}), owner).id


def test_higher_priorities_are_first_then_the_older(queue: JobQueue) -> None:
    first, second, urgent = submit(queue), submit(queue), submit(queue, priority=5)
    assert [job.id for job in queue.waiting()] == [urgent, first, second]


def test_another_server_finds_everything(queue: JobQueue, tmp_path: Path) -> None:
    number = submit(queue, options=["max_steps=3"], time_limit=60.0, share=0.25)
    queue.start_job(queue.one(number))
    queue.database.close()
    again = JobQueue(Database(tmp_path / "server.sqlite"), tmp_path / "jobs")
    job = again.one(number)
    assert (job.options, job.time_limit, job.share, job.state, job.goes) == (["max_steps=3"], 60.0, 0.25, RUNNING, 1)


def test_jobs_of_others_are_not_seen(queue: JobQueue) -> None:
    mine, theirs = submit(queue, "me"), submit(queue, "them")
    assert [job.id for job in queue.all("me")] == [mine]
    for call in (queue.one, queue.cancel):
        with pytest.raises(NoSuchJobError, match=f"no job {theirs}"):
            call(theirs, "me")
    with pytest.raises(NoSuchJobError):
        queue.resume(theirs, [], "me")
    assert queue.one(theirs).state == WAITING


def test_a_waiting_job_is_taken_back_and_a_running_one_is_asked_to_stop(queue: JobQueue) -> None:
    waits, runs = submit(queue), submit(queue)
    queue.start_job(queue.one(runs))
    assert queue.cancel(waits).state == CANCELLED
    assert queue.cancel(runs).state == STOPPING
    with pytest.raises(ValueError, match="is cancelled already"):
        queue.cancel(waits)


def test_a_job_that_waits_for_its_second_go_keeps_what_it_has(queue: JobQueue) -> None:
    number = submit(queue)
    queue.change(queue.start_job(queue.one(number)), state=WAITING, resume=True)
    assert queue.cancel(number).state == STOPPED
    assert queue.resume(number, []).resume


def test_only_a_job_that_is_over_is_resumed_and_with_further_options(queue: JobQueue) -> None:
    number = submit(queue, options=["max_steps=3"])
    with pytest.raises(ValueError, match="is waiting; only one that is done"):
        queue.resume(number, [])
    queue.end_job(queue.start_job(queue.one(number)), DONE, "", 0)
    job = queue.resume(number, ["max_steps=6"])
    assert (job.state, job.resume, job.options) == (WAITING, True, ["max_steps=3", "max_steps=6"])
    with pytest.raises(ValueError, match="queue sets output_dir"):
        queue.resume(queue.end_job(job, DONE, "", 0).id, ["output_dir=x"])


def test_a_job_that_never_ran_begins_anew(queue: JobQueue) -> None:
    number = submit(queue)
    queue.cancel(number)
    assert not queue.resume(number, []).resume
