"""Environments work in threads; none that hangs holds the others up."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lowmem_grpo.environments.workers import WorkerJob, Workers


def all_of(workers: Workers) -> dict[int, WorkerJob]:
    found: dict[int, WorkerJob] = {}
    while workers.running:
        found |= {job.key: job for job in workers.collect(wait=True)}
    return found


@pytest.fixture
def workers() -> Any:
    made = Workers(most=4)
    yield made
    made.close()


def test_who_waits_collects_those_too_that_end_just_behind_the_first(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem_grpo.environments.workers.TOGETHER", 60.0)
    done, first, waits = workers.done, threading.Event(), list[float]()

    def get(wait: bool, seconds: float) -> WorkerJob:
        waits.append(seconds)
        found = done.get(wait, seconds)
        first.set()
        return found

    monkeypatch.setattr(workers, "done", SimpleNamespace(get=get, put=done.put))
    for key in range(4):
        workers.submit(key, lambda job, key=key: key == 0 or first.wait(60), 60)  # type: ignore[misc]
    assert {job.key for job in workers.collect(wait=True)} == set(range(4))
    assert waits.count(60.0) == 3, "nobody waits for more than there are"


def test_a_call_that_hangs_is_late_and_its_thread_is_replaced(workers: Workers) -> None:
    release, hanging = threading.Event(), list[threading.Thread]()

    def hangs() -> None:
        hanging.append(threading.current_thread())
        release.wait(60)

    for key in range(4):
        workers.submit(key, lambda job: job.call(hangs, (), {}), 0.05)
    workers.submit(9, lambda job: "done", 60)  # waits for a thread until one is given up
    found = all_of(workers)
    assert found[9].result == "done" and all(isinstance(found[key].error, TimeoutError) for key in range(4))
    release.set()
    for thread in hanging:
        thread.join(60)
        assert not thread.is_alive()
    assert workers.done.empty(), "what they say now is dropped"


def test_async_calls_share_a_loop_and_have_the_same_limit(workers: Workers) -> None:
    async def loop_of(hangs: bool) -> asyncio.AbstractEventLoop:
        await (asyncio.Event().wait() if hangs else asyncio.sleep(0))
        return asyncio.get_running_loop()

    for key in range(2):
        workers.submit(key, lambda job: job.call(loop_of, (False,), {}), 60)
    workers.submit(2, lambda job: job.call(loop_of, (True,), {}), 0.05)
    found = all_of(workers)
    assert found[0].result is found[1].result is not None and isinstance(found[2].error, TimeoutError)
