"""Packing: the alignment rule, the bounds of a micro-batch, and the way back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_grpo.models.packing import collate, pack, unpack
from lowmem_grpo.types import Rollout, RolloutGroup

PAD, EOS = 0, 2


def rollout(ids: list[int], advantage: float = 0.0, extra: bool = False) -> Rollout:
    """A rollout whose log-probabilities tell its tokens apart."""
    logprobs = [-token / 100 for token in ids]
    old = torch.tensor(logprobs) - 1 if extra else None
    ref = torch.tensor(logprobs) - 2 if extra else None
    return Rollout(ids, logprobs, "stop", advantage=advantage, old_logprobs=old, ref_logprobs=ref)


def group(prompt: list[int], *completions: list[int], extra: bool = False) -> RolloutGroup:
    """A group of some completions, with advantages 1, 2, ..."""
    return RolloutGroup({}, prompt, [rollout(ids, 1.0 + i, extra) for i, ids in enumerate(completions)])


def test_each_target_follows_its_input_in_its_sequence() -> None:
    groups = [group([10, 11, 12], [13, 14], extra=True), group([10, 11, 12], [15, 16, 17], extra=True)]
    (batch,) = pack(groups)
    assert batch.input_ids.tolist() == [10, 11, 12, 15, 16, 10, 11, 12, 13]
    assert batch.targets.tolist() == [11, 12, 15, 16, 17, 11, 12, 13, 14]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert batch.loss_mask.tolist() == [False, False, True, True, True, False, False, True, True]
    assert batch.trained.tolist() == [2, 3, 4, 7, 8]
    assert batch.at_trained(batch.targets).tolist() == [15, 16, 17, 13, 14]
    assert batch.sequence_ids.tolist() == [0] * 5 + [1] * 4
    assert batch.cu_seqlens.tolist() == [0, 5, 9] and batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 5
    mask = batch.loss_mask
    torch.testing.assert_close(batch.rollout_logprobs[mask], -batch.targets[mask] / 100)
    torch.testing.assert_close(batch.old_logprobs[mask], -batch.targets[mask] / 100 - 1)
    torch.testing.assert_close(batch.ref_logprobs[mask], -batch.targets[mask] / 100 - 2)
    assert batch.advantages.tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_completions_of_one_prompt_share_its_places() -> None:
    (batch,) = pack([group([10, 11, 12], [13, 14], [15, 16, 17])])
    assert batch.input_ids.tolist() == [10, 11, 12, 15, 16, 12, 13]
    assert batch.targets.tolist() == [11, 12, 15, 16, 17, 13, 14]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3]
    assert batch.loss_mask.tolist() == [False, False, True, True, True, True, True]
    assert batch.advantages.tolist() == [0, 0, 2, 2, 2, 1, 1]
    side_by_side = batch.input_ids[batch.sources].view(2, batch.max_seqlen).tolist()
    assert side_by_side[0] == [10, 11, 12, 15, 16] and side_by_side[1][:4] == [10, 11, 12, 13]
    assert torch.equal(batch.sources[batch.places], torch.arange(len(batch.input_ids)))


def test_a_prompt_is_repeated_where_a_bound_splits_its_group() -> None:
    batches = pack([group([10, 11, 12], [13], [14], [15])], max_sequences=2)
    assert [batch.input_ids.tolist() for batch in batches] == [[10, 11, 12, 12], [10, 11, 12]]


def test_masks_come_from_lengths_not_from_token_values_and_a_prompt_of_one_token_is_all_loss() -> None:
    (batch,) = pack([group([PAD, EOS, PAD], [EOS, PAD, EOS, EOS]), group([EOS], [PAD])])
    assert batch.loss_mask.tolist() == [False, False, True, True, True, True, True]
    assert batch.targets[batch.loss_mask].tolist() == [EOS, PAD, EOS, EOS, PAD]
    (batch,) = pack([group([7], [8, 9])])
    assert batch.loss_mask.all() and batch.input_ids.tolist() == [7, 8] and batch.targets.tolist() == [8, 9]


@pytest.mark.parametrize(("max_tokens", "max_sequences", "lengths", "expected"), [
    (None, None, (2, 5, 3), [[5, 3, 2]]),  # longest first
    (8, None, (5, 3, 4, 2, 2), [[5], [4, 3], [2, 2]]), (5, None, (5, 3, 2), [[5], [3, 2]]),
    (None, 2, (5, 4, 3, 2, 1), [[5, 4], [3, 2], [1]]), (6, 2, (2, 2, 2), [[2, 2], [2]]), (None, 1, (2, 2), [[2], [2]]),
    (4, None, (9, 3, 1, 7), [[9], [7], [3, 1]]),  # what is longer than the bound is alone
])
def test_tokens_and_sequences_are_bounded(
    max_tokens: int | None, max_sequences: int | None, lengths: tuple[int, ...], expected: list[list[int]]
) -> None:
    groups = [group([5], list(range(3, 3 + length))) for length in lengths]
    batches = pack(groups, max_tokens, max_sequences)
    assert [batch.cu_seqlens.diff().tolist() for batch in batches] == expected


def test_empty_completions_are_left_out() -> None:
    assert pack([group([5, 6], [])]) == []
    assert pack([]) == []
    (batch,) = pack([group([5, 6], [], [7])])
    assert batch.cu_seqlens.tolist() == [0, 2]


def test_old_logprobs_are_all_or_nothing() -> None:
    (batch,) = pack([group([5], [6, 7])])
    assert batch.old_logprobs is None and batch.ref_logprobs is None
    with pytest.raises(ValueError):
        pack([group([5], [6, 7], extra=True), group([5], [6, 7])])


SEQUENCES = st.lists(
    st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.lists(st.integers(0, 9), min_size=1, max_size=6)),
    min_size=1, max_size=8,
)


@settings(deadline=None, max_examples=60)
@given(sequences=SEQUENCES)
def test_unpacking_gives_back_what_was_packed(sequences: list[tuple[list[int], list[int]]]) -> None:
    pairs = [(RolloutGroup({}, prompt, []), rollout(ids, extra=True)) for prompt, ids in sequences]
    batch = collate(pairs)
    for field, values in (("targets", [r.completion_ids for _, r in pairs]),
                          ("rollout_logprobs", [r.rollout_logprobs for _, r in pairs]),
                          ("old_logprobs", [r.old_logprobs.tolist() for _, r in pairs])):
        parts = unpack(getattr(batch, field)[batch.loss_mask], batch)
        for part, expected in zip(parts, values, strict=True):
            torch.testing.assert_close(part, torch.tensor(expected))


def test_moving_a_batch_leaves_a_tensor_behind_or_takes_the_host_s_ids_along() -> None:
    (batch,) = pack([group([5], [6, 7], extra=True)])
    moved = vars(batch.to("meta"))
    assert moved.pop("host_ids").device.type == "cpu"
    assert {value.device.type for value in moved.values() if torch.is_tensor(value)} == {"meta"}
    assert moved["max_seqlen"] == batch.max_seqlen and batch.input_ids.device.type == "cpu"


def test_a_long_shared_prompt_does_not_take_many_times_its_tokens_in_attention() -> None:
    rollouts = [Rollout([1, 2, 3], [0.0] * 3, "stop") for _ in range(40)]
    batches = pack([RolloutGroup({}, list(range(100)), rollouts)], max_tokens=256)
    assert [len(batch.cu_seqlens) - 1 for batch in batches] == [5] * 8  # 5 of 102 tokens side by side, not 40
    (whole,) = pack([RolloutGroup({}, list(range(100)), rollouts)])
    assert len(whole.cu_seqlens) - 1 == 40
