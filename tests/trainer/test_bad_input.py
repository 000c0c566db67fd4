"""The loop with data, models and reward functions that are wrong."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer_runs import QUESTIONS, adapter, digit_sum, load, make, same

from lowmem_grpo import GRPOTrainer, RLOOTrainer, SFTTrainer
from lowmem_grpo.rewards.calling.scorer import RewardError
from lowmem_grpo.runs.records import read_lines


@pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer, SFTTrainer])
@pytest.mark.parametrize("given", [{}, {"model": None, "train_dataset": [{"prompt": "?"}]}])
def test_a_trainer_without_a_model_says_what_it_takes(trainer: Any, given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=rf"{trainer.__name__} needs model: what FastLanguageModel\.get_peft_model ret"):
        trainer(**given)


# Data that cannot be used


def test_bad_rows_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = [{"prompt": question} for question in QUESTIONS[:2]]
    bad: list[Any] = ["", " \n", None, 7, [], [{"role": "user", "content": ""}], [{"content": "?"}], ["?"], "1+1 " * 99]
    trainer = make(tmp_path, rows=[*good, *({"prompt": prompt} for prompt in bad)], max_prompt_length=60, max_steps=3)
    trainer.train()
    # rows are drawn in a seeded order: three steps of two good rows are three whole passes, but for a tail of bad rows
    counted = sum(trainer.source.skipped.values())
    assert 2 * len(bad) <= counted <= 3 * len(bad)
    assert "prompt longer than 60 tokens" in trainer.source.skipped
    assert "prompt is int, not text or chat" in trainer.source.skipped
    assert read_lines(tmp_path / "metrics.jsonl")[-1]["data/skipped_rows"] == counted
    assert sum(json.loads((tmp_path / "summary.json").read_text())["skipped_rows"].values()) == counted
    assert "row 2 skipped: empty prompt" in caplog.text
    assert {line["prompt"] for line in read_lines(tmp_path / "completions.jsonl")} <= set(QUESTIONS)


def test_rows_with_different_columns_keep_their_values(tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(completions: list[Any], answer: list[Any], source: list[Any], **kwargs: Any) -> list[float]:
        seen.extend(zip(answer, source, strict=True))
        return digit_sum(completions)

    rows = [{"prompt": QUESTIONS[0], "answer": "1"}, {"prompt": QUESTIONS[1], "source": "x"}]
    make(tmp_path, reward=reward, rows=rows, max_steps=1, shuffle_dataset=False).train()
    assert seen == [("1", None)] * 4 + [(None, "x")] * 4


def test_training_does_not_depend_on_the_pad_token(tmp_path: Path) -> None:
    """With None a padding token may be asked for; with the end token, ends of completions may be taken for padding."""
    ends = []
    for name, pad in (("usual", "usual"), ("none", None), ("end", "<|im_end|>")):
        model = load()
        if pad != "usual":
            model.loaded.tokenizer.pad_token = pad
        trainer = make(tmp_path / name, model=model)
        trainer.train()
        ends.append((adapter(trainer), (tmp_path / name / "completions.jsonl").read_text()))
    assert all(same(end[0], ends[0][0]) and end[1] == ends[0][1] for end in ends)


def test_a_completion_longer_than_the_context_is_refused_by_the_constructor(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_completion_length \(128\).*context of 128"):
        make(tmp_path, max_completion_length=128)
    with pytest.raises(ValueError, match=r"prompt of 120 tokens.*max_seq_length"):
        make(tmp_path, max_prompt_length=120, max_completion_length=24)


# Reward functions that misbehave


@pytest.mark.every(2)
@pytest.mark.parametrize(("place", "error"), [
    ("reward", ZeroDivisionError), ("reward", KeyboardInterrupt), ("on_step_begin", KeyboardInterrupt),
    ("on_pre_optimizer_step", ValueError), ("on_step_end", SystemExit), ("on_log", KeyboardInterrupt),
])
def test_what_the_user_wrote_fails_and_leaves_a_checkpoint_of_the_steps_before_it(
    tmp_path: Path, place: str, error: type[BaseException]
) -> None:
    def fails(completions: list[Any], trainer_state: Any, **kwargs: Any) -> list[float]:
        if trainer_state.global_step == 1 and place == "reward":
            raise error("no units")
        return digit_sum(completions)

    def called(args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 1:
            raise error("no units")

    straight = make(tmp_path / "straight", max_steps=3)
    straight.train()
    settings = {"max_steps": 3, "save_strategy": "steps"}
    listeners = [] if place == "reward" else [SimpleNamespace(**{place: called})]
    raised, said = (RewardError, "fails raised Zero.*: ") if error is ZeroDivisionError else (error, "^")
    with pytest.raises(raised, match=f"{said}no units") as caught:
        make(tmp_path / "run", reward=fails, callbacks=listeners, **settings).train()
    assert f"Saved {tmp_path / 'run' / 'checkpoint-1'}" in "\n".join(caught.value.__notes__)
    resumed = make(tmp_path / "run", **settings)
    assert resumed.train(resume_from_checkpoint=True).finished
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert same(adapter(resumed), adapter(straight))

def test_a_trainer_goes_on_after_an_error_between_backward_and_step_without_that_gradient(tmp_path: Path) -> None:
    errors = [ValueError("once")]

    def fails(args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 1 and errors:
            raise errors.pop()

    straight = make(tmp_path / "straight", max_steps=3)
    straight.train()
    trainer = make(tmp_path / "run", callbacks=[SimpleNamespace(on_pre_optimizer_step=fails)], max_steps=3)
    with pytest.raises(ValueError, match="once"):
        trainer.train()
    assert trainer.train(resume_from_checkpoint=True).finished
    assert same(adapter(trainer), adapter(straight))


def test_a_schedule_that_fails_after_the_optimizers_step_does_not_replace_the_checkpoint(tmp_path: Path) -> None:
    file, saved, model = tmp_path / "checkpoint-1" / "adapter_model.safetensors", list[bytes](), load()
    optimizer = torch.optim.SGD([tensor for tensor in model.parameters() if tensor.requires_grad], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (2 - step))
    read = SimpleNamespace(on_save=lambda *_, **__: saved.append(file.read_bytes()))
    with pytest.raises(ZeroDivisionError):
        make(tmp_path, model=model, optimizers=(optimizer, schedule), callbacks=[read], max_steps=3,
             save_strategy="steps", save_steps=1).train()
    assert saved == [file.read_bytes()]



def equal(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.5] * len(completions)


def no_opinion(completions: list[Any], **kwargs: Any) -> list[None]:
    return [None] * len(completions)


@pytest.mark.filterwarnings("error:.*lr_scheduler")
def test_none_for_all_completions_trains_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    trainer = make(tmp_path, reward=no_opinion)
    before = adapter(trainer)
    trainer.train()
    assert same(adapter(trainer), before)
    for line in read_lines(tmp_path / "metrics.jsonl"):
        assert (line["groups/with_signal"], line["optimizer/skipped"], line["completions/trained"]) == (0, 1, 0)
        assert "reward" not in line
    assert (tmp_path / "report.html").is_file()


def test_a_function_without_an_opinion_leaves_the_rewards_of_others(tmp_path: Path) -> None:
    trainer = make(tmp_path, reward=[digit_sum, no_opinion], reward_weights=[2.0, 1.0], max_steps=1)
    trainer.train()
    for line in read_lines(tmp_path / "completions.jsonl"):
        assert line["rewards"]["no_opinion"] is None
        assert line["reward"] == 2 * line["rewards"]["digit_sum"]


def test_a_warning_says_that_there_is_nothing_to_learn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    trainer = make(tmp_path, reward=equal, nothing_to_learn_steps=2, max_steps=5)
    before = adapter(trainer)
    trainer.train()
    told = [record.getMessage() for record in caplog.records if "nothing to learn" in record.getMessage()]
    assert [text.split(":")[0] for text in told] == ["nothing to learn for 2 steps", "nothing to learn for 4 steps"]
    assert "mean 0.5" in told[0]
    assert "easier problems" in told[0]
    assert same(adapter(trainer), before)
    assert all(line["frac_reward_zero_std"] == 1 for line in read_lines(tmp_path / "metrics.jsonl"))
