"""Recipes: exact problems, options from the command line, short runs end to end."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from datasets import Dataset
from recipe_runs import invoke, invoke_well, lines, run, run_well
from run_pages import Page
from tables import not_refused
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import tiny_model
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.recipes import arithmetic, gsm8k
from lowmem_grpo.recipes.arithmetic import ArithmeticOptions, answer_line, correct_answer, make_dataset
from lowmem_grpo.recipes.gsm8k import Gsm8kOptions
from lowmem_grpo.recipes.lesson import SHOWN, Lesson, teach
from lowmem_grpo.recipes.options import fill, parse
from lowmem_grpo.recipes.presets import prepare
from lowmem_grpo.recipes.tasks import arithmetic as arithmetic_problems
from lowmem_grpo.recipes.tasks import take
from lowmem_grpo.rewards import RewardError

RULES: dict[str, Callable[[int, int], int]] = {
    "Add": lambda total, by: total + by, "Subtract": lambda total, by: total - by,
    "Multiply by": lambda total, by: total * by,
}
RUN = ["max_steps=2", "num_generations=2", "per_device_train_batch_size=2", "max_completion_length=16"]


def evaluate(question: str) -> list[int]:
    """The start and every total, read off the question's text alone."""
    form = r"Start with \d+\.( (Add|Subtract|Multiply by) \d+\.)+ What is the result\?"
    assert re.fullmatch(form, question), question
    totals = [int(re.match(r"Start with (\d+)", question)[1])]  # type: ignore[index]
    for verb, number in re.findall(r"(Add|Subtract|Multiply by) (\d+)", question):
        totals.append(RULES[verb](totals[-1], int(number)))
    return totals


# arithmetic problems


def test_answers_are_right_and_every_kind_of_step_occurs_often() -> None:
    dataset = make_dataset("train", 3000, seed=5)
    assert dataset.column_names == ["prompt", "answer"]
    asked = [message["content"] for [message] in dataset["prompt"]]
    for question, answer in zip(asked, dataset["answer"], strict=True):
        totals = evaluate(question)
        assert str(totals[-1]) == answer, question
        assert all(0 <= total <= 99 for total in totals), question
        assert 3 <= len(totals) <= 5, question
    assert all(" ".join(asked).count(verb) > 900 for verb in RULES)
    for problem in take(arithmetic_problems.problems("train", 0), 500):
        assert [problem.start, *problem.totals] == evaluate(problem.question)
        assert [eval(line.replace(" = ", " == ")) for line in problem.lines] == [True] * len(problem.totals)


EARNED = [  # by the last number, and by the line of the answer
    ("17 + 8 = 25\nAnswer: 25", 1.0, 0.1), ("Answer: 25\n", 1.0, 0.1), ("25", 1.0, 0.0), ("Answer: 24", 0.0, 0.1),
    ("Answer: 25\n25 - 1 = 24", 0.0, 0.0), ("Answer: -25", 0.0, 0.0), ("", 0.0, 0.0), ("Answer: ", 0.0, 0.0),
    ("Answer: 25.", 1.0, 0.0), ("Answer: " + "9" * 5000, 0.0, 0.1), ("no number", 0.0, 0.0), ("Answer: ²", 0.0, 0.0),
]


def test_a_completion_earns_what_its_last_number_and_line_deserve() -> None:
    for text, right, form in EARNED:
        for completion in (text, [{"role": "assistant", "content": text}]):
            assert correct_answer([completion], answer=["25"], prompts=[""], trainer_state=None) == [right], text
            assert answer_line([completion], prompts=[""]) == [form], text


# options


def test_every_way_to_write_an_option_is_understood_with_dashes_and_equals_signs_in_its_value() -> None:
    for words in ("max_steps=7", "--max_steps 7", "--max_steps=7", "--max-steps 7", "--max-steps=7", "max-steps=7"):
        assert parse(words.split()) == {"max_steps": "7"}, words
        assert fill(ArithmeticOptions, words.split()).config == {"max_steps": 7}, words
    options = fill(Gsm8kOptions, ["gpu=24", "lora-rank=8", "load_in_4bit=false", "seed=1", "resume=true"])
    assert (options.gpu, options.lora_rank, options.load_in_4bit, options.resume) == ("24", 8, False, True)
    assert options.config == {"seed": 1}
    assert parse(["output_dir=a=b", "--run-name", "x-y=z", "--seed", "-1", "learning_rate=1e-3"]) == {
        "output_dir": "a=b", "run_name": "x-y=z", "seed": "-1", "learning_rate": "1e-3",
    }


TYPED = [
    ("max_steps=3", "max_steps", 3), ("learning_rate=1e-3", "learning_rate", 1e-3), ("bf16=true", "bf16", True),
    ("bf16=False", "bf16", False), ("bf16=none", "bf16", None), ("log_completions=1", "log_completions", True),
    ("log_completions=no", "log_completions", False), ("max_prompt_length=None", "max_prompt_length", None),
    ("save_total_limit=null", "save_total_limit", None), ("reward_weights=1,0.5", "reward_weights", [1.0, 0.5]),
    ("reward_weights=2", "reward_weights", [2.0]), ("scale_rewards=none", "scale_rewards", "none"),
    ("scale_rewards=null", "scale_rewards", None),
    ("report_to=none", "report_to", ["none"]), ("report_to=wandb,tensorboard", "report_to", ["wandb", "tensorboard"]),
    ("loss_type=dr_grpo", "loss_type", "dr_grpo"), ("run_name=None", "run_name", None), ("min_p=0.1", "min_p", 0.1),
    ('lr_scheduler_kwargs={"num_cycles": 2}', "lr_scheduler_kwargs", {"num_cycles": 2}),
    ('chat_template_kwargs={"enable_thinking": false}', "chat_template_kwargs", {"enable_thinking": False}),
]


def test_a_setting_has_the_type_of_its_field() -> None:
    for word, name, value in TYPED:
        config = fill(ArithmeticOptions, [word]).config
        assert config == {name: value}, word
        assert type(config[name]) is type(value), word


def test_a_misspelt_or_mistyped_option_is_named() -> None:
    assert not_refused(lambda word: fill(ArithmeticOptions, [word]), [
        ("lora_ranks=1", "no option 'lora_ranks'; did you mean lora_rank"), ("config=1", "no option 'config'"),
        ("max_steps=1.5", "max_steps is '1.5'; it must be a whole number"), ("max_steps=none", "max_steps is 'none'"),
        ("lr_scheduler_kwargs=[1]", "is '[1]'; it must be a JSON object, or a text"),
        ("reward_weights=1,x", "it must be numbers or texts with commas between them, or none"),
        ("--max_steps", "cannot read '--max_steps'"), ("7", "cannot read '7'"),
    ], click.UsageError) == []
    with pytest.raises(click.UsageError, match=r"no option 'zzz'$"):  # nothing is close
        fill(ArithmeticOptions, ["zzz=1"])


# short runs


def rows(count: int) -> list[dict[str, str]]:
    return [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(count)]


def test_gsm8k_trains_on_a_local_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(6)))
    invoke_well("run", "gsm8k", "gpu=cpu", f"dataset={path}", f"output_dir={tmp_path / 'out'}", *RUN)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["recipe"], summary["status"], summary["steps"], summary["seed"]) == ("gsm8k", "finished", 2, 3407)
    steps = lines(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2]
    assert {f"rewards/{function.__name__}/mean" for function in gsm8k.REWARDS} <= steps[0].keys()
    assert (tmp_path / "out" / "report.html").is_file()
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()
    evaluated = invoke_well("eval", tmp_path / "out", "--recipe", "gsm8k", "--limit", "3", "--max-tokens", "4")
    assert f"problems as in the run with dataset={path}, seed 3407; KEY=VALUE" in " ".join(evaluated.output.split())
    (asked,) = [json.loads((tmp_path / "out" / "eval.json").read_text())["rows"]]
    assert len(asked) == 3 and all("What is" in json.dumps(row) for row in asked)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_rows_without_a_label_are_left_out(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / f"rows.{kind}"
    table = Dataset.from_list([
        {"question": "1 + 1?", "answer": "#### 1,002"}, {"question": None, "answer": "#### 3"},
        {"question": "2 + 2?", "answer": None}, {"question": "3 + 3?", "answer": "6"},
        {"question": "4 + 4?", "answer": "#### "},
    ])
    {"jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[kind](str(path))
    (row,) = gsm8k.make_dataset(str(path))
    assert (row["question"], row["answer"], row["prompt"][1]["content"]) == ("1 + 1?", "1002", "1 + 1?")
    assert "4 of 5 rows have no question, or no label after ####" in caplog.text
    (tmp_path / "none.jsonl").write_text('{"question": 5, "answer": null}\n' * 2)
    with pytest.raises(ValueError, match=r"2 of 2 rows have no question, or no label after ####.*lowmem-grpo new"):
        gsm8k.make_dataset(str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(("source", "name"), [
    ("openai/gsm8k", "main"), ("openai/gsm8k:socratic", "socratic"), ("org/mine", None),
])
def test_another_configuration_of_the_hub_is_read(source: str, name: str | None, monkeypatch: Any) -> None:
    seen: list[dict[str, Any]] = []

    def load_dataset(**wanted: Any) -> Dataset:
        seen.append(wanted)
        return Dataset.from_list(rows(1))

    monkeypatch.setattr("lowmem_grpo.models.hub.find_dataset", lambda name: None)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert gsm8k.make_dataset(source, "test")["answer"][0] == "0"
    assert (seen[0]["path"], seen[0]["name"], seen[0]["split"]) == (source.partition(":")[0], name, "test")


def test_arithmetic_runs_from_end_to_end_and_measures_before_and_after(tmp_path: Path) -> None:
    words = ("eval_problems=8", "train_size=16", "loss_type=gspo", "scale_rewards=group")
    result = run_well("arithmetic", tmp_path / "run", *words, "--seed", "7")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["seed"], summary["eval_problems"], summary["status"]) == (1, 7, 8, "finished")
    assert (summary["config"]["loss_type"], summary["config"]["scale_rewards"]) == ("gspo", "group")
    for name in ("accuracy_before", "accuracy_after"):
        assert summary[name] in [count / 8 for count in range(9)]
    assert summary["train_seconds"] > 0
    assert len(summary["samples"]) == SHOWN
    assert set(summary["samples"][0]) == {"prompt", "answer", "before", "after", "right_before", "right_after"}
    change = summary["difference"]
    assert change["accuracy"] == summary["accuracy_after"] - summary["accuracy_before"]
    assert change["better"] + change["worse"] + change["same"] == 8
    assert f"report: {tmp_path / 'run'}/report.html" in result.output  # no path is broken at the terminal's width
    assert summary["right"] == "correct_answer" and summary["machine"]["parameters"] > 1_000_000
    assert "accuracy before" in result.output and "\n1 step in " in result.output
    assert (tmp_path / "run" / "checkpoint-1").is_dir()
    again = run("arithmetic", tmp_path / "run", "eval_problems=8")
    assert again.exit_code == 1
    assert "already holds a run" in again.output and "accuracy" not in again.output
    over = run_well("arithmetic", tmp_path / "run", *words, "resume=true")
    assert "is finished: 1 step; raise max_steps to go on" in over.output and "accuracy" not in over.output
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary


def breaks(completions: list[Any], **kwargs: Any) -> list[float]:
    raise ZeroDivisionError("no units")


def is_stopped(completions: list[Any], **kwargs: Any) -> list[float]:
    os.kill(os.getpid(), signal.SIGTERM)
    return [float(place) for place in range(len(completions))]


@pytest.mark.parametrize(("reward", "error", "status"), [
    (breaks, RewardError, "failed"), (is_stopped, KeyboardInterrupt, "interrupted"),
])
@pytest.mark.every(2)
def test_a_run_that_failed_or_was_stopped_tells_its_recipe_and_what_was_measured_before(
    reward: Any, error: type[BaseException], status: str, tmp_path: Path
) -> None:
    options = fill(ArithmeticOptions, [*RUN, "gpu=cpu", "preflight=false", f"output_dir={tmp_path}"])
    setup = prepare(options, arithmetic.DEFAULTS, arithmetic.PRESETS)
    rows = make_dataset("train", 16), make_dataset("test", 4)
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # what the signal does without a run
    try:
        with pytest.raises(error):
            teach(setup, Lesson("sums", rows[0], [reward], rows[1], correct_answer, facts={"digits": 2}))
    finally:
        signal.signal(signal.SIGTERM, handler)
    summary = json.loads((tmp_path / "summary.json").read_text())
    found = tuple(summary[name] for name in ("status", "recipe", "eval_problems", "right", "digits"))
    assert found == (status, "sums", 4, "correct_answer", 2)
    assert summary["accuracy_before"] in [count / 4 for count in range(5)] and summary["accuracy_after"] is None
    page = Page(tmp_path / "report.html")
    assert page.data["title"] == "sums" and f"{summary['accuracy_before']:.1%}" in page.prose
    assert "not measured" in page.prose


def test_a_run_with_a_warm_up_of_another_run_in_its_folder_is_refused_before_anything_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "metrics.jsonl").write_text("{}\n")
    monkeypatch.setattr(FastPeftModel, "fast_generate", lambda *args: pytest.fail("it samples"))
    result = invoke("run", "proximity", "train_size=16", "eval_problems=2", f"output_dir={tmp_path}")
    assert result.exit_code == 1 and "sft already holds a run (metrics.jsonl)" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["sft"]


def test_the_embedded_model_can_be_made_again(tmp_path: Path) -> None:
    result = CliRunner().invoke(tiny_model.main, ["--out", str(tmp_path / "tiny"), "--steps", "2", "--batch", "4"])
    assert result.exit_code == 0, result.output
    model, tokenizer = (kind.from_pretrained(tmp_path / "tiny") for kind in (AutoModelForCausalLM, AutoTokenizer))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Start with 1."}], tokenize=False,
                                         add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert torch.isfinite(model(torch.tensor([ids])).logits).all()
