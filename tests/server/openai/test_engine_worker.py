"""The owner of the engine: who is served when, what failures reach, and how it ends."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from scripted_chat import until
from served import call_of, scripted_worker

from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.server.openai.request_queue import WorkerClosedError
from lowmem_grpo.types import Turn


@pytest.fixture
def worker() -> Iterator[EngineWorker]:
    made = scripted_worker(lambda prompt: f"heard {prompt}")
    yield made
    engine(made).gate.set()
    made.close()


def engine(worker: EngineWorker) -> Any:
    return worker.engine


def held_up(worker: EngineWorker) -> "Future[Turn]":
    """A call that is in the engine until its gate is set."""
    engine(worker).gate.clear()
    engine(worker).began.clear()
    future = worker.submit(call_of(worker, "first"))
    assert engine(worker).began.wait(60)
    return future


def test_one_caller_with_another_batch_key_waits_for_what_is_decoded_and_one_more_round() -> None:
    worker = scripted_worker(slots=8)
    asked = [held_up(worker), *(worker.submit(call_of(worker, "crowd")) for _ in range(64)),
             worker.submit(call_of(worker, "alone", temperature=0.5))]
    engine(worker).gate.set()
    for one in asked:
        one.result(60)
    temperatures, turns = zip(*engine(worker).rounds, strict=True)
    assert sum(turns[: temperatures.index(0.5)]) <= 1 + 8 and sum(turns) == 66
    worker.close()


def test_how_many_came_together_is_remembered_over_a_job(worker: EngineWorker) -> None:
    gate = threading.Event()
    worker.run(gate.wait)
    futures = [worker.submit(call_of(worker, "again")) for _ in range(8)]
    gate.set()
    assert [one.result(60).text for one in futures] == ["heard again"] * 8
    worker.run(lambda: None).result(60)  # as training between two steps
    assert engine(worker).rounds == [(1.0, 8)] and [count for count, _ in worker.rounds] == [8]


def test_a_conversation_stays_open_while_nothing_else_is_asked_for(worker: EngineWorker) -> None:
    for number in range(3):
        worker.submit(call_of(worker, str(number))).result(60)
    assert engine(worker).conversations == 1
    worker.submit(call_of(worker, "other", temperature=0.0)).result(60)
    assert engine(worker).conversations == 2


def test_a_worker_without_work_waits_until_it_is_woken(worker: EngineWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Polling would cost processor time."""
    waits, wait = list[float | None](), worker.waiting.changed.wait

    def noted(timeout: float | None = None) -> bool:
        waits.append(timeout)
        return wait(timeout)

    monkeypatch.setattr(worker.waiting.changed, "wait", noted)
    for work in (lambda: worker.submit(call_of(worker, "one")), lambda: worker.run(lambda: None)):
        waits.clear()
        work().result(60)
        until(lambda: waits[-1:] == [None])


def test_a_job_runs_between_calls_behind_a_sleeping_engine(worker: EngineWorker) -> None:
    first = held_up(worker)
    seen: list[Any] = []

    def train() -> str:
        seen.append((first.done(), engine(worker).slept, threading.current_thread() is worker.thread))
        worker.on_policy_update(7)
        return "trained"

    job = worker.run(train)
    later = worker.submit(call_of(worker, "later"))
    engine(worker).gate.set()
    assert (first.result(60).policy_version, job.result(60), later.result(60).policy_version) == (0, "trained", 7)
    assert seen == [(True, 1, True)]
    with pytest.raises(RuntimeError, match="in a function given to run"):
        worker.on_policy_update(8)


def test_calls_do_not_keep_a_job_from_running_nor_jobs_a_call(worker: EngineWorker) -> None:
    first, done = held_up(worker), []
    jobs = [worker.run(lambda number=number: done.append(number)) for number in range(3)]  # type: ignore[misc]
    call = worker.submit(call_of(worker, "between"))
    call.add_done_callback(lambda _: done.append("call"))
    engine(worker).gate.set()
    first.result(60)
    for job in jobs:
        job.result(60)
    call.result(60)
    assert done == [0, "call", 1, 2]


def test_a_job_that_raises_tells_its_caller_and_the_worker_goes_on(worker: EngineWorker) -> None:
    def fail() -> None:
        raise SystemExit("no more")

    with pytest.raises(SystemExit, match="no more"):
        worker.run(fail).result(60)
    for again in (lambda: worker.run(lambda: 1), lambda: worker.submit(call_of(worker, "inside"))):
        with pytest.raises(RuntimeError, match="at the worker already"):
            worker.run(again).result(60)  # type: ignore[arg-type]
    assert worker.submit(call_of(worker, "next")).result(60).text == "heard next"


def test_an_error_of_the_engine_reaches_exactly_the_calls_in_it(worker: EngineWorker) -> None:
    says = engine(worker).says
    first = held_up(worker)
    engine(worker).says = lambda prompt: 1 / 0
    waiting = worker.submit(call_of(worker, "second"))
    other = worker.submit(call_of(worker, "other", temperature=0.5))

    def mend(_: Any) -> None:
        engine(worker).says = says

    first.add_done_callback(mend)
    engine(worker).gate.set()
    with pytest.raises(ZeroDivisionError):
        first.result(60)
    assert (waiting.result(60).text, other.result(60).text) == ("heard second", "heard other")


def test_an_adapter_that_cannot_be_loaded_fails_its_calls_and_no_others(worker: EngineWorker) -> None:
    lost = [worker.submit(call_of(worker, "lost", adapter="/no/such/folder")) for _ in range(3)]
    for one in lost:
        with pytest.raises(ValueError, match=r"lora_request|needs a model with LoRA"):
            one.result(60)
    assert worker.submit(call_of(worker, "next")).result(60).text == "heard next"


@pytest.mark.parametrize("ids, most, words", [
    ([], 8, "no tokens"), ([5] * 4096, 8, "no room in a context of 4096"), ([5, 10**6], 8, "the token 1000000"),
    ([-1], 8, "the token -1")])
def test_a_call_that_cannot_be_decoded_fails_and_does_not_reach_the_engine(
    worker: EngineWorker, ids: list[int], most: int, words: str,
) -> None:
    call = call_of(worker, "x")
    with pytest.raises(ValueError, match=words):
        worker.submit(replace(call, ids=ids, params=replace(call.params, max_tokens=most))).result(60)
    assert not engine(worker).rounds


def test_a_cancelled_call_is_not_drawn_or_dropped(worker: EngineWorker) -> None:
    first = held_up(worker)
    waiting, kept = worker.submit(call_of(worker, "gone")), worker.submit(call_of(worker, "kept"))
    assert first.cancel() and waiting.cancel()
    engine(worker).gate.set()
    assert kept.result(60).text == "heard kept"
    with pytest.raises(CancelledError):
        first.result(60)
    assert engine(worker).rounds == [(1.0, 1), (1.0, 1)]


def test_closing_finishes_what_is_in_the_engine_and_refuses_the_rest(worker: EngineWorker) -> None:
    first = held_up(worker)
    waiting, job = worker.submit(call_of(worker, "second")), worker.run(lambda: 1)
    waiting.add_done_callback(lambda _: engine(worker).gate.set())  # which is refused before the engine is waited for
    worker.close(timeout=60)
    worker.close()
    assert first.result(0).text == "heard first"
    for refused in (waiting, job, worker.submit(call_of(worker, "late")), worker.run(lambda: 1)):
        with pytest.raises(WorkerClosedError, match="closed"):
            refused.result(0)
    assert engine(worker).slept == 1 and not worker.thread.is_alive()


def test_seeds_follow_from_the_workers_seed_and_the_number_of_the_call() -> None:
    found = []
    for seed in (1, 1, 2):
        worker = scripted_worker(seed=seed)
        for _ in range(3):
            worker.submit(call_of(worker, "x")).result(60)
        call = call_of(worker, "x")
        worker.submit(replace(call, params=replace(call.params, seed=5))).result(60)
        found.append([request.seed for request in engine(worker).requests])
        worker.close()
    assert found[0] == found[1] and found[0][:3] != found[2][:3]
    assert len(set(found[0])) == 4 and found[0][3] == found[2][3] == 5


def test_a_key_is_in_the_engine_once_at_a_time(worker: EngineWorker) -> None:
    first = held_up(worker)
    twice = [worker.submit(call_of(worker, str(number), key=3)) for number in range(2)]
    engine(worker).gate.set()
    for one in (first, *twice):
        one.result(60)
    worker.submit(call_of(worker, "again", key=3)).result(60)
    keys = [request.key for request in engine(worker).requests]
    assert len(set(keys[:3])) == 3 and keys[3] == keys[1]


def test_users_have_turns_by_completions_not_by_the_requests_that_came_first() -> None:
    """Order of events, by hand: 150 completions of one user wait when another asks for one; a turn is at most 32."""
    worker, order = scripted_worker(), list[str]()
    worker.waiting.turn, gate = 32, threading.Event()
    worker.run(gate.wait)
    asked = [worker.submit(call_of(worker, "many", user="ann")) for _ in range(150)]
    asked += [worker.submit(call_of(worker, "one", user="bob")),
              worker.submit(call_of(worker, "one", temperature=0.5, user="eve"))]
    for name, future in zip(["ann"] * 150 + ["bob", "eve"], asked, strict=True):
        future.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
    gate.set()
    for future in asked:
        future.result(60)
    assert order.index("bob") <= 33 and order.index("eve") <= 33 and len(order) == 152
    worker.close()


def test_likeliest_tokens_are_looked_for_in_the_turn_of_their_user(worker: EngineWorker) -> None:
    first, call = held_up(worker), call_of(worker, "x", user="ann")
    waiting = worker.likeliest(call, Turn(call.ids, [5], [0.0], "length"), 1)
    assert {user for user, _ in worker.waiting.lines} == {"ann"}
    engine(worker).gate.set()
    first.result(60)
    waiting.exception(60)


def test_tasks_of_a_user_with_many_models_do_not_hold_up_anothers_first(worker: EngineWorker) -> None:
    gate, order = threading.Event(), list[str]()
    worker.run(gate.wait)
    tasks = [worker.run(partial(order.append, name), user=name) for name in ["ann"] * 20 + ["bob", "eve", "bob"]]
    gate.set()
    for task in tasks:
        task.result(60)
    assert order[:6] == ["ann", "bob", "eve", "ann", "bob", "ann"]
