"""The steps of a run in few rows: bounded, and no spike lost."""

import pytest

from lowmem_grpo.runs.views.headline import Warned
from lowmem_grpo.server.page import run_follower as dashboard_series
from lowmem_grpo.server.page.run_follower import MOST_ROWS, Series
from tests.support.run_pages import metric


def filled(steps: int, **at: float) -> Series:
    series = Series()
    for step in range(1, steps + 1):
        series.add_record(metric(step))
    return series


@pytest.mark.parametrize("steps", [300, MOST_ROWS, MOST_ROWS + 1, 12_345])
def test_rows_are_bounded_in_order_and_end_with_the_newest_step(steps: int) -> None:
    series = filled(steps)
    rows = series.rows()
    found = [row["step"] for row in rows]
    assert len(rows) <= 2000 and found == sorted(set(found))
    assert found[0] == 1 and found[-1] == steps and series.steps == steps
    assert steps > 300 or rows == [{name: row[name] for name in rows[0]} for row in map(metric, found)]
    assert rows[-1]["reward"] == metric(steps)["reward"] and rows[-1]["kl"] == metric(steps)["kl"]


def test_a_spike_of_one_step_is_still_there_and_near_its_step() -> None:
    series = Series()
    for step in range(1, 20_001):
        series.add_record(metric(step, loss=7.0 if step == 7777 else 0.0, kl=-3.0 if step == 15_001 else 0.0))
    rows = series.rows()
    assert [abs(row["step"] - 7777) <= 2 * series.width for row in rows if row["loss"] == 7.0] == [True]
    assert [abs(row["step"] - 15_001) <= 2 * series.width for row in rows if row["kl"] == -3.0] == [True]


def test_shares_of_the_time_still_add_up() -> None:
    series = Series()
    for step in range(5000):
        series.add_record(metric(step, **{"time/generate": step % 2 * 0.6 + 0.2,
                                          "time/train": 0.6 - step % 2 * 0.6, "time/reward": 0.2}))
    for row in series.rows()[:-1]:
        assert row["time/generate"] + row["time/train"] + row["time/reward"] == pytest.approx(1)


def test_an_evaluation_joins_its_step_and_a_step_that_was_made_again_counts_anew() -> None:
    series = Series()
    series.add_record({"step": 1, "reward": 0.25})
    series.add_record({"step": 1, "eval_reward": 0.5})
    series.add_record({"step": 1, "reward": 0.75})
    assert series.rows() == [{"step": 1, "reward": 0.75, "eval_reward": 0.5}] and series.steps == 1


def test_what_is_no_number_is_left_out_and_names_are_bounded() -> None:
    series = Series()
    series.add_record({"step": 1, "reward": "high", "loss": None, "kl": True, "entropy": 10**400, "grad_norm": 0.5})
    assert series.rows() == [{"step": 1, "grad_norm": 0.5}]
    for number in range(2000):
        series.add_record({"step": 2, f"rewards/{number}/mean": 1.0})
    assert len(series.rows()[-1]) <= 501


def test_alarms_are_counted_over_all_steps() -> None:
    series = Series()
    for step in range(1, 5001):
        series.add_record(metric(step, **({"alarms/kl": 1.0} if step in (17, 3000, 3001) else {"alarms/kl": 0.0})))
    assert series.warned == {"kl": Warned(3, 17, 3001)}


def test_steps_far_apart_end_in_bounded_time() -> None:
    series = Series()
    for place in range(3000):
        series.add_record({"step": place * 2**41, "loss": 1.0})
    assert len(series.rows()) <= 2000


def test_steps_cost_the_same_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in rows that are put together: each step once, and all of them when the steps have doubled."""
    looks, two_rows = [0], dashboard_series.two_rows

    def counted(rows: list[dict[str, float]]) -> list[dict[str, float]]:
        looks[0] += len(rows)
        return two_rows(rows)

    monkeypatch.setattr(dashboard_series, "two_rows", counted)
    series, counts = Series(), []
    for part in range(6):
        looks[0] = 0
        for step in range(part * 4000, (part + 1) * 4000):
            series.add_record(metric(step))
        counts.append((looks[0] - 4000) / MOST_ROWS)
    assert counts == [pytest.approx(doubled, abs=0.05) for doubled in (2, 1, 0, 1, 0, 0)]
