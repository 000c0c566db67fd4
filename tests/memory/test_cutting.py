"""The cut of a step into micro-batches: by lengths alone, within bounds, and as few as the bounds allow."""

from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_grpo.memory.cutting import (
    CutLimits,
    Lengths,
    Span,
    area,
    cut,
    cut_spans,
    ordered,
    packed_tokens,
    prompts_once,
    token_rows,
)
from lowmem_grpo.models.packing import pack, sequences_of
from lowmem_grpo.types import Rollout, RolloutGroup, Split

GROUPS = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 12), max_size=6)), max_size=5)
LIMITS = st.builds(
    CutLimits, st.none() | st.integers(1, 60), st.none() | st.integers(1, 4), st.sampled_from([0.0, 0.5, 2.0])
)


@settings(deadline=None, max_examples=100)
@given(groups=GROUPS, limits=LIMITS)
def test_no_completion_is_lost_no_bound_is_broken_and_what_is_counted_is_what_is_packed(
    groups: list[tuple[int, list[int]]], limits: CutLimits
) -> None:
    counted = cut(groups, limits)
    found = sorted((one.group, one.rollout) for batch in counted for one in batch)
    assert found == [(g, r) for g, (_, lengths) in enumerate(groups) for r, length in enumerate(lengths) if length]
    for batch in (batch for batch in counted if len(batch) > 1):
        assert len(batch) <= (limits.sequences or len(batch))
        if limits.tokens is not None:
            assert packed_tokens(batch) <= limits.tokens and area(batch) <= limits.spread * limits.tokens
    real = [RolloutGroup({}, [1] * prompt, [Rollout([1] * n, [0.0] * n, "stop") for n in lengths])
            for prompt, lengths in groups]
    packed = pack(real, limits.tokens, limits.sequences, limits.spread)
    held = [(len(b.input_ids), token_rows(b.prompts)) for b in packed]
    assert [(packed_tokens(batch), area(batch)) for batch in counted] == held
    side_by_side = [len(b.sources) if len(b.rollouts) > 1 else 0 for b in packed if not prompts_once(b.prompts)]
    assert [rows for b, (_, rows) in zip(packed, held, strict=True) if not prompts_once(b.prompts)] == side_by_side


EPISODES = st.lists(st.lists(st.tuples(
    st.lists(st.booleans(), min_size=1, max_size=9), st.lists(st.tuples(st.integers(0, 8), st.sampled_from(
        [None, (1, 1), (1, 1, 1, 1), (2, 2)])), max_size=2, unique_by=lambda split: split[0]),
    st.sampled_from([None, None, 0, 1]),
), max_size=4), max_size=3)


@settings(deadline=None, max_examples=100)
@given(groups=EPISODES, limits=LIMITS)
def test_what_is_counted_of_episodes_is_what_is_packed_and_no_unit_is_split(
    groups: list[Any], limits: CutLimits
) -> None:
    real = [RolloutGroup({}, [1, 1], [episode(*one) for one in rollouts]) for rollouts in groups]
    counted = cut_spans([[Span(g, r, tuple(one.lengths for one in found), group.rollouts[r].unit)
                          for r, found in enumerate(sequences_of(group, group.rollouts))]
                         for g, group in enumerate(real)], limits)
    packed = pack(real, limits.tokens, limits.sequences, limits.spread)
    held = [(len(b.input_ids), token_rows(b.prompts)) for b in packed]
    assert [(packed_tokens(batch), area(batch)) for batch in counted] == held
    drawn = [one for group in real for one in group.rollouts if one.num_trained]
    assert sorted(id(one) for b in packed for one in b.rollouts) == sorted(map(id, drawn))
    assert sum(len(b.trained) for b in packed) == sum(one.num_trained for one in drawn)
    found, expected = defaultdict[Any, list[int]](list), defaultdict[Any, list[int]](list)
    for one, key in [(one, (b.units[place].item(), id(b))) for b in packed for place, one in enumerate(b.rollouts)]:
        found[key].append(id(one))
    for one, key in [(one, (one.unit, id(group if one.unit is not None else one))) for group in real
                     for one in group.rollouts if one.num_trained]:
        expected[key].append(id(one))
    assert sorted(map(sorted, found.values())) == sorted(map(sorted, expected.values()))
    for batch in (batch for batch in packed if batch.units.max()):
        assert len(batch.rollouts) <= (limits.sequences or len(batch.rollouts))
        assert len(batch.input_ids) <= (limits.tokens or len(batch.input_ids))


def episode(trained: list[bool], splits: list[tuple[int, tuple[int, ...] | None]], unit: int | None) -> Rollout:
    """With these tokens drawn, and those of the splits that lie in it."""
    made = [Split(start, ids and list(ids)) for start, ids in sorted(splits) if start < len(trained)]
    return Rollout([1] * len(trained), [0.0] * len(trained), "stop", trained=trained, splits=made, unit=unit)


def test_an_episode_stands_where_its_longest_sequence_belongs() -> None:
    long_and_short = Span(0, 0, (Lengths("a", 10, 9), Lengths("b", 10, 1)))
    between, other = Span(0, 1, (Lengths("a", 10, 5),)), Span(1, 0, (Lengths("a", 10, 7),))
    assert list(ordered([[between, long_and_short], [other]])) == [long_and_short, between, other]
