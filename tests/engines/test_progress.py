"""Where an engine's time goes: every second counts in one phase. Prompts whose answers were long come first; without
such knowledge the order is as given."""

import pytest

from lowmem_grpo.engines import base as module
from lowmem_grpo.engines.base import ExpectedLengths, Pace
from lowmem_grpo.types import ImageToken, Rollout


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the module reads; a test moves it."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def steps(pace: Pace, clock: list[float], *running: int, seconds: float = 1.0) -> None:
    for count in running:
        clock[0] += seconds
        pace.step(count)


def test_a_step_after_reading_is_prefill_and_few_sequences_are_the_tail(clock: list[float]) -> None:
    pace = Pace()
    pace.read(30)
    steps(pace, clock, 8, seconds=4.0)
    steps(pace, clock, 8, 2, 1, 1)
    pace.step(8, drawn=20)  # several tokens may be drawn in a step
    assert pace.metrics() == {
        "time/sampling/prefill_s": 4.0, "time/sampling/full_s": 2.0, "time/sampling/tail_s": 2.0,
        "time/sampling/tail_share": 0.25, "tokens_per_second/prefill": 7.5, "tokens_per_second/full": 15.0,
        "tokens_per_second/tail": 1.0, "sampling/most_together": 8, "sampling/preemptions": 0,
    }


def test_what_lies_between_two_pieces_of_work_is_not_counted(clock: list[float]) -> None:
    pace = Pace()
    steps(pace, clock, 4)
    clock[0] += 50
    pace.resume()
    steps(pace, clock, 4)
    clock[0] += 0.5
    with pace.paused():
        clock[0] += 30
    steps(pace, clock, 4)
    assert (pace.seconds["full"], pace.tokens["full"]) == (3.5, 12)


def test_the_tail_is_measured_against_the_widest_of_its_own_call(clock: list[float]) -> None:
    pace = Pace()
    pace.start_call()
    steps(pace, clock, 64)
    pace.start_call()
    steps(pace, clock, 4, 2, 1)
    assert pace.tokens["tail"] == 0 and pace.most == 64


def test_what_is_taken_is_not_measured_again_and_sums_with_others(clock: list[float]) -> None:
    pace, total = Pace(), Pace()
    assert pace.metrics() == {}
    for preemptions in (1, 2):
        pace.start_call()
        steps(pace, clock, 8, 1)
        pace.preemptions += preemptions
        total.add(pace.pop_measured())
        assert pace.metrics() == {}
    assert total.seconds == {"prefill": 0, "full": 2, "tail": 2}
    assert total.tokens == {"prefill": 0, "full": 16, "tail": 2}
    assert total.metrics()["sampling/preemptions"] == 3


def drawn(*lengths: int) -> list[Rollout]:
    return [Rollout([5] * length, [-1.0] * length, "stop") for length in lengths]


def test_the_longest_expected_come_first_and_unknown_prompts_in_the_middle() -> None:
    expected = ExpectedLengths()
    assert expected.order([[1], [2], [3]]) == [0, 1, 2]
    expected.note_groups([[1], [2]], [drawn(10, 20), drawn(100, 50)])
    assert expected.order([[1], [3], [2], [4]]) == [2, 1, 3, 0]
    expected.note_groups([[1]], [drawn(500)])  # the newest answers count
    assert expected.order([[1], [3], [2]]) == [0, 1, 2]
    cat, dog = ImageToken(1, "cat"), ImageToken(1, "dog")
    expected.note_groups([[cat], [dog]], [drawn(5), drawn(600)])
    assert expected.order([[cat], [1], [dog]]) == [2, 1, 0]
