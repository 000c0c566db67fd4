"""Rows of preferences against TRL 1.16: prompts, completions and whole sequences have the same tokens."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from small_models import TINY
from tables import every_row
from template_tokenizers import FAMILY_CHATS, NAMES, tokenizer_of
from transformers import AutoTokenizer
from trl.data_utils import maybe_apply_chat_template, maybe_extract_prompt, unpair_preference_dataset
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference, KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer

from lowmem_grpo.data.pairs import ClosedPairEncoder, pair_groups, read_labelled, read_pairs, read_scored
from lowmem_grpo.data.shapes import tokenised


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ASK, AGAIN = {"role": "user", "content": "1 + 1?"}, {"role": "user", "content": "And then?"}
SYSTEM = {"role": "system", "content": "Be short."}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}
TEXTS = [{"prompt": "The sky is", "chosen": " blue.", "rejected": " green and red."},
         {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3<|im_end|>"}]
IMPLICIT = [{"chosen": "The sky is blue.", "rejected": "The sky is green."},
            {"chosen": "One and one are two, see", "rejected": "One and one are two, see?"}]
CHATS = [{"prompt": [ASK], "chosen": [say("2")], "rejected": [say("Three, I think.")]},
         {"prompt": [SYSTEM, ASK, say("2"), AGAIN], "chosen": [say("Stop.")], "rejected": [say("4")]}]
TALKS = [{"chosen": [ASK, say("2")], "rejected": [ASK, say("3")]},
         {"chosen": [ASK, say("2"), AGAIN, say("Stop.")], "rejected": [ASK, say("2"), AGAIN, say("4")]}]
TURNS = [{"prompt": [ASK], "chosen": [say("2"), AGAIN, say("3")], "rejected": [say("2"), AGAIN, say("4")]}]
TOOLS: Any = [row | {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}} for row in CHATS]
LABELS = [{"prompt": "The sky is", "completion": " blue.", "label": True},
          {"prompt": "1 + 1 =", "completion": " 3<|im_end|>", "label": False}]
ROWS: dict[str, Any] = {"texts": TEXTS, "implicit": IMPLICIT,
                        "chats": CHATS, "talks": TALKS, "turns": TURNS, "tools": TOOLS}
UNREAD = ("idefics3", "smolvlm", "llava_next")  # templates that read only messages of parts
OF_SYSTEM, UNSAID = ("chats", "tools"), ("gemma", "gemma_training")  # rows, and templates that refuse the system
SETTINGS = SimpleNamespace(chat_template_kwargs=None)
Tokens = list[tuple[list[int], list[int]]]  # of each sequence: its ids, and 1 where a token is trained


def read(function: Any, rows: Any, tokenizer: Any, longest: int = 4096, **more: Any) -> list[Any]:
    """Our usable rows, encoded."""
    found, encoder = function(Dataset.from_list(rows), "train_dataset", SETTINGS, tokenizer, longest,
                              [tokenizer.eos_token_id], **more)
    made = [encoder.encode(found[index]) for index in range(len(found))]
    return [one for one in made if not isinstance(one, str)]


def prepared(trainer: Any, rows: Any, tokenizer: Any, longest: int = 4096) -> list[Any]:
    """TRL's tokenised rows."""
    args = SimpleNamespace(max_length=longest, truncation_mode="keep_start", dataset_num_proc=None,
                           per_device_train_batch_size=2)
    held = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False, desirable_weight=1.0, undesirable_weight=1.0)
    return list(trainer._prepare_dataset(held, Dataset.from_list(rows), tokenizer, args, "train"))


def masked(batch: Any) -> Tokens:
    """The sequences of TRL's padded batch."""
    lengths = batch["attention_mask"].sum(1).tolist()
    return [(ids[:length].tolist(), mask[:length].tolist()) for ids, mask, length in zip(
        batch["input_ids"], batch["completion_mask"], lengths, strict=True)]


def of_examples(examples: Any) -> Tokens:
    return [(example.input_ids, [int(label >= 0) for label in example.labels]) for example in examples]


def of_pairs(pairs: Any) -> Tokens:
    """In the order of TRL's batch: first the chosen sides."""
    return of_examples([*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)])


def tiny() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


@every_row(("name", "longest"), [*((name, 4096) for name in ROWS), ("texts", 10), ("chats", 44), ("chats", 15)])
def test_pairs_have_the_tokens_of_trl_and_share_their_prompt(name: str, longest: int) -> None:
    made, wanted = read(read_pairs, ROWS[name], tiny(), longest), prepared(DPOTrainer, ROWS[name], tiny(), longest)
    assert of_pairs(made) == masked(DataCollatorForPreference(0, longest)(wanted))
    for group in pair_groups(made):
        assert [rollout.unit for rollout in group.rollouts] == [0, 0] and not any(
            rollout.splits for rollout in group.rollouts)


@pytest.mark.slow
@every_row(("template", "name"), [(template, name) for template in (*NAMES, *FAMILY_CHATS)
                                  for name in ("texts", "chats", "talks", "turns", "tools")
                                  if not (template.startswith(UNREAD) or (name in OF_SYSTEM and template in UNSAID))])
def test_pairs_have_the_tokens_of_trl_in_every_template(template: str, name: str) -> None:
    tokenizer = FAMILY_CHATS[template].tokenizer() if template in FAMILY_CHATS else tokenizer_of(template)
    made, wanted = read(read_pairs, ROWS[name], tokenizer), prepared(DPOTrainer, ROWS[name], tokenizer)
    assert of_pairs(made) == masked(DataCollatorForPreference(0)(wanted))


@every_row(("name", "longest"), [*((name, 4096) for name in ROWS), ("texts", 12), ("chats", 28)])
def test_rows_of_a_reward_model_have_the_tokens_of_trl_and_one_more_that_is_a_target(name: str, longest: int) -> None:
    made = read(read_scored, ROWS[name], tiny(), longest)
    wanted = prepared(RewardTrainer, ROWS[name], tiny(), longest)
    assert len(made) == len(wanted) > 0
    for pair, row in zip(made, wanted, strict=True):
        for side, ids in ((pair.chosen, row["chosen_ids"]), (pair.rejected, row["rejected_ids"])):
            assert [*side.ids, *side.completion_ids] == [*ids, tiny().eos_token_id] and side.input_ids == ids
            assert sum(side.trained) == 1 and side.trained[-1] and side.ids == pair.ids


@every_row(("rows", "longest"), [(LABELS, 4096), (LABELS, 10), *((ROWS[name], 4096) for name in ROWS), (CHATS, 44)])
def test_rows_with_a_label_have_the_tokens_of_trl_and_its_order(rows: Any, longest: int) -> None:
    made, wanted = read(read_labelled, rows, tiny(), longest), prepared(KTOTrainer, rows, tiny(), longest)
    assert of_examples(made) == masked(DataCollatorForUnpairedPreference(0, longest)(wanted))
    labels = [group.rollouts[0].fields["label"] for group in pair_groups(made)]
    assert labels == [float(row["label"]) for row in wanted]


@every_row(("function", "trainer", "rows"), [
    (read_pairs, DPOTrainer, TEXTS), (read_pairs, DPOTrainer, TALKS), (read_scored, RewardTrainer, CHATS),
    (read_labelled, KTOTrainer, LABELS), (read_labelled, KTOTrainer, CHATS)])
def test_the_tokenised_dataset_has_the_columns_of_trl(function: Any, trainer: Any, rows: Any) -> None:
    given = Dataset.from_list(rows)
    found = tokenised(given, *function(given, "train_dataset", SETTINGS, tiny(), 4096, [tiny().eos_token_id]))
    wanted = prepared(trainer, rows, tiny())
    names = [name for name in wanted[0] if name == "label" or name.endswith("_ids")]
    assert [{name: row[name] for name in names} for row in found] == [
        {name: row[name] for name in names} for row in wanted]
    assert len(found) != len(rows) or {*rows[0]} <= {*found.column_names}


def test_the_tokenised_dataset_of_a_stream_has_the_rows_that_can_be_used() -> None:
    given = Dataset.from_list([*TEXTS, TEXTS[0] | {"chosen": ""}]).to_iterable_dataset()
    found = tokenised(given, *read_pairs(given, "train_dataset", SETTINGS, tiny(), 4096, []))
    assert [row["chosen_ids"] for row in found] == [row["chosen_ids"] for row in prepared(DPOTrainer, TEXTS, tiny())]


def test_pairs_are_taken_apart_in_the_order_of_trl_beyond_a_thousand() -> None:
    rows = [{"prompt": f"{number} is", "chosen": f" {number}", "rejected": " no"} for number in range(1003)]
    found, _ = read_labelled(rows, "train_dataset", SETTINGS, tiny(), 64, [])
    wanted = unpair_preference_dataset(Dataset.from_list(rows))
    sides = [{True: "chosen", False: "rejected"}[row["label"]] for row in found]
    assert [(row["prompt"], row[side], row["label"]) for row, side in zip(found, sides, strict=True)] == [
        (row["prompt"], row["completion"], row["label"]) for row in wanted]


@every_row(("name", "longest", "start"), [
    *((name, 4096, start) for name in ROWS for start in (None, "<|im_start|>")), ("texts", 10, None),
    ("chats", 44, None)])
def test_pairs_of_odds_ratios_have_the_tokens_of_trl(name: str, longest: int, start: str | None) -> None:
    tokenizer = tiny()
    tokenizer.bos_token = start
    held: Any = SimpleNamespace(processing_class=tokenizer, is_encoder_decoder=False, max_length=longest)
    held.build_tokenized_answer = partial(ORPOTrainer.build_tokenized_answer, held)
    rows: Any = [maybe_apply_chat_template(maybe_extract_prompt(row), tokenizer) for row in ROWS[name]]
    wanted = [ORPOTrainer.tokenize_row(held, row) for row in rows]
    made = read(read_pairs, ROWS[name], tokenizer, longest, kind=ClosedPairEncoder)
    assert of_pairs(made) == [(row[f"{side}_input_ids"], [int(label >= 0) for label in row[f"{side}_labels"]])
                              for side in ("chosen", "rejected") for row in wanted]
