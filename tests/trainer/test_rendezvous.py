"""Processes that find each other and wait for each other; here each is a thread, with a store in memory."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore, ProcessGroupGloo

from lowmem_grpo.trainer.rendezvous import Pulse, RankError, part_of_start

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


def test_a_rank_that_gives_no_sign_of_life_is_named_by_all_others() -> None:
    with pulses(3, patience=0.5) as (dead, *others):
        dead.close()
        found = at_once(*(partial(pulse.meet, "the step") for pulse in others))
        assert all("rank 0 is lost: no sign of life for 0 s while rank" in str(error) for error in found)
        with pytest.raises(RankError, match="rank 0 is lost"):
            others[0].meet("the next one")


@pytest.mark.parametrize("reason", ["a reward divided by zero", "x" * 10_000, "é\n" * 5_000, "😀" * 5_000])
def test_a_failure_reaches_the_others_with_its_reason(reason: str) -> None:
    with pulses(3) as (first, other, third):
        found = at_once(partial(first.meet, "the step"), partial(third.meet, "the step"),
                        lambda: other.fail(ZeroDivisionError(reason)))
        for error in found[:2]:
            assert isinstance(error, RankError)
            assert str(error).startswith(f"rank 1 has failed: ZeroDivisionError: {reason[:400]}")
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


# A start over a store in which a former start has left its things


@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_are_in_one_part_of_the_store_and_each_start_has_its_own(count: int) -> None:
    store = HashStore()
    for _ in range(3):
        with ThreadPoolExecutor(count) as pool:
            parts = list(pool.map(lambda rank: part_of_start(store, rank, count, LONG), range(count)))
        assert not parts[0].check(["said"]), "nothing of a former start is there"
        parts[0].set("said", "by the first one")
        assert all(part.check(["said"]) for part in parts)


def test_what_a_former_process_wrote_is_not_taken_for_a_rank_that_has_come() -> None:
    store = HashStore()
    store.set("name/1", "former")
    with pytest.raises(TimeoutError, match=r"rank 1, 2 did not come within 0 s"):
        part_of_start(store, 0, 3, SHORT)
