"""Difficulty pools: which rows rest, for how long, and that no run ever starves."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_tokenizers import CharTokenizer, rows

from lowmem_grpo.data.difficulty import LONGEST_REST, DifficultyPools
from lowmem_grpo.data.prompts import PromptEncoder, PromptSource

MIXED, SOLVED, FAILED = [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]


def source(dataset: Any, shuffle: bool = True, seed: int = 0, **pools: Any) -> PromptSource:
    return PromptSource(dataset, PromptEncoder(CharTokenizer(), 20), seed, shuffle,
                        **{"pools": DifficultyPools()} | pools)  # type: ignore[arg-type]


def visit(prompts: PromptSource, count: int, outcome: Any) -> list[int]:
    """Draw rows and record what `outcome(index)` says of each; their indices."""
    drawn = prompts.take(count)
    for prompt in drawn if prompts.pools else ():
        assert prompts.pools and prompt.index is not None
        prompts.pools.record(prompt.index, prompt.epoch, outcome(prompt.index))
    return [prompt.row["index"] for prompt in drawn]


def epochs_visited(outcomes: list[list[float]], epochs: int) -> list[int]:
    """The epochs in which row 0 of 10 is drawn, where its visits come to these, the last one for ever."""
    prompts, seen = source(rows(10)), []
    while prompts.position < 10 * epochs:
        epoch = prompts.position // 10
        kind = outcomes[min(len(seen), len(outcomes) - 1)]
        if visit(prompts, 1, lambda index, kind=kind: MIXED if index else kind) == [0]:
            seen.append(epoch)
    return seen


@pytest.mark.parametrize(("outcomes", "epochs", "visited"), [
    ([SOLVED], 46, [0, 2, 5, 10, 19, 28, 37]), ([FAILED], 46, [0, 2, 5, 10, 19, 28, 37]),
    ([MIXED], 5, [0, 1, 2, 3, 4]), ([SOLVED, SOLVED, MIXED, SOLVED, MIXED], 11, [0, 2, 5, 6, 8, 9, 10]),
])
def test_rests_grow_from_1_epoch_to_8_and_start_anew_after_a_spread(
    outcomes: list[list[float]], epochs: int, visited: list[int]
) -> None:
    assert epochs_visited(outcomes, epochs) == visited
    assert LONGEST_REST == 8


def test_completions_without_a_reward_do_not_count() -> None:
    pools = DifficultyPools()
    pools.record(0, 0, [None, None])
    assert not pools.rows
    pools.record(0, 0, [None, 1.0])
    pools.record(1, 0, [None, 1.0, 0.0])
    assert (pools.rests(0, 1), pools.rests(1, 1)) == (True, False)


def test_solved_and_failed_rows_are_told_apart_by_the_best_reward_seen() -> None:
    pools = DifficultyPools()
    for index in range(3):
        pools.record(index, 0, FAILED)
    counts = {"data/pool_easy": 0, "data/pool_hard": 3, "data/pool_learning": 0}
    assert pools.metrics() == counts  # 0 is the best seen so far, and the worst as well
    pools.record(3, 0, MIXED)
    pools.record(4, 0, SOLVED)
    assert pools.metrics() == {"data/pool_easy": 1, "data/pool_hard": 3, "data/pool_learning": 1}
    pools.record(5, 0, [2.0, 1.0])
    assert pools.metrics() == {"data/pool_easy": 0, "data/pool_hard": 4, "data/pool_learning": 2}


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_run_goes_on_if_every_row_rests(count: int) -> None:
    prompts = source(rows(count))
    for _ in range(20):
        visit(prompts, 3, lambda _: FAILED)
    assert prompts.position <= 20 * 3 * (count + 1)
    assert prompts.epoch < 120


def test_unusable_rows_do_not_make_resting_ones_wait() -> None:
    prompts = source([*rows(2), {"prompt": "", "index": 2}], shuffle=False)
    assert [visit(prompts, 1, lambda _: SOLVED) for _ in range(4)] == [[0], [1], [0], [1]]
    assert prompts.epoch <= 4


@settings(deadline=None)
@given(st.lists(st.sampled_from([MIXED, SOLVED, FAILED, None]), min_size=5, max_size=5), st.integers(0, 12),
       st.integers(), st.booleans())
def test_a_restored_source_goes_on_where_it_stopped(kinds: list[Any], cut: int, seed: int, pooled: bool) -> None:
    """Of rows with these outcomes; None is a row that cannot be used."""
    held = [*rows(1), *(row | {"prompt": ""} if kind is None else row
                        for kind, row in zip(kinds, rows(6)[1:], strict=True))]
    prompts, resumed = (source(held, seed=seed, pools=DifficultyPools() if pooled else None) for _ in range(2))

    def drawn(prompts: PromptSource) -> list[int]:
        return visit(prompts, 2, [MIXED, *kinds].__getitem__)

    for _ in range(cut):
        drawn(prompts)
    saved = prompts.state()
    kept = json.dumps(saved)
    resumed.take(3)  # whatever it did before
    resumed.restore(json.loads(kept))
    assert [drawn(prompts) for _ in range(8)] == [drawn(resumed) for _ in range(8)]
    assert prompts.state() == resumed.state()
    assert json.dumps(saved) == kept  # going back needs what was, not what became of it


def test_a_checkpoint_made_without_pools_can_be_resumed_with_pools() -> None:
    plain = PromptSource(rows(3), PromptEncoder(CharTokenizer(), 20), 0)  # type: ignore[arg-type]
    plain.take(2)
    prompts = source(rows(3))
    prompts.restore(plain.state())
    assert (prompts.position, prompts.pools and prompts.pools.rows) == (2, {})
    plain.restore(prompts.state())
