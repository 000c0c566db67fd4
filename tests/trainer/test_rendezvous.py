"""Processes that find each other and wait for each other; here each is a thread, with a store in memory."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore

from lowmem_grpo.config.launcher import Place
from lowmem_grpo.trainer.distributed import Ranks
from lowmem_grpo.trainer.rendezvous import RankError, wait_for_all


@contextmanager
def several(count: int, **pace: float) -> Iterator[list[Ranks]]:
    store = HashStore()

    def make(rank: int) -> Ranks:
        return Ranks(Place(rank, count, rank), store, **{"beat": 0.02, "patience": 60.0} | pace)

    with ThreadPoolExecutor(count) as pool:
        made = list(pool.map(make, range(count)))
        yield made
        list(pool.map(lambda one: one.heartbeat.close(), made))


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each returns, or the error that it raises."""
    with ThreadPoolExecutor(len(calls)) as pool:
        ends = [pool.submit(call) for call in calls]
    return [end.exception() or end.result() for end in ends]


# Waiting for each other


def test_a_slow_rank_is_waited_for_as_long_as_it_gives_signs_of_life() -> None:
    with several(2) as (fast, slow):
        rounds, exchange, enough = [0], slow.heartbeat.exchange, threading.Event()

        def counted() -> None:
            exchange()
            rounds[0] += 1
            if rounds[0] > 50:
                enough.set()

        slow.heartbeat.exchange = counted  # type: ignore[method-assign]

        def late() -> list[int]:
            assert enough.wait(60)
            return slow.meet("a step", 2)

        assert at_once(partial(fast.meet, "a step", 1), late) == [[1, 2]] * 2


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_gives_no_sign_of_life_is_named_by_all_others(silent: int) -> None:
    with several(3, patience=0.5) as ranks:
        dead = ranks.pop(silent)
        dead.heartbeat.close()
        found = at_once(*(partial(one.meet, "the step") for one in ranks))
        assert all(f"rank {silent} is lost: no sign of life for 0 s while rank" in str(error) for error in found)
        with pytest.raises(RankError, match=f"rank {silent} is lost"):
            ranks[0].meet("the next one")


def test_a_store_that_no_longer_answers_is_the_loss_of_the_first_rank() -> None:
    asked, answer = threading.Event(), threading.Event()
    with several(2, patience=0.5) as (_, other):
        def silence() -> None:
            asked.set()
            answer.wait()

        other.heartbeat.exchange = silence  # type: ignore[method-assign]
        assert asked.wait(60)
        with pytest.raises(RankError, match="rank 0 is lost: no sign of life"):
            other.meet("the step")
        answer.set()


@pytest.mark.parametrize("reason", ["a reward divided by zero", "x" * 10_000, "é\n" * 5_000, "😀" * 5_000, "\ud800"])
def test_a_failure_reaches_the_others_with_its_reason(reason: str) -> None:
    def fail(rank: Ranks) -> None:
        with rank.together():
            raise ZeroDivisionError(reason)

    with several(3) as (first, other, third):
        *told, own = at_once(partial(first.gather, "it", 1), partial(third.meet, "it"), partial(fail, other))
        assert isinstance(own, ZeroDivisionError) and all(isinstance(error, RankError) for error in told)
        assert all(f"rank 1 has failed: ZeroDivisionError: {reason[:400]}" in str(error) for error in told)
        with pytest.raises(RankError):
            other.meet("the step")


@pytest.mark.parametrize("names", [("the evaluation", "the gradients"), ("😀" * 300, "x" * 300)])
def test_ranks_that_do_different_things_are_told_which(names: tuple[str, str]) -> None:
    with several(2) as pair:
        found = at_once(*(partial(one.meet, name) for one, name in zip(pair, names, strict=True)))
        assert all("has come to" in str(error) and all(name[:50] in str(error) for name in names) for error in found)


def test_an_error_that_came_from_another_rank_is_not_told_again() -> None:
    with several(2) as (one, other):
        other.heartbeat.fail(RankError("rank 0 is lost"))
        assert at_once(lambda: one.meet("a step", 1), lambda: other.meet("a step", 2)) == [[1, 2]] * 2


def test_the_ranks_that_did_not_come_are_named() -> None:
    store = HashStore()
    store.set("here/2", "")
    with pytest.raises(TimeoutError, match=r"rank 1, 3 did not come within 0 s"):
        wait_for_all(store, 0, 4, timedelta(seconds=0.05))
    at_once(*(partial(wait_for_all, store, rank, 4, timedelta(seconds=60)) for rank in (1, 3)))
    assert store.check(["here/1", "here/3"])
