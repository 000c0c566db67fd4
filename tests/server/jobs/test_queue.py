"""The queue keeps what it was told, over a restart too; what somebody asks it for is refused by the wrong field."""

from pathlib import Path

import pytest
from tables import every_row

from lowmem_grpo.cli.jobs import seconds_of
from lowmem_grpo.server.jobs.queue import DONE, RUNNING, STOPPED, WAITING, JobQueue, JobRequest
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


def test_only_a_job_that_ran_is_resumed_from_its_checkpoint(queue: JobQueue) -> None:
    ran, never = submit(queue), submit(queue)
    queue.change(queue.start_job(queue.one(ran)), state=WAITING, resume=True)
    assert queue.cancel(ran).state == STOPPED and queue.resume(ran, []).resume
    queue.cancel(never)
    with pytest.raises(ValueError, match="is cancelled already"):
        queue.cancel(never)
    assert not queue.resume(never, []).resume


def test_only_a_job_that_is_over_is_resumed_and_with_further_options(queue: JobQueue) -> None:
    number = submit(queue, options=["max_steps=3"])
    with pytest.raises(ValueError, match="is waiting; only one that is done"):
        queue.resume(number, [])
    queue.end_job(queue.start_job(queue.one(number)), DONE, "", 0)
    job = queue.resume(number, ["max_steps=6"])
    assert (job.state, job.resume, job.options) == (WAITING, True, ["max_steps=3", "max_steps=6"])


REFUSED = {
    "recipe is '../x.py'; it must be the name of a recipe": {"recipe": "../x.py"},
    "recipe is 3": {"recipe": 3},
    "a job has recipe, and if you like options, .*; sent was recipe, prio": {"recipe": "arithmetic", "prio": 3},
    "a job has recipe, .*; sent was options": {"options": []},
    "options is 'max_steps=3'; it must be a list": {"recipe": "arithmetic", "options": "max_steps=3"},
    "the queue sets output_dir itself": {"recipe": "arithmetic", "options": ["--output-dir=/tmp"]},
    "the queue sets resume itself": {"recipe": "arithmetic", "options": ["resume=true"]},
    "priority is 1.5": {"recipe": "arithmetic", "priority": 1.5},
    "priority is True": {"recipe": "arithmetic", "priority": True},
    "time_limit is 0; it must be seconds above 0, or None": {"recipe": "arithmetic", "time_limit": 0},
    "time_limit is 1000": {"recipe": "arithmetic", "time_limit": 10**30},
    "share is 1.5": {"recipe": "arithmetic", "share": 1.5},
    "share is nan": {"recipe": "arithmetic", "share": float("nan")},
}


@every_row("words", REFUSED)
def test_a_wrong_field_is_named(words: str) -> None:
    with pytest.raises(ValueError, match=words):
        JobRequest.from_json(REFUSED[words])


def test_times_are_read_and_other_texts_refused() -> None:
    assert [seconds_of(text) for text in ("90", "90s", "45m", "2h", "1h30m")] == [90, 90, 2700, 7200, 5400]
    for text in ("", "0", "soon", "-3", "1.5h", "h"):
        with pytest.raises(ValueError, match="the time"):
            seconds_of(text)
