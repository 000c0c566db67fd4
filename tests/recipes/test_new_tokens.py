"""Recipe `new_tokens`: its tokens say what the answers need, and begin as one row; a run trains and keeps them."""

import re
from pathlib import Path

import pytest
import torch
from recipe_runs import invoke_well, lines, records, run_well
from safetensors.torch import load_file

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.recipes.new_tokens import EXAM, PRESETS, TOKENS, make_dataset, right_steps
from lowmem_grpo.recipes.presets import SIZES

FEW = ["train_size=8", "max_completion_length=8", "sft_steps=1"]
MEANT = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}


def test_answers_follow_from_what_the_tokens_mean_and_every_problem_has_all_of_them() -> None:
    for row in make_dataset("test", 200, seed=4):
        question = row["prompt"][0]["content"]
        assert re.fullmatch(r"Start with \d+\.( <\|(plus|minus|times)\|> \d+\.){4} What is the result\?", question)
        total = int(question.split(".")[0].removeprefix("Start with "))
        steps = re.findall(r"<\|(\w+)\|> (\d+)", question)
        for name, number in steps:
            total = MEANT[name](total, int(number))
        assert str(total) == row["answer"] and {name for name, _ in steps} == {*MEANT}
        assert row["completion"].splitlines() == [*row["lines"], f"Answer: {total}"]


@pytest.mark.parametrize(("text", "share"), [
    ("3 + 4 = 7\n7 * 2 = 14\nAnswer: 14", 1.0), ("3 + 4 = 7\n7 * 2 = 15\nAnswer: 15", 0.5), ("3 + 4 = 7", 0.5),
    ("3 - 4 = 1\n7 * 2 = 14", 0.0), ("", 0.0), ("First 3 + 4 = 7, then 7 * 2 = 14, then 1 + 1 = 2.", 1.0),
    ("7 * 2 = 14\n3 + 4 = 7", 0.0),
])
def test_a_completion_earns_its_steps_up_to_the_first_wrong_one(text: str, share: float) -> None:
    right = ["3 + 4 = 7", "7 * 2 = 14"]
    assert right_steps([text, [{"role": "assistant", "content": text}]], lines=[right, right]) == [share, share]


def test_a_run_trains_the_rows_of_its_tokens_and_its_adapter_is_loaded_and_tested_with_them(tmp_path: Path) -> None:
    run_well("new_tokens", tmp_path, *FEW)
    summary, line = records(tmp_path)
    assert (summary["recipe"], summary["status"], summary["sft_steps"]) == ("new_tokens", "finished", 1)
    assert line["learning_rate/embed_tokens"] == 10 * line["learning_rate"]
    asked = lines(tmp_path / "completions.jsonl")[0]["prompt"]
    assert all(token in asked for token in TOKENS.values())
    (rows,) = [kept for name, kept in load_file(tmp_path / "adapter" / "adapter_model.safetensors").items()
               if "trainable_tokens" in name]
    assert rows.shape == (3, 128) and not torch.equal(rows[0], rows[1])
    base, _ = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False)
    mean = base.get_input_embeddings().weight.data.mean(0)
    assert (rows - mean).abs().max() < 0.1  # at most the rates of two steps
    output = invoke_well("eval", tmp_path, "--recipe", "new_tokens", "--limit", "4").output
    assert "adapter" in output


def test_on_a_card_prompts_ask_for_steps_that_can_be_checked() -> None:
    assert [*PRESETS] == ["cpu", *SIZES]
    (hub,), (tiny,) = (EXAM.problems_of(name)(1, 0, None)["prompt"][0] for name in ("hub/model", "tiny"))
    assert hub["content"].removeprefix(tiny["content"]).startswith(" Write each step on a line")
