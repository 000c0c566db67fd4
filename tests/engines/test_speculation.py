"""The switch: guesses are held while they are faster, and tried again from time to time."""

import logging

import pytest

from lowmem_grpo.engines.lookup import Guess
from lowmem_grpo.engines.speculation import HELD, LONGEST, PLAIN, TRIED, Speculation


def compare(speculation: Speculation, seconds: float, tokens: int) -> None:
    """Two rows take so long for so many tokens with guesses, and a second for two without."""
    for _ in range(TRIED):
        assert speculation.guessing
        speculation.step(2, tokens, seconds, guesses=True)
    for _ in range(PLAIN):
        assert not speculation.guessing
        speculation.step(2, 2, 1.0, guesses=False)


def test_guesses_are_on_where_they_draw_more_tokens_in_the_time(caplog: pytest.LogCaptureFixture) -> None:
    speculation = Speculation()
    with caplog.at_level(logging.INFO, "lowmem_grpo"):
        compare(speculation, seconds=1.5, tokens=6)
        assert speculation.guessing and speculation.left == HELD
        for _ in range(HELD):
            speculation.step(2, 6, 1.5, guesses=True)
        compare(speculation, seconds=1.5, tokens=6)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "3.00 tokens in a pass" in line and "2.00 times as fast" in line and "guesses are on" in line


def test_guesses_are_off_where_they_cost_more_and_are_tried_ever_more_rarely() -> None:
    speculation = Speculation()
    waited = []
    for _ in range(7):
        compare(speculation, seconds=1.5, tokens=2)
        assert not speculation.guessing
        waited.append(speculation.left)
        for _ in range(speculation.left):
            speculation.step(2, 2, 1.0, guesses=False)
    assert waited == [HELD * min(2 ** number, LONGEST) for number in range(7)]


def test_metrics_say_what_became_of_the_guesses_and_begin_anew() -> None:
    speculation = Speculation()
    assert speculation.metrics() == {}
    speculation.tried([Guess(5, 2), Guess(6, 2), Guess(7, 2)], [5, 9])
    speculation.step(1, 2, 0.1, guesses=True)
    speculation.step(1, 1, 0.1, guesses=False)
    assert speculation.metrics() == {
        "sampling/speculation/passes_share": 0.5, "sampling/speculation/accepted": 0.5,
        "sampling/speculation/tokens_per_pass": 2.0,
    }
    assert speculation.metrics() == {}
