"""Processes that find each other and wait for each other; here each is a thread, with a store in memory."""

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from lowmem_grpo.train.rendezvous import Pulse, RankError, part_of_start
from tests.attacks.ranked_run import Ranked

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.05)


@contextmanager
def pulses(count: int, **settings: float) -> Iterator[list[Pulse]]:
    store = HashStore()

    def make(rank: int) -> Pulse:
        return Pulse(ProcessGroupGloo(store, rank, count, LONG), rank, count,
                     **{"pulse": 0.02, "patience": 60.0} | settings)

    with ThreadPoolExecutor(count) as pool:
        made = list(pool.map(make, range(count)))
    yield made
    for pulse in made:
        pulse.close()


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each returns, or the error that it raises."""
    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RankError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


# Waiting for each other


def test_each_hears_what_all_tell() -> None:
    with pulses(3) as three:
        for number in range(20):
            told = at_once(*(partial(pulse.meet, "a step", 10 * number + pulse.rank) for pulse in three))
            assert told == [[10 * number + rank for rank in range(3)]] * 3


def test_a_slow_rank_is_waited_for_as_long_as_it_gives_signs_of_life() -> None:
    with pulses(2) as (fast, slow):
        rounds, exchange, enough = [0], slow.exchange, threading.Event()

        def counted(seconds: float) -> None:
            exchange(seconds)
            rounds[0] += 1
            if rounds[0] > 50:
                enough.set()

        slow.exchange = counted  # type: ignore[method-assign]

        def late() -> list[int]:
            assert enough.wait(60)
            return slow.meet("a step", 2)

        assert at_once(partial(fast.meet, "a step", 1), late) == [[1, 2]] * 2


def test_a_rank_that_gives_no_sign_of_life_is_named() -> None:
    with pulses(2, patience=0.5) as (pulse, dead):
        dead.close()
        with pytest.raises(RankError, match=r"rank 1 is lost: no sign of life for 0 s while rank 0 waits for it"):
            pulse.meet("the step")
        with pytest.raises(RankError, match="rank 1 is lost"):
            pulse.meet("the next one")


def test_a_failure_reaches_the_others_with_its_reason() -> None:
    with pulses(3) as (first, other, third):
        found = at_once(partial(first.meet, "the step"), partial(third.meet, "the step"),
                        lambda: other.fail(ZeroDivisionError("a reward divided by zero")))
        for error in found[:2]:
            assert isinstance(error, RankError)
            assert str(error) == "rank 1 has failed: ZeroDivisionError: a reward divided by zero"
        with pytest.raises(RankError):
            other.meet("the step")


def test_ranks_that_do_different_things_are_told_which() -> None:
    with pulses(2) as (pulse, other):
        found = at_once(lambda: pulse.meet("the evaluation"), lambda: other.meet("the gradients"))
        assert all("has come to" in str(error) and "evaluation" in str(error) and "gradients" in str(error)
                   for error in found)


def test_an_error_that_came_from_another_rank_is_not_told_again() -> None:
    with pulses(2) as (pulse, other):
        other.fail(RankError("rank 0 is lost"))
        assert at_once(lambda: pulse.meet("a step", 1), lambda: other.meet("a step", 2)) == [[1, 2]] * 2


@pytest.mark.parametrize("failure", ["x" * 10_000, "é\n" * 5_000, "😀" * 5_000])
def test_a_failure_of_any_length_is_told(failure: str) -> None:
    with pulses(2) as (pulse, other):
        found = at_once(lambda: pulse.meet("a step of the run"), lambda: other.fail(ValueError(failure)))
        assert str(found[0]).startswith(f"rank 1 has failed: ValueError: {failure[:400]}")


# A start over a store in which a former start has left its things


def started(store: HashStore, count: int, late: int) -> list[str]:
    """What each process reads in its part, where it finds what the first one has written."""
    others_wait = threading.Semaphore(0)

    class Told(PrefixStore):
        def check(self, keys: list[str]) -> bool:
            others_wait.release()
            return super().check(keys)

    def join(rank: int) -> str:
        assert rank != late or count == 1 or all(others_wait.acquire(timeout=60) for _ in range(10))
        part = part_of_start(Told("run", store), rank, count, LONG)
        if rank == 0:
            assert not part.check(["said"]), "nothing of a former start is there"
            part.set("said", uuid.uuid4().hex)
        return str(part.get("said").decode())

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(join, range(count)))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_are_in_one_part_of_the_store_and_each_start_has_its_own(count: int) -> None:
    store, seen = HashStore(), set()
    for late in (-1, 0, count - 1):
        told = started(store, count, late)
        assert len(set(told)) == 1 and told[0] not in seen
        seen.add(told[0])


def test_what_a_former_process_wrote_is_not_taken_for_a_rank_that_has_come() -> None:
    store = HashStore()
    store.set("name/1", "former")
    with pytest.raises(TimeoutError, match=r"rank 1, 2 did not come within 0 s"):
        part_of_start(store, 0, 3, SHORT)


# Processes


def meets(folder: Path, rank: int, victim: int, number: int) -> None:
    """The victim is stopped while the others wait for it."""
    from lowmem_grpo.train.distributed import ranks

    joined = ranks()
    joined.meet("the start of the test")
    if rank == victim:
        os.kill(os.getpid(), number)
    joined.meet("a step")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_or_killed_process_is_named_by_all_others(tmp_path: Path, number: int, victim: int) -> None:
    """Also the first one, in which torch's store lives."""
    run = Ranked(tmp_path, 3, meets, victim=victim, number=number)
    others = [process for rank, process in enumerate(run.processes) if rank != victim]
    for process in others:
        process.join(200)
    if number == signal.SIGSTOP:
        run.kill(victim)
    told = run.wait()
    assert told[victim] is None
    assert all(f"RankError: rank {victim} is lost" in found for rank, found in enumerate(told) if rank != victim), told
