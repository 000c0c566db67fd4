"""The owner of the engine: who is served when, what failures reach, and how it ends."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from desks import call_of, scripted_desk

from lowmem_grpo.service.desk import Desk
from lowmem_grpo.service.waiting import DeskClosedError
from lowmem_grpo.types import Turn


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = scripted_desk(lambda prompt: f"heard {prompt}")
    yield made
    engine(made).gate.set()
    made.close()


def engine(desk: Desk) -> Any:
    return desk.engine


def held_up(desk: Desk) -> "Future[Turn]":
    """A call that is in the engine until its gate is set."""
    engine(desk).gate.clear()
    engine(desk).began.clear()
    future = desk.submit(call_of(desk, "first"))
    assert engine(desk).began.wait(10)
    return future


def test_each_of_many_threads_gets_its_own_turns(desk: Desk) -> None:
    def client(number: int) -> list[str]:
        return [desk.submit(call_of(desk, f"{number}-{turn}", number % 3)).result(30).text for turn in range(5)]

    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(client, range(64)))
    assert found == [[f"heard {number}-{turn}" for turn in range(5)] for number in range(64)]


def test_one_caller_of_another_flavour_waits_for_about_one_turn_of_64() -> None:
    desk = scripted_desk(slots=8, seconds=0.005)
    stop = threading.Event()

    def crowd(number: int) -> None:
        while not stop.is_set():
            desk.submit(call_of(desk, "crowd")).result(30)

    with ThreadPoolExecutor(64) as pool:
        others = [pool.submit(crowd, number) for number in range(64)]
        try:
            for _ in range(10):
                time.sleep(0.02)
                before = len(engine(desk).rounds)
                desk.submit(call_of(desk, "alone", temperature=0.5)).result(10)
                during = engine(desk).rounds[before:]
                assert [temperature for temperature, _ in during].index(0.5) <= 2, during
        finally:
            stop.set()
        for other in others:
            other.result(30)
    assert max(turns for _, turns in engine(desk).rounds) == 8
    desk.close()


def test_those_who_were_just_served_are_decoded_together_again() -> None:
    desk = scripted_desk(seconds=0.02)

    def client(number: int) -> None:
        for _ in range(10):
            desk.submit(call_of(desk, "again")).result(30)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(client, range(16)))
    assert len(engine(desk).rounds) <= 16, engine(desk).rounds
    desk.close()


def test_how_many_came_together_is_remembered_over_a_job(desk: Desk) -> None:
    gate = threading.Event()
    desk.run(gate.wait)
    futures = [desk.submit(call_of(desk, "again")) for _ in range(8)]
    gate.set()
    assert [one.result(10).text for one in futures] == ["heard again"] * 8
    desk.run(lambda: None).result(10)  # as training between two steps
    assert engine(desk).rounds == [(1.0, 8)] and [count for count, _ in desk.rounds] == [8]


def test_a_conversation_stays_open_while_nothing_else_is_asked_for(desk: Desk) -> None:
    for number in range(3):
        desk.submit(call_of(desk, str(number))).result(10)
    assert engine(desk).conversations == 1
    desk.submit(call_of(desk, "other", temperature=0.0)).result(10)
    assert engine(desk).conversations == 2


def test_waiting_costs_no_time_of_the_processor(desk: Desk) -> None:
    desk.submit(call_of(desk, "one")).result(10)
    before = desk.run(time.thread_time, sleep=False).result(10)
    time.sleep(0.3)
    assert desk.run(time.thread_time, sleep=False).result(10) - before < 0.02


def test_a_job_runs_between_calls_behind_a_sleeping_engine(desk: Desk) -> None:
    first = held_up(desk)
    seen: list[Any] = []

    def train() -> str:
        seen.append((first.done(), engine(desk).slept, threading.current_thread() is desk.thread))
        desk.on_policy_update(7)
        return "trained"

    job = desk.run(train)
    later = desk.submit(call_of(desk, "later"))
    engine(desk).gate.set()
    assert (first.result(10).policy_version, job.result(10), later.result(10).policy_version) == (0, "trained", 7)
    assert seen == [(True, 1, True)]
    with pytest.raises(RuntimeError, match="in a function given to run"):
        desk.on_policy_update(8)


def test_calls_do_not_keep_a_job_from_running_nor_jobs_a_call(desk: Desk) -> None:
    first, done = held_up(desk), []
    jobs = [desk.run(lambda number=number: done.append(number)) for number in range(3)]  # type: ignore[misc]
    call = desk.submit(call_of(desk, "between"))
    call.add_done_callback(lambda _: done.append("call"))
    engine(desk).gate.set()
    first.result(10)
    for job in jobs:
        job.result(10)
    call.result(10)
    assert done == [0, "call", 1, 2]


def test_a_job_that_raises_tells_its_caller_and_the_desk_goes_on(desk: Desk) -> None:
    def fail() -> None:
        raise SystemExit("no more")

    with pytest.raises(SystemExit, match="no more"):
        desk.run(fail).result(10)
    for again in (lambda: desk.run(lambda: 1), lambda: desk.submit(call_of(desk, "inside"))):
        with pytest.raises(RuntimeError, match="at the desk already"):
            desk.run(again).result(10)  # type: ignore[arg-type]
    assert desk.submit(call_of(desk, "next")).result(10).text == "heard next"


def test_an_error_of_the_engine_reaches_exactly_the_calls_in_it(desk: Desk) -> None:
    says = engine(desk).says
    first = held_up(desk)
    engine(desk).says = lambda prompt: 1 / 0
    waiting = desk.submit(call_of(desk, "second"))
    other = desk.submit(call_of(desk, "other", temperature=0.5))

    def mend(_: Any) -> None:
        engine(desk).says = says

    first.add_done_callback(mend)
    engine(desk).gate.set()
    with pytest.raises(ZeroDivisionError):
        first.result(10)
    assert (waiting.result(10).text, other.result(10).text) == ("heard second", "heard other")


def test_an_adapter_that_cannot_be_loaded_fails_its_calls_and_no_others(desk: Desk) -> None:
    lost = [desk.submit(call_of(desk, "lost", adapter="/no/such/folder")) for _ in range(3)]
    for one in lost:
        with pytest.raises(ValueError, match=r"lora_request|needs a model with LoRA"):
            one.result(10)
    assert desk.submit(call_of(desk, "next")).result(10).text == "heard next"


@pytest.mark.parametrize("ids, most, words", [
    ([], 8, "no tokens"), ([5] * 4096, 8, "no room in a context of 4096"), ([5, 10**6], 8, "the token 1000000"),
    ([-1], 8, "the token -1")])
def test_a_call_that_cannot_be_decoded_fails_and_does_not_reach_the_engine(
    desk: Desk, ids: list[int], most: int, words: str,
) -> None:
    call = call_of(desk, "x")
    with pytest.raises(ValueError, match=words):
        desk.submit(replace(call, ids=ids, params=replace(call.params, max_tokens=most))).result(10)
    assert not engine(desk).rounds


def test_a_cancelled_call_is_not_drawn_or_dropped(desk: Desk) -> None:
    first = held_up(desk)
    waiting, kept = desk.submit(call_of(desk, "gone")), desk.submit(call_of(desk, "kept"))
    assert first.cancel() and waiting.cancel()
    engine(desk).gate.set()
    assert kept.result(10).text == "heard kept"
    with pytest.raises(CancelledError):
        first.result(10)
    assert engine(desk).rounds == [(1.0, 1), (1.0, 1)]


def test_closing_finishes_what_is_in_the_engine_and_refuses_the_rest(desk: Desk) -> None:
    first = held_up(desk)
    waiting, job = desk.submit(call_of(desk, "second")), desk.run(lambda: 1)
    threading.Timer(0.1, engine(desk).gate.set).start()
    desk.close(timeout=20)
    desk.close()
    assert first.result(0).text == "heard first"
    for refused in (waiting, job, desk.submit(call_of(desk, "late")), desk.run(lambda: 1)):
        with pytest.raises(DeskClosedError, match="closed"):
            refused.result(0)
    assert engine(desk).slept == 1 and not desk.thread.is_alive()


def test_seeds_follow_from_the_desks_seed_and_the_number_of_the_call() -> None:
    found = []
    for seed in (1, 1, 2):
        desk = scripted_desk(seed=seed)
        for _ in range(3):
            desk.submit(call_of(desk, "x")).result(10)
        call = call_of(desk, "x")
        desk.submit(replace(call, params=replace(call.params, seed=5))).result(10)
        found.append([request.seed for request in engine(desk).requests])
        desk.close()
    assert found[0] == found[1] and found[0][:3] != found[2][:3]
    assert len(set(found[0])) == 4 and found[0][3] == found[2][3] == 5


def test_a_key_is_in_the_engine_once_at_a_time(desk: Desk) -> None:
    first = held_up(desk)
    twice = [desk.submit(call_of(desk, str(number), key=3)) for number in range(2)]
    engine(desk).gate.set()
    for one in (first, *twice):
        one.result(10)
    desk.submit(call_of(desk, "again", key=3)).result(10)
    keys = [request.key for request in engine(desk).requests]
    assert len(set(keys[:3])) == 3 and keys[3] == keys[1]
