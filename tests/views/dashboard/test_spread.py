"""Samples in bounded memory: over the whole run, and its newest."""

from lowmem_grpo.views.dashboard import spread
from lowmem_grpo.views.dashboard.spread import Spread


def filled(samples: Spread, steps: int, each: int = 2, size: int = 100) -> Spread:
    for step in range(1, steps + 1):
        for place in range(each):
            samples.add({"step": step, "place": place}, size)
    return samples


def test_few_samples_are_all_kept_in_order() -> None:
    found = filled(Spread(100, 10), 30).samples()
    assert [sample["step"] for sample in found] == [step for step in range(1, 31) for _ in range(2)]


def test_many_are_spread_over_the_run_in_whole_steps_with_the_newest() -> None:
    found = filled(Spread(100, 10), 5000).samples()
    steps = sorted({sample["step"] for sample in found})
    assert len(found) <= 110 and steps[0] < 500 and steps[-1] == 5000
    assert {4996, 4997, 4998, 4999, 5000} <= set(steps)
    assert all([sample["place"] for sample in found if sample["step"] == step] == [0, 1] for step in steps)


def test_large_samples_and_a_step_with_very_many_are_bounded_by_their_bytes() -> None:
    large = filled(Spread(10_000, 200), 400, size=spread.MOST_BYTES // 50)
    assert large.bytes <= spread.MOST_BYTES and large.tail_bytes <= spread.MOST_BYTES
    one = filled(Spread(10_000), 1, each=5000)
    assert len(one.samples()) == spread.MOST_OF_A_STEP
    assert not filled(Spread(10), 1, size=spread.MOST_BYTES + 1).samples()
