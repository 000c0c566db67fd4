"""Environments work in threads; none that hangs holds the others up."""

import asyncio
import threading
import time
from typing import Any

import pytest

from lowmem_grpo.environments.workers import Job, Workers


def all_of(workers: Workers) -> dict[int, Job]:
    found: dict[int, Job] = {}
    while workers.running:
        found |= {job.key: job for job in workers.collect(wait=True)}
    return found


@pytest.fixture
def workers() -> Any:
    made = Workers(most=4)
    yield made
    made.close()


def test_sixteen_jobs_of_four_threads_come_back_with_their_results(workers: Workers) -> None:
    for key in range(16):
        workers.submit(key, lambda job, key=key: job.call(lambda: key * key, (), {}), 5)  # type: ignore[misc]
    assert {key: job.result for key, job in all_of(workers).items()} == {key: key * key for key in range(16)}
    assert workers.threads == 4


def test_who_waits_collects_those_too_that_end_just_behind_the_first(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem_grpo.environments.workers.TOGETHER", 10.0)
    for key in range(4):
        workers.submit(key, lambda job, key=key: time.sleep(0.02 * key), 5)  # type: ignore[misc]
    began = time.monotonic()
    assert {job.key for job in workers.collect(wait=True)} == set(range(4)) and time.monotonic() - began < 5
    assert not workers.running, "and nobody waits for more than there are"


def test_a_call_that_hangs_is_late_and_its_thread_is_replaced(workers: Workers) -> None:
    release = threading.Event()
    for key in range(4):
        workers.submit(key, lambda job: job.call(release.wait, (20,), {}), 0.2)
    workers.submit(9, lambda job: "done", 5)  # waits for a thread until one is given up
    began = time.monotonic()
    found = all_of(workers)
    assert time.monotonic() - began < 3
    assert found[9].result == "done" and all(isinstance(found[key].error, TimeoutError) for key in range(4))
    release.set()
    time.sleep(0.05)
    assert not workers.collect(wait=False)  # what they say now is dropped


def test_async_calls_share_a_loop_and_have_the_same_limit(workers: Workers) -> None:
    async def slow(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "slept"

    workers.submit(0, lambda job: job.call(slow, (0.01,), {}), 5)
    workers.submit(1, lambda job: job.call(slow, (30,), {}), 0.1)
    found = all_of(workers)
    assert found[0].result == "slept" and isinstance(found[1].error, TimeoutError)


def test_an_error_is_kept_for_whoever_collects_the_job(workers: Workers) -> None:
    workers.submit(0, lambda job: 1 // 0, 5)
    assert isinstance(all_of(workers)[0].error, ZeroDivisionError)


def test_nothing_to_wait_for_is_an_answer_at_once(workers: Workers) -> None:
    assert workers.collect(wait=True) == [] and workers.collect(wait=False) == []
