"""The same rows are the same to a run, whatever holds them: a list, a Dataset in any format, a DataFrame, a stream."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from template_tokenizers import tokenizer_of
from trainer_runs import load, make
from trl.trainer.utils import remove_none_values

from lowmem_grpo import SFTConfig, SFTTrainer
from lowmem_grpo.data.prompt_inputs import encode
from lowmem_grpo.data.prompts import DataError, Prompt, PromptEncoder
from lowmem_grpo.data.stream import Stream, columns_of, rows_of
from lowmem_grpo.rollout import assessment

SCHEMA = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
    "type": "object", "properties": {"a": {"type": "string", "description": "One."}}, "required": ["a"]}}}
OTHER = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {
    "type": "object", "properties": {"zone": {"type": "string", "enum": ["UTC"]}}}}}
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?", "name": "Ada"}],
     "nums": [1, 1], "answer": 2, "tools": [SCHEMA]},
    {"prompt": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "I add.", "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": "2"}}}]},
        {"role": "tool", "name": "add", "content": "5"}, {"role": "user", "content": "And now?"}],
     "nums": [2, 3], "answer": 5, "tools": [SCHEMA, OTHER]},
    {"prompt": [{"role": "user", "content": "What time?"}, {"role": "assistant", "content": "I look.", "tool_calls": [
        {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}]},
        {"role": "tool", "name": "now", "content": "9:00"}, {"role": "user", "content": "Early?"}],
     "nums": [0], "answer": 9, "tools": [OTHER]},
]
ASKED, SAID = [{"role": "user", "content": "Hi"}], {"role": "assistant", "content": "Yes"}
NAMED = [{"role": "user", "content": "Hi", "name": "Ada"}]
HOLDERS: dict[str, Callable[[Path], Any]] = {
    "list": lambda _: ROWS,
    "Dataset": lambda _: Dataset.from_list(ROWS),
    **{f"Dataset as {name}": lambda _, name=name: Dataset.from_list(ROWS).with_format(name)
       for name in ("numpy", "torch", "pandas", "arrow")},
    **{f"stream as {name}": lambda _, name=name: Dataset.from_list(ROWS).to_iterable_dataset().with_format(name)
       for name in (None, "numpy", "torch", "pandas", "arrow")},
    "DataFrame of parquet": lambda folder: frame(folder),
    "table of pyarrow": lambda _: Dataset.from_list(ROWS).data.table,
    "records of a DataFrame": lambda folder: frame(folder).to_dict("records"),
    "generator": lambda _: (dict(row) for row in Dataset.from_list(ROWS)),
}


def frame(folder: Path) -> pd.DataFrame:
    Dataset.from_list(ROWS).to_parquet(folder / "rows.parquet")
    return pd.read_parquet(folder / "rows.parquet")


def listed(rows: Any) -> list[dict[str, Any]]:
    return rows.peek(9) if isinstance(rows, Stream) else [rows[index] for index in range(len(rows))]


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.every(2)
def test_rows_are_read_as_the_plain_rows_that_were_put_in(holder: str, tmp_path: Path) -> None:
    got = listed(rows_of(HOLDERS[holder](tmp_path)))
    plain = [row | {"nums": list(row["nums"])} for row in got]  # numbers of records of a DataFrame stay an array
    assert plain == ROWS and repr(plain[0]["answer"]) == "2"
    assert plain == remove_none_values([dict(row) for row in Dataset.from_list(ROWS)])  # TRL's own cure


@pytest.mark.parametrize("template", ["qwen3", "llama3_2", "gptoss", "glm4moe"])
def test_training_evaluation_and_fast_generate_have_the_ids_of_messages_without_filled_keys(template: str) -> None:
    tokenizer, held = tokenizer_of(template), Dataset.from_list(ROWS)
    expected = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
                for row in ROWS]
    made = [PromptEncoder(tokenizer, 10_000).encode(row) for row in listed(rows_of(held))]
    assert [one.ids for one in made if isinstance(one, Prompt)] == expected
    assert [encode(tokenizer, row["prompt"])[1] for row in assessment.rows_of(held, None)] == expected
    assert [encode(tokenizer, row["prompt"])[1] for row in held] == expected


def test_calls_that_a_template_would_leave_out_of_a_prompt_are_refused() -> None:
    encoder = PromptEncoder(tokenizer_of("llama3"), 10_000)
    with pytest.raises(ValueError, match="the chat template leaves out the call of now"):
        for row in ROWS:
            encoder.encode(row)


@pytest.mark.parametrize("holder", ["Dataset as numpy", "Dataset as torch", "DataFrame of parquet", "stream as numpy"])
def test_a_reward_function_gets_the_columns_of_any_holder_as_plain_values(holder: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, nums: Any, answer: Any, **_: Any) -> list[float]:
        seen.extend(zip(prompts, nums, answer, strict=True))
        return [float(len(str(one))) for one in completions]

    trainer = make(tmp_path, reward, HOLDERS[holder](tmp_path), load(2048), eval_dataset=[ROWS[0]], max_steps=1,
                   shuffle_dataset=False, preflight=False)
    trainer.start_step()
    trainer.train_step(trainer.next_groups())
    assert seen[:8] == [(row["prompt"], row["nums"], row["answer"]) for row in ROWS[:2] for _ in range(4)]


@pytest.mark.parametrize("hold", [
    Dataset.from_list, lambda rows: Dataset.from_list(rows).with_format("numpy"), pd.DataFrame,
    lambda rows: Dataset.from_list(rows).with_format("torch"),
])
@pytest.mark.parametrize("rows", [
    [{"messages": [*NAMED, SAID]}, {"messages": [*ASKED, SAID]}], [{"prompt": NAMED, "completion": [SAID]},
                                                                   {"prompt": ASKED, "completion": [SAID]}],
    [{"prompt": "a", "completion": "bc"}] * 2, [{"text": "ab cd"}] * 2,
    [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}] * 2,
])
@pytest.mark.every(2)
def test_fine_tuning_trains_the_same_tokens_whatever_holds_the_rows(rows: Any, hold: Any, tmp_path: Path) -> None:
    model = load()
    model.loaded.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}{% if 'name' in m %} ({{ m.name }}){% endif %}: {{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
    config = SFTConfig(output_dir=str(tmp_path), max_steps=1, preflight=False)
    given, held = (SFTTrainer(model, each, config, eval_dataset=each).train_dataset for each in (rows, hold(rows)))
    for name in ("input_ids", "labels"):
        assert [list(row[name]) for row in held] == [list(row[name]) for row in given]


def test_empty_cells_of_a_data_frame_are_none() -> None:
    table = pd.DataFrame({"prompt": ["a", "b", None], "answer": [1.0, np.nan, 3.0],
                          "at": pd.to_datetime(["2024-01-01", None, None]), "n": pd.array([1, None, 3], "Int64")})
    assert [(row["answer"], row["n"]) for row in listed(rows_of(table))] == [(1.0, 1), (None, None), (3.0, 3)]
    assert rows_of(table)[2]["prompt"] is None and rows_of(table)[1]["at"] is None


def test_arrays_that_a_list_of_rows_holds_for_its_rewards_stay_arrays() -> None:
    grid, weights = np.zeros((2, 2)), torch.ones(3)
    row = rows_of([{"prompt": "a", "grid": grid, "weights": weights, "input_ids": np.array([1, 2])}])[0]
    assert row["grid"] is grid and row["weights"] is weights and row["input_ids"] == [1, 2]


def test_a_transform_of_the_users_own_and_a_choice_of_columns_stay() -> None:
    held = Dataset.from_list([{"prompt": "a", "answer": 1}])
    assert rows_of(held.with_transform(lambda batch: {"prompt": ["b"]}))[0] == {"prompt": "b"}
    assert rows_of(held.with_format("numpy", columns=["answer"]))[0] == {"answer": 1}


def asks(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """A transform whose rows differ at each reading, and whose columns are others than those stored."""
    draws = [random.random() for _ in batch["image"]]
    return {"prompt": [f"What is {number} + {draw}?" for number, draw in zip(batch["image"], draws, strict=True)],
            "draw": draws}


def test_rows_that_a_transform_makes_are_trained_and_evaluated_on_as_in_trl(tmp_path: Path) -> None:
    """TRL's GRPOTrainer reads rows by index, so that its rewards get what the transform made of a row."""
    seen: list[tuple[Any, Any]] = []

    def reward(prompts: Any, completions: Any, draw: Any, **_: Any) -> list[float]:
        seen.extend(zip(prompts, draw, strict=True))
        return [float(len(str(one))) for one in completions]

    held, other = (Dataset.from_list([{"image": number} for number in range(8)]) for _ in range(2))
    other.set_transform(asks)
    held = held.with_transform(asks).shuffle(seed=1).select(range(6))
    trainer = make(tmp_path, reward, held, load(2048), eval_dataset=other, max_steps=1)
    trainer.train()
    assert trainer.evaluate()["eval_reward"] > 0 and len(assessment.rows_of(held, 2)) == 2
    assert len(seen) >= 8 and all(prompt.endswith(f"+ {draw}?") for prompt, draw in seen), "a row is read once"


def test_columns_are_those_of_the_first_row_whatever_is_stored(tmp_path: Path) -> None:
    held = Dataset.from_list([{"prompt": "a", "answer": 1}])
    for rows in (held.with_transform(lambda batch: {"text": ["b"]}), held.with_format("torch", columns=["answer"])):
        with pytest.raises(DataError, match=r"no column 'prompt'; its columns are (text|answer)\."):
            make(tmp_path, rows=rows, model=load(2048))


def test_fine_tuning_refuses_a_transform_as_trl_does_and_says_what_to_do(tmp_path: Path) -> None:
    """TRL 1.16's SFTTrainer: it "can bake a random or stateful transform into the tokenized columns"."""
    plain = Dataset.from_list([{"text": "ab cd"}])
    held = plain.with_transform(lambda batch: {"text": [text.upper() for text in batch["text"]]})
    config = SFTConfig(output_dir=str(tmp_path), max_steps=1, preflight=False)
    for rows, others in ((held, None), (plain, held), (rows_of(held), None)):
        with pytest.raises(DataError, match=r"has a transform .*at each reading.*with_format\(None\)\.map"):
            SFTTrainer(load(), rows, config, eval_dataset=others)


def test_empty_columns_of_a_row_stay_and_a_column_that_is_no_message_too() -> None:
    row = {"prompt": "a", "answer": None, "cast": [{"role": "knight", "name": None}], "extra": {"split": None}}
    assert rows_of([row])[0] == row


def test_the_columns_of_a_list_are_those_of_all_its_rows() -> None:
    assert columns_of(rows_of([{"prompt": "a"}, {"prompt": "b", "answer": "c"}])) == ["prompt", "answer"]


SHOWN = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": "image", "image": "a.png"}]}
LINKED = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}


@pytest.mark.parametrize(("rows", "message"), [
    ([{"prompt": "What is this?", "image": "a.png"}], "the column 'image', and images are not .*remove_columns"),
    ([{"prompt": "One.", "images": None}, {"prompt": "Two.", "images": ["a.png"]}],
     "the column 'images', and images are not supported"),
    ([{"prompt": [SHOWN]}], "has images in the messages of 'prompt', and images are not supported"),
    ([{"messages": [LINKED]}], "has images in the messages of 'messages', and images are not supported"),
])
@pytest.mark.parametrize("held", [list, Dataset.from_list])
def test_rows_with_images_are_refused_when_they_are_handed_in(held: Any, rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"^mine (has )?{message}"):
        rows_of(held(rows), "mine")


def test_a_stream_with_a_column_of_images_is_refused_when_it_is_handed_in() -> None:
    stream = Dataset.from_list([{"prompt": "What is this?", "images": ["a.png"]}]).to_iterable_dataset()
    with pytest.raises(DataError, match="the column 'images', and images are not supported"):
        rows_of(stream)
