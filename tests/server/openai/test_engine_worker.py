"""The owner of the engine: who is served when, what failures reach, and how it ends."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from scripted_chat import until
from served import call_of, scripted_desk

from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.server.openai.request_queue import WorkerClosedError
from lowmem_grpo.types import Turn


@pytest.fixture
def desk() -> Iterator[EngineWorker]:
    made = scripted_desk(lambda prompt: f"heard {prompt}")
    yield made
    engine(made).gate.set()
    made.close()


def engine(desk: EngineWorker) -> Any:
    return desk.engine


def held_up(desk: EngineWorker) -> "Future[Turn]":
    """A call that is in the engine until its gate is set."""
    engine(desk).gate.clear()
    engine(desk).began.clear()
    future = desk.submit(call_of(desk, "first"))
    assert engine(desk).began.wait(60)
    return future


def test_each_of_many_threads_gets_its_own_turns(desk: EngineWorker) -> None:
    def client(number: int) -> list[str]:
        return [desk.submit(call_of(desk, f"{number}-{turn}", number % 3)).result(60).text for turn in range(5)]

    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(client, range(64)))
    assert found == [[f"heard {number}-{turn}" for turn in range(5)] for number in range(64)]


def test_one_caller_of_another_flavour_waits_for_about_one_turn_of_64() -> None:
    desk = scripted_desk(slots=8)
    asked = [held_up(desk), *(desk.submit(call_of(desk, "crowd")) for _ in range(64)),
             desk.submit(call_of(desk, "alone", temperature=0.5))]
    engine(desk).gate.set()
    for one in asked:
        one.result(60)
    temperatures, turns = zip(*engine(desk).rounds, strict=True)
    assert temperatures.index(0.5) == 2 and turns == (1, 8, 1, *[8] * 7)
    desk.close()


def test_how_many_came_together_is_remembered_over_a_job(desk: EngineWorker) -> None:
    gate = threading.Event()
    desk.run(gate.wait)
    futures = [desk.submit(call_of(desk, "again")) for _ in range(8)]
    gate.set()
    assert [one.result(60).text for one in futures] == ["heard again"] * 8
    desk.run(lambda: None).result(60)  # as training between two steps
    assert engine(desk).rounds == [(1.0, 8)] and [count for count, _ in desk.rounds] == [8]


def test_a_conversation_stays_open_while_nothing_else_is_asked_for(desk: EngineWorker) -> None:
    for number in range(3):
        desk.submit(call_of(desk, str(number))).result(60)
    assert engine(desk).conversations == 1
    desk.submit(call_of(desk, "other", temperature=0.0)).result(60)
    assert engine(desk).conversations == 2


def test_a_desk_without_work_waits_until_it_is_woken(desk: EngineWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at nothing now and then, which would cost time of the processor."""
    waits, wait = list[float | None](), desk.waiting.changed.wait

    def noted(timeout: float | None = None) -> bool:
        waits.append(timeout)
        return wait(timeout)

    monkeypatch.setattr(desk.waiting.changed, "wait", noted)
    for work in (lambda: desk.submit(call_of(desk, "one")), lambda: desk.run(lambda: None)):
        waits.clear()
        work().result(60)
        until(lambda: waits[-1:] == [None])


def test_a_job_runs_between_calls_behind_a_sleeping_engine(desk: EngineWorker) -> None:
    first = held_up(desk)
    seen: list[Any] = []

    def train() -> str:
        seen.append((first.done(), engine(desk).slept, threading.current_thread() is desk.thread))
        desk.on_policy_update(7)
        return "trained"

    job = desk.run(train)
    later = desk.submit(call_of(desk, "later"))
    engine(desk).gate.set()
    assert (first.result(60).policy_version, job.result(60), later.result(60).policy_version) == (0, "trained", 7)
    assert seen == [(True, 1, True)]
    with pytest.raises(RuntimeError, match="in a function given to run"):
        desk.on_policy_update(8)


def test_calls_do_not_keep_a_job_from_running_nor_jobs_a_call(desk: EngineWorker) -> None:
    first, done = held_up(desk), []
    jobs = [desk.run(lambda number=number: done.append(number)) for number in range(3)]  # type: ignore[misc]
    call = desk.submit(call_of(desk, "between"))
    call.add_done_callback(lambda _: done.append("call"))
    engine(desk).gate.set()
    first.result(60)
    for job in jobs:
        job.result(60)
    call.result(60)
    assert done == [0, "call", 1, 2]


def test_a_job_that_raises_tells_its_caller_and_the_desk_goes_on(desk: EngineWorker) -> None:
    def fail() -> None:
        raise SystemExit("no more")

    with pytest.raises(SystemExit, match="no more"):
        desk.run(fail).result(60)
    for again in (lambda: desk.run(lambda: 1), lambda: desk.submit(call_of(desk, "inside"))):
        with pytest.raises(RuntimeError, match="at the desk already"):
            desk.run(again).result(60)  # type: ignore[arg-type]
    assert desk.submit(call_of(desk, "next")).result(60).text == "heard next"


def test_an_error_of_the_engine_reaches_exactly_the_calls_in_it(desk: EngineWorker) -> None:
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
        first.result(60)
    assert (waiting.result(60).text, other.result(60).text) == ("heard second", "heard other")


def test_an_adapter_that_cannot_be_loaded_fails_its_calls_and_no_others(desk: EngineWorker) -> None:
    lost = [desk.submit(call_of(desk, "lost", adapter="/no/such/folder")) for _ in range(3)]
    for one in lost:
        with pytest.raises(ValueError, match=r"lora_request|needs a model with LoRA"):
            one.result(60)
    assert desk.submit(call_of(desk, "next")).result(60).text == "heard next"


@pytest.mark.parametrize("ids, most, words", [
    ([], 8, "no tokens"), ([5] * 4096, 8, "no room in a context of 4096"), ([5, 10**6], 8, "the token 1000000"),
    ([-1], 8, "the token -1")])
def test_a_call_that_cannot_be_decoded_fails_and_does_not_reach_the_engine(
    desk: EngineWorker, ids: list[int], most: int, words: str,
) -> None:
    call = call_of(desk, "x")
    with pytest.raises(ValueError, match=words):
        desk.submit(replace(call, ids=ids, params=replace(call.params, max_tokens=most))).result(60)
    assert not engine(desk).rounds


def test_a_cancelled_call_is_not_drawn_or_dropped(desk: EngineWorker) -> None:
    first = held_up(desk)
    waiting, kept = desk.submit(call_of(desk, "gone")), desk.submit(call_of(desk, "kept"))
    assert first.cancel() and waiting.cancel()
    engine(desk).gate.set()
    assert kept.result(60).text == "heard kept"
    with pytest.raises(CancelledError):
        first.result(60)
    assert engine(desk).rounds == [(1.0, 1), (1.0, 1)]


def test_closing_finishes_what_is_in_the_engine_and_refuses_the_rest(desk: EngineWorker) -> None:
    first = held_up(desk)
    waiting, job = desk.submit(call_of(desk, "second")), desk.run(lambda: 1)
    waiting.add_done_callback(lambda _: engine(desk).gate.set())  # which is refused before the engine is waited for
    desk.close(timeout=60)
    desk.close()
    assert first.result(0).text == "heard first"
    for refused in (waiting, job, desk.submit(call_of(desk, "late")), desk.run(lambda: 1)):
        with pytest.raises(WorkerClosedError, match="closed"):
            refused.result(0)
    assert engine(desk).slept == 1 and not desk.thread.is_alive()


def test_seeds_follow_from_the_desks_seed_and_the_number_of_the_call() -> None:
    found = []
    for seed in (1, 1, 2):
        desk = scripted_desk(seed=seed)
        for _ in range(3):
            desk.submit(call_of(desk, "x")).result(60)
        call = call_of(desk, "x")
        desk.submit(replace(call, params=replace(call.params, seed=5))).result(60)
        found.append([request.seed for request in engine(desk).requests])
        desk.close()
    assert found[0] == found[1] and found[0][:3] != found[2][:3]
    assert len(set(found[0])) == 4 and found[0][3] == found[2][3] == 5


def test_a_key_is_in_the_engine_once_at_a_time(desk: EngineWorker) -> None:
    first = held_up(desk)
    twice = [desk.submit(call_of(desk, str(number), key=3)) for number in range(2)]
    engine(desk).gate.set()
    for one in (first, *twice):
        one.result(60)
    desk.submit(call_of(desk, "again", key=3)).result(60)
    keys = [request.key for request in engine(desk).requests]
    assert len(set(keys[:3])) == 3 and keys[3] == keys[1]
