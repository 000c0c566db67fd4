"""Rows of preferences: bad ones say why they are left out, columns that fit nothing are refused with the fix, and no
completion is lost to truncation."""

from types import SimpleNamespace
from typing import Any

import pytest
from small_models import TINY
from tables import every_row
from transformers import AutoTokenizer

from lowmem_grpo.data.pairs import Pair, ScoredPairEncoder, pair_groups, read_labelled, read_pairs, read_scored
from lowmem_grpo.data.prompts import DataError, PromptSource
from lowmem_grpo.models.packing import pack

ASK, OTHER = {"role": "user", "content": "1 + 1?"}, {"role": "user", "content": "Who?"}
TWO, THREE = ({"role": "assistant", "content": word} for word in ("2", "3"))
END = "<|im_end|>"


def read(function: Any, rows: Any, longest: int = 64, **settings: Any) -> tuple[Any, Any]:
    given = SimpleNamespace(**{"chat_template_kwargs": None} | settings)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    return function(rows, "train_dataset", given, tokenizer, longest, [tokenizer.eos_token_id])


def encoded(function: Any, row: Any, longest: int = 64, **settings: Any) -> Any:
    rows, encoder = read(function, [row], longest, **settings)
    return encoder.encode(rows[0])


def texts(pair: Any) -> tuple[str, str, str]:
    """A pair's prompt, chosen and rejected completion, as their ids read."""
    decode: Any = AutoTokenizer.from_pretrained(TINY).decode
    return decode(pair.ids), decode(pair.chosen.completion_ids), decode(pair.rejected.completion_ids)


PROMPTED: dict[str, Any] = {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}


@every_row(("row", "wanted"), [
    (PROMPTED, ("1 + 1 =", f" 2{END}", f" 3{END}")),
    ({"prompt": [ASK], "chosen": "2", "rejected": [THREE]}, ("?", f"2{END}\n", f"3{END}\n")),  # a text that answers
    ({"prompt": "1 + 1?", "chosen": [ASK, TWO], "rejected": [ASK, THREE]}, ("?", f"2{END}\n", f"3{END}\n")),
    ({"prompt": [ASK], "chosen": [ASK, TWO], "rejected": [ASK, THREE]}, ("?", f"2{END}\n", f"3{END}\n")),
    ({"prompt": " ", "chosen": [ASK, TWO], "rejected": [ASK, THREE]}, ("?", f"2{END}\n", f"3{END}\n")),
    ({"chosen": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}], "rejected": [ASK, THREE]},
     ("?", f"2{END}\n", f"3{END}\n")),
])
def test_prompt_and_completions_are_told_apart(row: dict[str, Any], wanted: tuple[str, str, str]) -> None:
    asked = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert texts(encoded(read_pairs, row)) == (asked if wanted[0] == "?" else wanted[0], *wanted[1:])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"chosen": " 2", "rejected": " 2"}, "chosen and rejected are equal"),
    ({"chosen": "", "rejected": " 2"}, "empty chosen"), ({"chosen": " 2", "rejected": None}, "empty rejected"),
    ({"chosen": " \n", "rejected": " 2"}, "empty chosen"), ({"chosen": 2, "rejected": " 2"}, "chosen is int, not text"),
    ({"chosen": [TWO], "rejected": " 2"}, "one of chosen and rejected is text, and the other is chat"),
    ({"chosen": " 2\ud800", "rejected": " 3"}, "chosen has half of a surrogate pair"),
    ({"prompt": 5}, "prompt is int, not text or chat"),
    ({"prompt": [ASK], "chosen": [{"role": "assistant", "content": " "}], "rejected": [TWO]}, "no message of chosen"),
    ({"prompt": [ASK], "chosen": [TWO], "rejected": [{"content": "3"}]}, "message 1 of rejected has no role"),
    ({"prompt": "1 + 1?", "chosen": [TWO], "rejected": [THREE]}, "prompt is text that no message of both sides has"),
    ({"prompt": "1 + 1?", "chosen": ["a", "b"], "rejected": ["a", "c"]}, "prompt is text that no message of both"),
    ({"prompt": "Talk like a pirate", "chosen": [ASK, TWO], "rejected": [ASK, THREE]}, "prompt is text that no mess"),
]


@every_row(("function", "row", "reason"), [
    *((function, PROMPTED | row, reason) for function in (read_pairs, read_scored) for row, reason in BAD),
    (read_pairs, PROMPTED | {"prompt": ""}, "empty prompt"), (read_pairs, PROMPTED | {"prompt": []}, "empty prompt"),
    (read_pairs, {"chosen": "Yes", "rejected": "No"}, "chosen and rejected share no prompt"),
    (read_pairs, {"chosen": [ASK, TWO], "rejected": [OTHER, TWO]}, "chosen and rejected share no prompt"),
    (read_pairs, PROMPTED | {"prompt": "a " * 99}, "no token of chosen is trained within max_length"),
    (read_pairs, PROMPTED | {"chosen": "a" + " b" * 99, "rejected": "a" + " b" * 98}, "equal within max_length"),
    (read_scored, PROMPTED | {"rejected": "a " * 99}, "rejected longer than 64 tokens"),
    (read_scored, PROMPTED | {"margin": "big"}, "margin is 'big', not a number"),
    (read_scored, PROMPTED | {"margin": float("nan")}, "margin is nan, not a number"),
    (read_labelled, {"prompt": "a", "completion": "b", "label": None}, "no label"),
    (read_labelled, {"prompt": "a", "completion": "b", "label": "True"}, "label is 'True', not True or False"),
    (read_labelled, {"prompt": "a", "completion": "b", "label": 0.5}, "label is 0.5, not True or False"),
    (read_labelled, {"prompt": "a", "completion": " ", "label": True}, "empty completion"),
    (read_labelled, {"prompt": "a", "completion": None, "label": True}, "empty completion"),
    (read_labelled, {"prompt": "", "completion": "b", "label": True}, "empty prompt"),
    (read_labelled, {"prompt": "a", "completion": [TWO], "label": True}, "completion is chat messages, and prompt"),
    (read_labelled, {"prompt": "a " * 99, "completion": "b", "label": True}, "no token of completion is trained"),
    (read_labelled, {"chosen": [ASK, TWO], "rejected": [OTHER, TWO]}, "chosen and rejected share no prompt"),
])
def test_a_row_that_cannot_be_used_says_why(function: Any, row: dict[str, Any], reason: str) -> None:
    found = encoded(function, row)
    assert isinstance(found, str) and reason in found, found


def test_bad_rows_are_counted_by_reason_and_the_others_are_drawn() -> None:
    rows, encoder = read(read_pairs, [PROMPTED | {"chosen": " 3"}, PROMPTED, PROMPTED | {"rejected": ""}, PROMPTED])
    source = PromptSource(rows, encoder, 0)
    drawn = source.next_batch(2)
    assert len(drawn) == 2 and all(isinstance(pair, Pair) for pair in drawn)
    source.next_batch(2)
    assert set(source.skipped) == {"chosen and rejected are equal", "empty rejected"}


@every_row(("function", "rows", "message"), [
    (read_pairs, [], "train_dataset has no rows"),
    (read_pairs, [{"text": "a"}], "columns text; needed are chosen and rejected.*dataset.rename_column"),
    (read_scored, [{"prompt": "a", "chosen": "b"}], "columns prompt, chosen; needed are chosen and rejected"),
    (read_pairs, [{"prompt": "a", "completion": "b", "label": True}], "KTOTrainer takes rows with prompt, completi"),
    (read_labelled, [{"prompt": "a", "completion": "b"}], "needed are chosen and rejected.*or prompt, completion"),
    (read_labelled, lambda: iter([PROMPTED]), "is a stream of pairs.*pass a datasets.Dataset"),
    (read_pairs, [PROMPTED | {"images": []}], "images are not supported"),
])
def test_columns_that_fit_nothing_are_refused_with_the_fix(function: Any, rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(function, rows)


def test_a_stream_of_pairs_is_read() -> None:
    rows, encoder = read(read_pairs, lambda: iter([PROMPTED]))
    assert texts(encoder.encode(rows.draw()))[1] == f" 2{END}"


@every_row("truth", [True, 1, 1.0, False, 0])
def test_a_label_is_a_field_of_the_completion(truth: Any) -> None:
    rollout, = pair_groups([encoded(read_labelled, {"prompt": "a", "completion": "b", "label": truth})])[0].rollouts
    assert rollout.fields["label"] == float(truth)
    batch, = pack(pair_groups([encoded(read_labelled, {"prompt": "a", "completion": "b", "label": truth})]))
    assert set(batch.at_trained(batch.fields["label"]).tolist()) == {float(truth)}


def test_the_sides_of_a_pair_share_the_packed_prompt_and_a_micro_batch() -> None:
    groups = pair_groups([encoded(read_pairs, PROMPTED)] * 3)
    batches = pack(groups, max_sequences=1)
    assert [len(batch.rollouts) for batch in batches] == [2, 2, 2]
    prompt, sides = len(groups[0].prompt_ids), [len(rollout.completion_ids) for rollout in groups[0].rollouts]
    assert len(batches[0].input_ids) == prompt - 1 + sum(sides)


def test_a_prompt_is_cut_to_its_last_tokens_and_completions_are_not() -> None:
    whole, cut = (encoded(read_pairs, PROMPTED, max_prompt_length=most) for most in (None, 3))
    assert cut.ids == whole.ids[-3:] and cut.chosen.completion_ids == whole.chosen.completion_ids


def test_sides_whose_first_letters_join_the_prompts_only_token_have_prompts_of_their_own() -> None:
    pair = encoded(read_pairs, {"prompt": "a", "chosen": "c yes", "rejected": " no"})
    assert pair.ids == pair.chosen.ids == pair.chosen.input_ids[:1] != pair.rejected.ids == pair.rejected.input_ids[:1]
    batch, = pack(pair_groups([pair]))
    lengths = sorted(len(side.input_ids) - 1 for side in (pair.chosen, pair.rejected))
    assert sorted((batch.cu_seqlens.diff()).tolist()) == lengths
    assert len(batch.trained) == len(pair.chosen.completion_ids) + len(pair.rejected.completion_ids)


@every_row(("chosen", "rejected"), [([ASK, TWO], [OTHER, TWO]), ([TWO], [THREE]), ([ASK, TWO], [TWO])])
def test_a_reward_model_leaves_out_chats_that_share_no_message(chosen: Any, rejected: Any) -> None:
    pair = encoded(read_scored, {"chosen": chosen, "rejected": rejected})
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    assert [side.input_ids for side in pair.parts] == [
        tokenizer.apply_chat_template(side, return_dict=False) for side in (chosen, rejected)]


@every_row(("chosen", "rejected"), [("Yes", "No"), ("abc", "abcd"), ("a\n", "a\nb"), ("x", "y")])
def test_a_reward_model_reads_its_score_at_the_last_token_of_each_side(chosen: str, rejected: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    pair = encoded(read_scored, {"chosen": chosen, "rejected": rejected, "margin": 2})
    assert pair.margin == 2.0
    batch, = pack(pair_groups([pair]))
    wanted = [tokenizer(side + END).input_ids for side in (chosen, rejected)]
    found = sorted((int(batch.offsets[place]) + 1, int(batch.input_ids[place])) for place in batch.trained)
    assert found == sorted((len(ids), ids[-1]) for ids in wanted)


def test_tokens_of_a_reward_model_are_taken_as_they_are() -> None:
    rows = [{"chosen_ids": [5, 6, 7], "rejected_ids": [5, 8]}, {"chosen_ids": [5, -1], "rejected_ids": [5]}]
    found, encoder = read(read_scored, rows)
    pair, why = (encoder.encode(found[index]) for index in range(2))
    assert (pair.chosen.input_ids, pair.rejected.input_ids) == ([5, 6, 7], [5, 8])
    assert why == "chosen_ids is no list of token ids"


def test_a_side_that_begins_the_other_is_scored_at_its_own_end() -> None:
    pair = ScoredPairEncoder(AutoTokenizer.from_pretrained(TINY), 64, []).encode(
        {"prompt": [ASK], "chosen": [TWO], "rejected": [TWO, OTHER]})
    assert pair.chosen.ids == pair.chosen.input_ids and len(pair.chosen.completion_ids) == 1
    batch, = pack(pair_groups([pair]))
    assert sorted(batch.offsets[batch.trained].tolist()) == sorted(
        len(side.input_ids) - 1 for side in (pair.chosen, pair.rejected))


def test_a_prompt_whose_last_token_merges_is_cut_there_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt": "What is the res", "chosen": "ult?", "rejected": "olution?"}
    rows, encoder = read(read_pairs, [row, row])
    pairs = [encoder.encode(rows[index]) for index in range(2)]
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and "is left out of it, as in TRL" in said[0]
    ids = AutoTokenizer.from_pretrained(TINY)("What is the result?" + END).input_ids
    assert [*pairs[0].ids, *pairs[0].chosen.completion_ids] == ids
