"""The key-value cache that grows in place."""

import torch

from lowmem_grpo.engines.batch import left_padded
from lowmem_grpo.engines.kv_cache import GrowingCache


def test_a_growing_cache_holds_what_a_concatenating_one_holds() -> None:
    cache, keys = GrowingCache(), torch.randn(2, 3, 40, 4)
    for begin, end in [(0, 5), (5, 6), (6, 20), (20, 40)]:
        held, values = cache.update(keys[:, :, begin:end], -keys[:, :, begin:end], 0)
        assert torch.equal(held, keys[:, :, :end]) and torch.equal(values, -keys[:, :, :end])
    assert cache.get_seq_length() == 40 and cache.nbytes >= 2 * keys.nbytes
    cache.batch_select_indices(torch.tensor([1]))
    assert torch.equal(cache.layers[0].keys, keys[1:])


def test_a_growing_cache_copies_seldom() -> None:
    cache, token = GrowingCache(), torch.zeros(1, 1, 1, 4)
    moves, last = 0, None
    for _ in range(1000):
        held, _ = cache.update(token, token, 0)
        moves += held.data_ptr() != last
        last = held.data_ptr()
    assert moves < 25 and cache.nbytes < 2 * 2 * 1000 * 4 * 4


def test_prompts_end_at_the_right_edge() -> None:
    ids, real = left_padded([[1, 2, 3], [4]], 0, torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert real.tolist() == [[True, True, True], [False, False, True]]
