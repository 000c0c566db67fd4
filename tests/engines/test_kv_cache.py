"""The key-value cache that grows in place, and which rows go on from it together."""

import torch

from lowmem_grpo.engines.generation_state import fed_together
from lowmem_grpo.engines.kv_cache import GrowingCache


def test_a_growing_cache_holds_what_a_concatenating_one_holds() -> None:
    cache, keys = GrowingCache(), torch.randn(2, 3, 40, 4)
    for begin, end in [(0, 5), (5, 6), (6, 20), (20, 40)]:
        held, values = cache.update(keys[:, :, begin:end], -keys[:, :, begin:end], 0)
        assert torch.equal(held, keys[:, :, :end]) and torch.equal(values, -keys[:, :, :end])
    assert cache.get_seq_length() == 40 and cache.nbytes >= 2 * keys.nbytes
    cache.select(torch.tensor([1]))
    assert torch.equal(cache.layers[0].filled()[0], keys[1:])


def test_a_growing_cache_copies_seldom() -> None:
    cache, token = GrowingCache(), torch.zeros(1, 1, 1, 4)
    moves, last = 0, None
    for _ in range(1000):
        held, _ = cache.update(token, token, 0)
        moves += held.data_ptr() != last
        last = held.data_ptr()
    assert moves < 25 and cache.nbytes < 2 * 2 * 1000 * 4 * 4


def test_rows_with_more_new_tokens_are_fed_apart_where_that_saves_work() -> None:
    assert fed_together({}) == []
    assert fed_together({3: 5, 1: 5, 2: 4}) == [[3, 1, 2]]
    assert fed_together({0: 5, 1: 200, 2: 6, 3: 190}) == [[1, 3], [2, 0]]
    assert fed_together({0: 22, 1: 5}) == [[0], [1]]
    many = {row: (37 * row) % 200 + 1 for row in range(150)}
    lists = fed_together(many)
    assert sorted(row for rows in lists for row in rows) == sorted(many)
    assert sum(len(rows) * many[rows[0]] for rows in lists) <= 1.1 * sum(many.values()) + 16 * len(lists)
    assert len(lists) < 15
    assert fed_together({3: 5, 1: 5, 2: 4}, exactly=True) == [[3, 1], [2]]
