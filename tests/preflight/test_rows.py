"""The sample of rows that preflight looks at, and the search for copies: even, and bounded in time."""

import time
from typing import Any

import pytest

from lowmem_grpo.data.prompts import PromptEncoder
from lowmem_grpo.preflight import prompts, rows


class Slow:
    """A dataset whose rows take long."""

    column_names = ("prompt",)

    def __init__(self, length: int, seconds: float) -> None:
        self.length, self.seconds, self.seen = length, seconds, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        self.seen.append(index)
        return {"prompt": f"row {index}"}


def test_a_large_or_slow_dataset_is_sampled_evenly_and_quickly(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, slow, encoder = Slow(10**6, 0), Slow(10**6, 0.01), PromptEncoder(tokenizer, 100)
    monkeypatch.setattr(rows, "SECONDS", 60.0)
    assert len(rows.sample_rows(large, encoder).rows) == len(set(large.seen)) == rows.MOST_ROWS
    monkeypatch.setattr(rows, "SECONDS", 0.2)
    assert rows.LEAST_ROWS <= len(rows.sample_rows(slow, encoder).rows) < 40
    for seen in (large.seen, slow.seen):
        quarters = [sum(place * 250_000 <= index < (place + 1) * 250_000 for index in seen) for place in range(4)]
        assert max(quarters) - min(quarters) <= 1


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 256])
def test_the_spread_order_has_every_row_once(count: int) -> None:
    assert sorted(rows.spread(count)) == list(range(count))


def test_copies_are_searched_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "SECONDS", 0.0)
    slow = Slow(10**6, 0)
    assert prompts.count_repeats(slow) == (0, prompts.BLOCK)
    assert slow.seen == list(range(prompts.BLOCK))
