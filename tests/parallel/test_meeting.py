"""Processes that wait for each other; here each is a thread, and the store is in memory or on a loopback address."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from lowmem_grpo.parallel import meeting
from lowmem_grpo.parallel.meeting import Meeting, RankError


def meetings(count: int, store: Any = None, **settings: float) -> list[Meeting]:
    store = store or HashStore()
    return [Meeting(store, rank, count, **{"pulse": 0.02, "patience": 60.0} | settings) for rank in range(count)]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each returns, or the error that it raises."""
    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RankError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def while_it_waits(monkeypatch: pytest.MonkeyPatch, happens: Callable[[float], Any]) -> None:
    """Time passes only where a meeting pauses, and each time this happens, at so many seconds."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        happens(now[0])

    monkeypatch.setattr(meeting, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))


def test_each_hears_what_all_tell_and_the_store_does_not_grow() -> None:
    store = HashStore()
    three = meetings(3, store)
    for number in range(20):
        told = at_once(*(partial(one.meet, "a step", f"{one.rank}-{number}") for one in three))
        assert told == [[f"{rank}-{number}" for rank in range(3)]] * 3
    assert store.num_keys() <= 3 * 2 + 3 + 1, "two meetings, the pulses"


def test_a_slow_rank_is_waited_for_longer_than_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = meetings(2, pulse=3600.0)
    told: list[list[str]] = []

    def lives(seconds: float) -> None:
        other.store.add(other.pulse_of(1), 1)
        if seconds > 3 * one.patience and not told:
            told.append(other.meet("a step", "late"))

    while_it_waits(monkeypatch, lives)
    assert [one.meet("a step", "early"), *told] == [["early", "late"]] * 2


def test_a_rank_that_gives_no_sign_of_life_is_named_with_what_it_is_waited_for_at() -> None:
    one, dead = meetings(2, patience=0.05)
    dead.close()
    with pytest.raises(RankError, match=r"rank 1 is lost: no sign of life .* while rank 0 waits for it at 'the step'"):
        one.meet("the step")
    with pytest.raises(RankError, match="rank 1 is lost"):
        one.meet("the next one")


def test_a_failure_reaches_the_others_at_once_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = meetings(2)
    while_it_waits(monkeypatch, lambda seconds: other.fail(ZeroDivisionError("a reward divided by zero")))
    with pytest.raises(RankError, match="rank 1 has failed: ZeroDivisionError: a reward divided by zero"):
        one.meet("the step")
    assert meeting.time.monotonic() < 1
    with pytest.raises(RankError):
        other.meet("the step")


def test_ranks_that_do_different_things_are_told_which() -> None:
    one, other = meetings(2)
    found = at_once(lambda: one.meet("the evaluation"), lambda: other.meet("the gradients"))
    assert all("has come to" in str(error) and "evaluation" in str(error) and "gradients" in str(error)
               for error in found)


def test_an_error_that_came_from_another_rank_is_not_told_again() -> None:
    one, other = meetings(2)
    other.fail(RankError("rank 0 is lost"))
    assert not one.store.check(["failed"])


def test_a_store_that_is_gone_is_an_error_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = [TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)]
    client = TCPStore("127.0.0.1", holder[0].port, 1, False, timeout=timedelta(seconds=60))
    one = Meeting(client, 0, 2, pulse=0.02, patience=60.0)
    while_it_waits(monkeypatch, lambda seconds: holder.clear())
    with pytest.raises(RankError, match="the meeting point of the ranks is gone while rank 0 waits at 'a step'"):
        one.meet("a step")
