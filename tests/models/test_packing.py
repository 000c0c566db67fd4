"""Packing: the alignment rule, the bounds of a micro-batch, and the way back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import every_row

from lowmem_grpo.models.packing import collate, pack, unpack
from lowmem_grpo.types import TOKEN_FIELDS, ImageToken, Rollout, RolloutGroup, Split, TokenField

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


@pytest.mark.parametrize("trained", [None, [True, False, True, True]])
def test_a_field_that_is_not_packed_would_be_read_at_other_tokens(trained: list[bool] | None) -> None:
    """Its values are the tokens that they describe, and a micro-batch's places hold none of them."""
    rollouts = [Rollout(ids, [0.0] * 4, "stop", trained=trained, splits=splits) for ids, splits in (
        ([13, 14, 15, 16], []), ([23, 24, 25, 26], [Split(2, [90, 91, 92, 93])] if trained else []))]
    for each in rollouts:
        each.fields["teacher_hidden"] = torch.tensor(each.completion_ids)[:, None].expand(4, 3).bfloat16()
    for batch in (*pack([RolloutGroup({}, [10, 11], rollouts)]), *pack([RolloutGroup({}, [10, 11], rollouts)], 5)):
        found = batch.of_rollouts("teacher_hidden")
        assert found.dtype == torch.bfloat16 and "teacher_hidden" not in batch.fields
        assert found.tolist() == [[token] * 3 for token in batch.at_trained(batch.targets).tolist()]


def test_each_target_follows_its_input_in_its_sequence() -> None:
    groups = [group([10, 11, 12], [13, 14], extra=True), group([10, 11, 12], [15, 16, 17], extra=True)]
    (batch,) = pack(groups)
    assert batch.input_ids.tolist() == [10, 11, 12, 15, 16, 10, 11, 12, 13]
    assert batch.targets.tolist() == [11, 12, 15, 16, 17, 11, 12, 13, 14]
    assert batch.offsets.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert batch.loss_mask.tolist() == [False, False, True, True, True, False, False, True, True]
    assert batch.trained.tolist() == [2, 3, 4, 7, 8]
    assert batch.at_trained(batch.targets).tolist() == [15, 16, 17, 13, 14]
    assert batch.sequence_ids.tolist() == [0] * 5 + [1] * 4
    assert batch.cu_seqlens.tolist() == [0, 5, 9] and batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 5
    mask = batch.loss_mask
    torch.testing.assert_close(batch.rollout_logprobs[mask], -batch.targets[mask] / 100)
    torch.testing.assert_close(batch.fields["old_logprobs"][mask], -batch.targets[mask] / 100 - 1)
    torch.testing.assert_close(batch.fields["ref_logprobs"][mask], -batch.targets[mask] / 100 - 2)
    assert batch.advantages.tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_completions_of_one_prompt_share_its_places() -> None:
    (batch,) = pack([group([10, 11, 12], [13, 14], [15, 16, 17])])
    assert batch.input_ids.tolist() == [10, 11, 12, 15, 16, 12, 13]
    assert batch.targets.tolist() == [11, 12, 15, 16, 17, 13, 14]
    assert batch.offsets.tolist() == [0, 1, 2, 3, 4, 2, 3]
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


def test_an_episode_s_sequences_lie_with_its_group_and_only_what_was_drawn_is_trained() -> None:
    """Two tokens drawn, two of context, one drawn; then another sequence, whose own prompt begins with the group's;
    then one whose prompt does not, with context behind its last drawn token. Beside it a completion of one turn."""
    prompt, ids = [10, 11, 12], [20, 21, 90, 91, 22, 92, 23, 24, 93]
    trained = [True, True, False, False, True, False, True, True, False]
    splits = [Split(5, [10, 11, 12, 80, 81]), Split(7, [70, 71])]
    episode = Rollout(ids, [-token / 100 for token in ids], "stop", advantage=2.0, trained=trained, splits=splits)
    (batch,) = pack([RolloutGroup({}, prompt, [rollout([30, 31], 1.0), episode])])
    assert batch.input_ids.tolist() == [
        10, 11, *[12, 20, 21, 90, 91], *[12, 80, 81, 92], *[12, 30], 70, 71]
    assert batch.targets.tolist() == [
        11, 12, *[20, 21, 90, 91, 22], *[80, 81, 92, 23], *[30, 31], 71, 24]
    assert batch.offsets.tolist() == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 5, 2, 3, 0, 1]
    assert batch.at_trained(batch.targets).tolist() == [20, 21, 22, 23, 30, 31, 24]
    assert batch.trained.tolist() == [2, 3, 6, 10, 11, 12, 14]
    assert batch.sequence_ids.tolist() == [0] * 11 + [1, 1] + [0, 0]
    assert batch.cu_seqlens.tolist() == [0, 7, 13, 17, 19] and batch.prompts == ((2, 5, 4, 2), (1, 1))
    assert batch.copies.tolist() == [3, 3, *[1] * 13] and batch.max_seqlen == 7
    side_by_side = batch.input_ids[batch.sources].view(4, 7).tolist()
    assert [row[:n] for row, n in zip(side_by_side, (7, 6, 4, 2), strict=True)] == [
        [10, 11, 12, 20, 21, 90, 91], [10, 11, 12, 80, 81, 92], [10, 11, 12, 30], [70, 71]]
    assert torch.equal(batch.sources[batch.places], torch.arange(15))
    torch.testing.assert_close(batch.at_trained(batch.rollout_logprobs), -batch.at_trained(batch.targets) / 100)
    assert batch.at_trained(batch.advantages).tolist() == [2, 2, 2, 2, 1, 1, 2]
    assert [part.tolist() for part in unpack(batch.at_trained(batch.targets), batch)] == [
        [20, 21, 0, 0, 22, 0, 23, 24, 0], [30, 31]]


def test_two_sequences_with_the_same_prompt_of_their_own_share_all_of_it() -> None:
    episodes = [Rollout([20, token], [0.0] * 2, "stop", splits=[Split(1, [5, 6, 7, 8])]) for token in (21, 22)]
    (batch,) = pack([RolloutGroup({}, [5, 6], episodes)])
    assert batch.input_ids.tolist() == [5, 6, 6, 5, 6, 7, 8, 8] and batch.prompts == ((1, 1, 1), (3, 1, 1))
    assert batch.at_trained(batch.targets).tolist() == [20, 20, 21, 22]
    (first, second) = pack([RolloutGroup({}, [5, 6], episodes)], max_sequences=1)
    assert first.input_ids.tolist() == [5, 6, 5, 6, 7, 8] and len(second.rollouts) == 1


def test_prompts_of_equal_ids_and_other_images_share_nothing() -> None:
    cat, dog = ([5, ImageToken(9, name), 6] for name in ("cat", "dog"))
    episodes = [Rollout([3, 4], [0.0] * 2, "stop", splits=[Split(1, prompt)])
                for prompt in (cat, dog, dog, [*cat, 5], [*dog, 5], [5, 9, 6])]
    (batch,) = pack([RolloutGroup({}, cat, episodes)])
    assert [(own, len(others)) for own, *others in batch.prompts] == [(2, 8), (3, 1), (2, 2), (2, 1)]
    assert {place: token.image for place, token in batch.images.items()} == {1: "cat", 12: "dog", 16: "dog"}


def test_an_episode_stays_in_one_micro_batch_and_one_without_drawn_tokens_in_none() -> None:
    split = Rollout([1, 2, 3], [0.0] * 3, "stop", splits=[Split(1, [9]), Split(2, [8])])
    nothing = Rollout([1, 2], [0.0] * 2, "stop", trained=[False, False])
    batches = pack([RolloutGroup({}, [5, 6], [split, rollout([7]), nothing])], max_tokens=1)
    assert [len(batch.cu_seqlens) - 1 for batch in batches] == [3, 1]
    assert all(one is not nothing for batch in batches for one in batch.rollouts)


@every_row(("max_tokens", "max_sequences", "lengths", "expected"), [
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


def test_a_field_of_several_values_a_token_is_0_at_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOKEN_FIELDS, "top", TokenField("top", "int64"))
    top = [[1, 2], [3, 4], [5, 6]]
    made = Rollout([20, 21, 22], [0.0] * 3, "stop", splits=[Split(1, [10, 11, 80])], fields={"top": top})
    (batch,) = pack([RolloutGroup({}, [10, 11], [made])])
    assert batch.fields["top"].tolist() == [[0, 0], [1, 2], [0, 0], [3, 4], [5, 6]]
    assert unpack(batch.at_trained(batch.fields["top"]), batch)[0].tolist() == top


def test_old_logprobs_are_all_or_nothing() -> None:
    (batch,) = pack([group([5], [6, 7])])
    assert batch.fields.keys() == {"rollout_logprobs", "advantages"}
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
    for packed, values in ((batch.targets, [r.completion_ids for _, r in pairs]),
                           (batch.rollout_logprobs, [r.rollout_logprobs for _, r in pairs]),
                           (batch.fields["old_logprobs"], [r.old_logprobs.tolist() for _, r in pairs])):
        parts = unpack(packed[batch.loss_mask], batch)
        for part, expected in zip(parts, values, strict=True):
            torch.testing.assert_close(part, torch.tensor(expected))


def test_moving_a_batch_leaves_a_tensor_behind_or_takes_the_host_s_ids_along() -> None:
    (batch,) = pack([group([5], [6, 7], extra=True)])
    moved = vars(batch.to("meta"))
    moved |= moved.pop("fields")
    assert moved.pop("host_ids").device.type == "cpu"
    assert {value.device.type for value in moved.values() if torch.is_tensor(value)} == {"meta"}
    assert moved["max_seqlen"] == batch.max_seqlen and batch.input_ids.device.type == "cpu"


def test_a_long_shared_prompt_does_not_take_many_times_its_tokens_in_attention() -> None:
    rollouts = [Rollout([1, 2, 3], [0.0] * 3, "stop") for _ in range(40)]
    batches = pack([RolloutGroup({}, list(range(100)), rollouts)], max_tokens=256)
    assert [len(batch.cu_seqlens) - 1 for batch in batches] == [5] * 8  # 5 of 102 tokens side by side, not 40
    (whole,) = pack([RolloutGroup({}, list(range(100)), rollouts)])
    assert len(whole.cu_seqlens) - 1 == 40
