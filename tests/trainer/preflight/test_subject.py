"""The sample of rows that preflight looks at, and the search for copies: even, and bounded in time."""

from typing import Any

import pytest
from tables import every_row

from lowmem_grpo.data.prompts import PromptEncoder
from lowmem_grpo.trainer.preflight import prompts, subject


class Slow:
    """A dataset whose rows take a second each, on a clock of its own."""

    column_names = ("prompt",)

    def __init__(self, length: int) -> None:
        self.length, self.seen = length, list[int]()

    def monotonic(self) -> float:
        return float(len(self.seen))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.seen.append(index)
        return {"prompt": f"row {index}"}


@pytest.mark.parametrize(("seconds", "count"), [(1000.0, subject.MOST_ROWS), (30.5, 31), (0.5, subject.LEAST_ROWS)])
def test_a_large_or_slow_dataset_is_sampled_evenly_and_for_a_moment_only(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, count: int
) -> None:
    slow = Slow(10**6)
    monkeypatch.setattr(subject, "time", slow)
    monkeypatch.setattr(subject, "SECONDS", seconds)
    assert len(subject.sample_rows(slow, PromptEncoder(tokenizer, 100)).rows) == len(set(slow.seen)) == count
    quarters = [sum(place * 250_000 <= index < (place + 1) * 250_000 for index in slow.seen) for place in range(4)]
    assert max(quarters) - min(quarters) <= 1


@every_row("count", [0, 1, 2, 3, 7, 8, 256])
def test_the_spread_order_has_every_row_once(count: int) -> None:
    assert sorted(subject.bit_reversed(count)) == list(range(count))


def test_copies_are_searched_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(10**6)
    monkeypatch.setattr(prompts, "time", slow)
    monkeypatch.setattr(prompts, "SECONDS", 0.5)
    assert prompts.count_repeats(slow) == (0, prompts.BLOCK)
    assert slow.seen == list(range(prompts.BLOCK))
