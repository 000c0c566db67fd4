"""Rows of fine-tuning against TRL 1.16: the same tokens are trained, and `train_dataset` shows the same columns."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset, IterableDataset
from small_models import TINY
from tables import every_row
from trainer_runs import load
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_grpo import SFTConfig, SFTTrainer
from lowmem_grpo.data.packing import STRATEGIES

MARKED = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
          "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
ASK, SAY = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
BOTH = {"completion_only_loss": False, "assistant_only_loss": True}
TEXTS = [{"text": "abc" * count, "n": count} for count in (1, 5, 2, 4, 3)]
ROWS = [
    (TEXTS, {}), (TEXTS, {"max_length": 4}), (TEXTS, {"max_length": 4, "truncation_mode": "keep_end"}),
    ([{"prompt": "1 + 1 = ", "completion": "2"}, {"prompt": "a b ", "completion": "cde"}], {}),
    ([{"prompt": "1 + 1 = ", "completion": "2"}] * 2, {"completion_only_loss": False}),
    ([{"prompt": "abcdefghi", "completion": "2"}, {"prompt": "a", "completion": "b"}], {"max_length": 4}),
    ([{"prompt": [ASK], "completion": [SAY]}] * 2, {}),
    ([{"prompt": [ASK], "completion": [SAY, ASK, SAY]}, {"prompt": [ASK, SAY, ASK], "completion": [SAY]}], {}),
    ([{"prompt": [ASK], "completion": [SAY, ASK, SAY]}] * 2, {"assistant_only_loss": True}),
    ([{"prompt": [ASK, SAY, ASK], "completion": [SAY]}] * 2, BOTH),
    ([{"prompt": [ASK, SAY, ASK], "completion": [SAY, ASK]}] * 2, BOTH),
    ([{"messages": [ASK, SAY, ASK, SAY]}, {"messages": [SAY]}, {"messages": [ASK]}], {}),
    ([{"messages": [ASK, SAY, ASK, SAY]}, {"messages": [ASK, SAY, ASK]}], {"assistant_only_loss": True}),
    ([{"messages": [ASK, SAY, ASK]}, {"messages": [ASK, SAY, SAY]}], {"assistant_only_loss": False}),
    ([{"input_ids": [5, 6, 7, 8], "labels": [5, -100, 7, -100], "assistant_masks": [1, 1, 1, 1]}] * 2, {}),
    ([{"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 0]}, {"input_ids": [5, 6], "assistant_masks": [0, 1]}], {}),
    ([{"input_ids": [1, 2, 3, 4], "assistant_masks": [0, 0, 0, 1]}, {"input_ids": [6, 7], "assistant_masks": [1, 1]}],
     {"max_length": 3}),
    ([{"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}], {"completion_only_loss": False}),
    *((TEXTS, {"packing": True, "max_length": 8, "packing_strategy": strategy}) for strategy in STRATEGIES),
]


@cache
def models() -> tuple[Any, Any]:
    """TRL's model and ours, which nothing here trains."""
    return AutoModelForCausalLM.from_pretrained(TINY), load()


def trainers(rows: Any, settings: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = MARKED
    theirs = trl.SFTTrainer(
        models()[0], trl.SFTConfig(
            str(folder / "trl"), report_to="none", use_cpu=True, bf16=False, **settings),
        train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
    ours = SFTTrainer(models()[1], args=SFTConfig(str(folder / "ours"), shuffle_dataset=False, **settings),
                      train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
    return theirs, ours


@every_row(("rows", "settings"), ROWS)
def test_the_rows_of_a_trainer_are_those_of_trl(rows: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    theirs, ours = trainers(Dataset.from_list(rows), settings, tmp_path)
    for wanted, found in ((theirs.train_dataset, ours.train_dataset), (theirs.eval_dataset, ours.eval_dataset)):
        assert isinstance(found, Dataset) and found["input_ids"][:] == wanted["input_ids"][:]
        assert found[:]["labels"] == wanted[:]["labels"]
        columns = set(wanted.column_names) - {"completion_mask", "assistant_masks"}  # labels say what these say
        assert set(found.column_names) == columns
        assert [found.features[name] for name in ("input_ids", "labels")] == [
            wanted.features[name] for name in ("input_ids", "labels")]
        if "seq_lengths" in columns:
            assert found[:]["seq_lengths"] == wanted[:]["seq_lengths"]


def test_the_rows_of_a_trainer_can_be_sliced_chosen_mapped_and_iterated(tmp_path: Path) -> None:
    _, ours = trainers(Dataset.from_list(TEXTS), {}, tmp_path)
    shown = ours.train_dataset
    assert shown is ours.train_dataset  # read once
    assert [row["n"] for row in shown] == shown["n"][:] == [1, 5, 2, 4, 3] and shown[[0, 2]]["n"] == [1, 2]
    assert shown.select([1])[0]["labels"] == shown[1]["labels"] == shown[1]["input_ids"]
    assert shown.map(lambda row: {"length": len(row["input_ids"])})["length"][:] == [4, 16, 7, 13, 10]


def test_a_stream_is_tokenised_as_it_is_drawn(tmp_path: Path) -> None:
    def rows() -> Any:
        yield from TEXTS

    given = IterableDataset.from_generator(rows)
    ours = SFTTrainer(load(), args=SFTConfig(str(tmp_path), max_steps=1), train_dataset=given)
    held = SFTTrainer(models()[1], args=SFTConfig(str(tmp_path), max_steps=1), train_dataset=TEXTS).train_dataset
    for name in ("input_ids", "labels", "n"):
        assert [row[name] for row in ours.train_dataset] == held[name][:]
    assert ours.train().finished


def test_packing_a_stream_is_refused_and_text_has_no_assistant(tmp_path: Path) -> None:
    for settings, rows, message in (
        ({"packing": True}, lambda: iter(TEXTS), "packing=True, and the rows are a stream"),
        ({"assistant_only_loss": True}, TEXTS, "train_dataset has no conversations but text"),
    ):
        with pytest.raises(ValueError, match=message):
            SFTTrainer(models()[1], args=SFTConfig(str(tmp_path), max_steps=1, **settings), train_dataset=rows)
