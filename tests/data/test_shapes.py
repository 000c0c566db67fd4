"""What the columns of a dataset mean in fine-tuning: which tokens are trained, and which rows are left out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from trainer_runs import load

from lowmem_grpo import SFTConfig, SFTTrainer
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.trainer.preflight.checks import PreflightError

CHAT = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
SHARED = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}, {"from": "human", "value": "2 + 2?"},
          {"from": "gpt", "value": "4"}]
WHOLE = ("user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n"
         "<|im_start|>assistant\n4<|im_end|>\n")
TURNS = "2<|im_end|>4<|im_end|>"
LAST = {"assistant_only_loss": None}
IDS = {"input_ids": [5, 6, 7, 8]}
SHAPES = [  # (row, settings, what is trained, as text or as ids)
    ({"text": "ab cd"}, {}, "b cd<|im_end|>"),
    ({"text": "ab cd<|im_end|>"}, {}, "b cd<|im_end|>"),
    ({"story": "ab cd", "text": None}, {"dataset_text_field": "story"}, "b cd<|im_end|>"),
    ({"text": "abcdefgh"}, {"max_length": 4, "truncation_mode": "keep_start"}, "bcd"),
    ({"text": "abcdefgh"}, {"max_length": 4, "truncation_mode": "keep_end"}, "gh<|im_end|>"),
    ({"prompt": "ab", "completion": "cd"}, {}, "cd<|im_end|>"),
    ({"prompt": "ab", "completion": "cd"}, {"completion_only_loss": False}, "bcd<|im_end|>"),
    ({"prompt": "abcdef", "completion": "gh"}, {"max_length": 4, "truncation_mode": "keep_end"}, "gh<|im_end|>"),
    ({"messages": CHAT}, LAST, "4<|im_end|>"), ({"conversations": SHARED}, LAST, "4<|im_end|>"),
    ({"messages": CHAT}, {}, WHOLE), ({"conversations": SHARED}, {}, WHOLE),
    ({"messages": CHAT}, {"assistant_only_loss": True}, TURNS),
    ({"conversations": SHARED}, {"assistant_only_loss": True}, TURNS),
    ({"messages": CHAT}, {"assistant_only_loss": False}, WHOLE),
    ({"conversations": SHARED, "text": "ab cd"}, {}, "b cd<|im_end|>"),
    ({"messages": '[{"role": "user"}]', "text": "ab cd"}, {}, "b cd<|im_end|>"),  # what the text was made of
    ({"messages": CHAT, "text": "ab cd"}, LAST, "4<|im_end|>"),
    (IDS, {}, [6, 7, 8]), (IDS | {"labels": [5, -100, 7, -100]}, {}, [7]),
    (IDS | {"completion_mask": [0, 0, 1, 1]}, {}, [7, 8]), (IDS | {"attention_mask": [1, 1, 1, 0]}, {}, [6, 7]),
    (IDS | {"text": "not this"}, {"dataset_kwargs": {"skip_prepare_dataset": True}}, [6, 7, 8]),
]


@pytest.fixture(scope="module")
def model() -> Any:
    return load()


def make(model: Any, folder: Path, rows: Any, **parts: Any) -> SFTTrainer:
    settings = {"max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 0.0} | parts.pop("settings", {})
    return SFTTrainer(model, rows, SFTConfig(output_dir=str(folder), **settings), **parts)


@pytest.mark.parametrize(("row", "settings", "trained"), SHAPES)
@pytest.mark.every(2)
def test_the_trained_tokens_are_those_that_trl_trains_and_the_loss_is_theirs(
    row: dict[str, Any], settings: dict[str, Any], trained: Any, model: Any, tmp_path: Path
) -> None:
    trainer = make(model, tmp_path, [row] * 2, settings=settings)
    seen: Any = trainer.train_dataset
    assert isinstance(seen, Dataset) and len(seen) == 2 and "labels" in seen.column_names
    ids, labels = (torch.tensor([seen[0][name]]) for name in ("input_ids", "labels"))
    kept = [label for label in seen[0]["labels"][1:] if label != -100]  # nothing predicts the first token
    assert (trainer.tokenizer.decode(kept) if isinstance(trained, str) else kept) == trained
    with torch.no_grad():
        expected = model(ids, labels=labels).loss
    assert trainer.train().metrics["train_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert trainer.evaluate([row])["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_rows_with_masks_and_without_are_weighted_by_their_trained_tokens(model: Any, tmp_path: Path) -> None:
    rows = [{**IDS, "labels": [-100, -100, 7, -100]}, {"input_ids": [9, 10, 11], "labels": [9, 10, 11]},
            {"input_ids": [4, 5, 6, 7], "labels": [-100, 5, -100, 7]}]
    trainer = make(model, tmp_path, rows, settings={"per_device_train_batch_size": 3})
    sums, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            tokens = sum(label != -100 for label in row["labels"][1:])
            sums += model(torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss.item() * tokens
            count += tokens
    assert trainer.train().metrics["train_loss"] == pytest.approx(sums / count, rel=1e-5)


@pytest.mark.parametrize("function", [
    lambda row: f"{row['q']}={row['a']}", lambda row: [f"{row['q']}={row['a']}"],
    lambda batch: [f"{q}={a}" for q, a in zip(batch["q"], batch["a"], strict=True)],
], ids=["one text", "a list of one", "a batch"])
def test_a_formatting_function_takes_a_row_or_a_batch(function: Any, model: Any, tmp_path: Path) -> None:
    rows = [{"q": "1+1", "a": "2"}, {"q": "2+2", "a": "4"}]
    for given in (rows, lambda: iter(rows)):
        trainer = make(model, tmp_path, given, formatting_func=function, settings={"shuffle_dataset": False})
        assert [example.text for example in trainer.source.take(2)] == ["1+1=2", "2+2=4"]


HALF = "half \ud83d pair"
HALVES: list[dict[str, Any]] = [
    {"text": HALF}, {"prompt": HALF, "completion": "a"}, {"prompt": "a", "completion": HALF},
    {"prompt": CHAT[:1], "completion": [{"role": "assistant", "content": HALF}]},
]


@pytest.mark.parametrize(("row", "settings", "reason"), [
    *[(row, {}, "has half of a surrogate pair") for row in HALVES],
    *[({"messages": [CHAT[0], {"role": "assistant", "content": HALF}]}, {"assistant_only_loss": only},
       "has half of a surrogate pair") for only in (None, False, True)],
    ({"text": " "}, {}, "empty text"), ({"text": 5}, {}, "text is int, not text"),
    ({"text": "abcdefgh"}, {"max_length": 4, "truncation_mode": None}, "text longer than 4 tokens"),
    ({"messages": [CHAT[0]]}, {"assistant_only_loss": True}, "no token of messages is trained"),
    ({"messages": "text"}, {"assistant_only_loss": True}, "messages is str, not text or chat"),
    ({"input_ids": []}, {}, "empty input_ids"), ({"input_ids": [1, 2], "labels": [1]}, {}, "labels has another length"),
    ({"input_ids": [1, 2], "labels": [-100, -100]}, {}, "no token of input_ids is trained"),
    ({"input_ids": [1, 2], "labels": [-100, 3]}, {}, "labels has other tokens than input_ids"),
    ({"input_ids": [1, -2]}, {}, "input_ids is no list of token ids"),
    ({"input_ids": [True, False]}, {}, "input_ids is no list of token ids"),
    ({"prompt": np.array([1, 2]), "completion": "b"}, {}, "prompt is ndarray, not text or chat"),
    ({"prompt": "a", "completion": np.array([1, 2])}, {}, "completion is ndarray, not text or chat"),
])
def test_a_row_without_anything_to_train_is_left_out_with_the_reason(
    row: dict[str, Any], settings: dict[str, Any], reason: str, model: Any, tmp_path: Path
) -> None:
    trainer = make(model, tmp_path, [row], settings={"preflight": False, **settings})
    with pytest.raises(DataError, match=reason):
        trainer.source.take(1)
    with pytest.raises(DataError, match=rf"no row of the dataset can be used: .*{reason}"):
        trainer.train_dataset[0]


@pytest.mark.parametrize(("row", "function", "column"), [
    ({"input_ids": []}, None, "`input_ids`"), ({"q": ""}, lambda row: row["q"], "`text`, which formatting_func makes"),
])
def test_preflight_names_what_holds_the_unusable_rows(
    row: Any, function: Any, column: str, model: Any, tmp_path: Path
) -> None:
    with pytest.raises(PreflightError, match=f"correct the column {column}"):
        make(model, tmp_path, [row], formatting_func=function).train()


def test_a_template_that_renders_a_turn_differently_later_has_each_answer_trained_as_the_last_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load()
    model.loaded.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content if loop.last else 'old ' + m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    trainer = make(model, tmp_path, [{"messages": CHAT}], settings={"assistant_only_loss": True, "preflight": False})
    shown, decode = trainer.train_dataset, trainer.tokenizer.decode
    assert [decode(row["input_ids"]) for row in shown] == [
        "user: old 1 + 1?\nassistant: 2\n<|im_end|>",
        "user: old 1 + 1?\nassistant: old 2\nuser: old 2 + 2?\nassistant: 4\n<|im_end|>"]
    assert [decode([label for label in row["labels"] if label != -100]) for row in shown] == [
        "2\n<|im_end|>", "4\n<|im_end|>"]
    assert trainer.train().finished and "each answer is trained by itself" in caplog.text
