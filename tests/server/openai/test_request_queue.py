"""An engine's worker waits for more calls as long as it pays, counted in waits; and an engine never takes one
conversation, or one set of weights, for another."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.server.openai.request_queue import (
    LIVE,
    MOST_QUIET,
    NO_ROUND,
    EngineCall,
    EngineSession,
    Keys,
    RequestQueue,
    Round,
    WorkerTask,
)
from lowmem_grpo.types import Rollout

WIDE: Round = (8, 0.8)  # a round of eight calls, which took 0.8 seconds
CALL = EngineCall([5, 6, 7], SamplingParams(max_tokens=4))


class Trickle(RequestQueue):
    """A queue with one call, to which `later` calls of the same batch_key come one by one, each during a wait; without
    any left, a wait times out."""

    def __init__(self, later: int) -> None:
        super().__init__()
        self.later, self.waits = [self.add_call] * later, list[float | None]()
        self.changed.wait = self.arrive  # type: ignore[method-assign]
        self.add_call()

    def arrive(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        if not self.later:
            return False
        self.later.pop(0)()
        return True

    def add_call(self) -> None:
        self.add(replace(CALL, future=Future()))

    def taken(self, expected: Round) -> int:
        return len(self.take_calls(CALL.batch_key, None, True, False, expected))


@pytest.mark.parametrize(("later", "expected", "waits"), [(7, WIDE, 7), (0, WIDE, 1), (0, (1, 0.8), 0)])
def test_calls_that_trickle_in_are_waited_for_and_taken_together_where_many_came_before_and_only_there(
    later: int, expected: Round, waits: int
) -> None:
    line = Trickle(later)
    assert line.taken(expected) == later + 1
    assert len(line.waits) == waits and all(0 < (wait or 0) <= MOST_QUIET for wait in line.waits)


def test_nobody_waits_for_calls_while_a_job_waits() -> None:
    line = Trickle(later=5)
    line.later.insert(1, lambda: line.add(WorkerTask(lambda: None, False)))
    line.taken(WIDE)
    assert len(line.waits) == 2


@pytest.mark.parametrize(("engine", "second"), [("transformers", 8), ("vllm", 1)])
def test_those_who_were_just_served_are_decoded_together_again_where_decoding_goes_in_rounds(
    engine: str, second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, line, served_by = [100.0], Trickle(later=0), SimpleNamespace(name=engine)
    monkeypatch.setattr("lowmem_grpo.server.openai.request_queue.time", SimpleNamespace(monotonic=lambda: now[0]))
    for _ in range(7):
        line.add_call()
    engine_session: Any = EngineSession(line, CALL.batch_key, Keys())
    engine_session.engine = served_by
    first = engine_session.next_requests(busy=False)
    now[0] += 0.8
    for request in first:
        engine_session.add_rollout(request.key, Rollout([9], [0.0], "stop"))
    line.later = [line.add_call] * 8
    assert (len(first), len(engine_session.next_requests(busy=False))) == (8, second)


def test_users_share_the_places_of_an_engine_and_have_turns_whatever_the_settings_of_their_calls() -> None:
    queue, order = RequestQueue(), list[list[tuple[str, float]]]()
    queue.turn = 2
    for user, temperature in [("ann", 0.1)] * 3 + [("ann", 0.2), ("ann", 0.3), ("bob", 0.1), ("bob", 0.4)]:
        params = SamplingParams(max_tokens=4, temperature=temperature)
        queue.add(EngineCall([5], params, user=user))
    while queue.lines:
        call: Any = queue.next()
        taken = queue.take_calls(call.batch_key, 2, False, True, NO_ROUND)
        order.append([(each.user, each.params.temperature) for each in taken])
    assert order == [[("ann", 0.1), ("bob", 0.1)], [("ann", 0.2)], [("bob", 0.4)], [("ann", 0.3)], [("ann", 0.1)] * 2]


def test_only_the_same_conversation_with_the_same_weights_has_its_number_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(key: int | None, adapter: Path | str | None = LIVE) -> EngineCall:
        return EngineCall([1], SamplingParams(), adapter, key)

    known, saved = Keys(), Path("saved")
    asked = [(call(1), 0), (call(2), 0), (call(1, None), 0), (call(1, saved), 0), (call(1, saved), 1), (call(None), 0),
             (call(None), 0)]
    first = [known.number_of(*one) for one in asked]
    assert len(set(first)) == len(asked)
    again = [known.number_of(one, 0) for one, _ in asked]
    assert again[:4] == first[:4] and not set(again[5:]) & set(first)
    monkeypatch.setattr("lowmem_grpo.server.openai.request_queue.MOST", 3)
    for number in range(10, 16):
        known.number_of(call(number), 0)
    assert len(known.known) <= 5 and known.number_of(call(1), 0) not in first


def test_a_call_that_was_cancelled_and_comes_back_to_a_closed_queue_fails_its_session() -> None:
    queue, call = RequestQueue(), replace(CALL, future=Future())
    queue.close()
    assert call.future.cancel()
    queue.add(call, first=True)
    assert call.future.cancelled()


def test_a_cancelled_call_that_waits_counts_as_another_user() -> None:
    queue, call = RequestQueue(), replace(CALL, future=Future(), user="bob")
    queue.turn = 32
    queue.add(call)
    assert queue.others_wait("ann") and not queue.others_wait("bob")
    call.future.cancel()
    assert not queue.others_wait("ann")
    queue.add(WorkerTask(lambda: 1, sleep=False, user="bob"))
    assert queue.others_wait("ann")
