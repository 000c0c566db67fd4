"""What a run would stumble over is said before its first step: each check fires on broken input alone."""

import io
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer, SamplingParams, SFTConfig, SFTTrainer
from lowmem_grpo.data.prompts import PromptEncoder
from lowmem_grpo.memory.cards import device
from lowmem_grpo.preflight import repeats, room, rows
from lowmem_grpo.preflight.before_run import PreflightError
from lowmem_grpo.preflight.checks import CHECKS
from lowmem_grpo.preflight.first_steps import FirstSteps, about_rewards
from lowmem_grpo.preflight.subject import Subject
from lowmem_grpo.rewards import RewardScorer
from lowmem_grpo.runs.findings import SEVERITIES
from lowmem_grpo.runs.records import RunRecords
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.train.run_memory import plan_run, settings_of
from lowmem_grpo.types import Rollout, RolloutGroup
from lowmem_grpo.units import GIB
from lowmem_grpo.views.pace import Pace
from lowmem_grpo.views.terminal import CurrentStderr

ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": f"Start with {n}. Add 4. What is the result?"}], "answer": str(n + 4)}
    for n in range(3, 15)
]
TEXTS = [{"prompt": f"Start with {n}. Add 4. What is the result?\n", "answer": str(n + 4)} for n in range(3, 15)]
WITH_SYSTEM = [{"prompt": [{"role": "system", "content": "Be brief."}, *row["prompt"]]} for row in ROWS]
SMALL: dict[str, Any] = {
    "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 24, "max_steps": 2,
    "learning_rate": 1e-2, "save_strategy": "no",
}
NO_HEADER = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
LIKE_MISTRAL = ("{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] }}]{% else %}{{ m['content'] }}"
                "<|im_end|>{% endif %}{% endfor %}")
LIKE_GEMMA = ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
              + NO_HEADER + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
LIKE_QWEN3 = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
              "{% if m['role'] == 'assistant' %}(thought)\n{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
              "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
USERS_ALONE = ("{% for m in messages if m['role'] != 'system' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
               "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def digit_sum(completions: list[Any], **kwargs: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(sum(int(c) for c in text if c in "0123456789")) for text in texts]


def reads_answer(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    return digit_sum(completions)


def nothing_right(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def load() -> Any:
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    return FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False)


@pytest.fixture(scope="module")
def shared() -> Any:
    """A model for trainers that only look; what they change of it, they change back."""
    return load()


@pytest.fixture
def tokenizer(shared: Any) -> Iterator[Any]:
    """Its tokenizer, as it was afterwards."""
    found = shared.loaded.tokenizer
    names = ("chat_template", "eos_token", "pad_token", "bos_token")
    before = {name: getattr(found, name) for name in names}
    yield found
    for name, value in before.items():
        setattr(found, name, value)


def make(folder: Path, dataset: Any = ROWS, reward: Any = digit_sum, model: Any = None, evaluation: Any = None,
         **settings: Any) -> GRPOTrainer:
    config = GRPOConfig(output_dir=str(folder / "run"), **(SMALL | settings))
    return GRPOTrainer(model or load(), reward, config, dataset, evaluation)


def found(trainer: Any, severity: str | None = None) -> list[str]:
    """Findings as lines; notes only where they are asked for."""
    return [str(one) for one in trainer.preflight()
            if (one.severity != "note" if severity is None else one.severity == severity)]


# A healthy run


@pytest.mark.parametrize("dataset", [ROWS, TEXTS, WITH_SYSTEM], ids=["chat", "text", "with a system message"])
def test_a_healthy_run_is_warned_of_something(tmp_path: Path, shared: Any, dataset: Any) -> None:
    rewards = [digit_sum, *([] if dataset is WITH_SYSTEM else [reads_answer])]
    assert found(make(tmp_path, dataset, rewards, shared, dataset[:4], save_strategy="steps")) == []


@pytest.mark.parametrize("template", [LIKE_MISTRAL, LIKE_GEMMA, LIKE_QWEN3],
                         ids=["no head of an answer", "no system message", "thoughts before an answer"])
def test_a_template_that_fits_its_prompts_is_complained_of(
    tmp_path: Path, shared: Any, tokenizer: Any, template: str
) -> None:
    tokenizer.chat_template = template
    assert found(make(tmp_path, model=shared)) == []


def test_a_healthy_run_says_more_than_two_lines_or_waits_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = [{"prompt": [{"role": "user", "content": f"Start with {n}. Add 4. What is the result?"}]}
               for n in range(1000)]
    trainer = make(tmp_path, dataset, max_steps=3, save_strategy="steps", save_steps=3, max_completion_length=64)
    began = time.monotonic()
    trainer.preflight()
    assert time.monotonic() - began < 2
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines[1:3]] == ["step", "step"] and len(lines) == 5
    assert lines[0].startswith("preflight: 256 of 1,000 rows looked at, nothing wrong")
    assert "s a step (sampling " in lines[3] and "to go until step 3" in lines[3]
    assert "the next checkpoint is due at step 3, in " in lines[3]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_preflight_changes_the_training(tmp_path: Path) -> None:
    adapters = []
    for preflight in (True, False):
        trainer = make(tmp_path / str(preflight), preflight=preflight, disable_tqdm=True)
        trainer.train()
        adapters.append(torch.cat([p.detach().flatten() for p in trainer.policy.trainable]))
    assert torch.equal(*adapters)


# What is wrong with a run

Case = tuple[str, str, str, Callable[..., Any]]
CASES: list[Case] = []  # name of the check, severity, what is said, what makes it so


def case(check: str, severity: str, said: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function that makes a trainer of which exactly one thing is wrong."""

    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append((check, severity, said, build))
        return build

    return register


@case("rows", "error", r"the tokenizer has no chat template\. What to do: set tokenizer\.chat_template")
def base_model(make: Any, tokenizer: Any, patch: Any) -> Any:
    tokenizer.chat_template = None
    return make()


@case("rows", "error", r"^all 12 rows cannot be made into a prompt \(TemplateError: System role not supported\)\. ")
def no_system_message(make: Any, tokenizer: Any, patch: Any) -> Any:
    tokenizer.chat_template = LIKE_GEMMA
    return make(WITH_SYSTEM)


@case("rows", "error", r"^1 of 13 rows cannot be made into a prompt \(AttributeError: ")
def broken_row(make: Any, tokenizer: Any, patch: Any) -> Any:
    return make([*ROWS, 7])


@case("skipped rows", "warning", r"^3 of 15 rows will be skipped: empty prompt \(2\), prompt is int, not text or chat")
def some_skipped(make: Any, tokenizer: Any, patch: Any) -> Any:
    return make([*ROWS, {"prompt": ""}, {"prompt": None}, {"prompt": 7}])


@case("skipped rows", "error", r"^no row of the dataset can be used: empty prompt \(2\)")
def all_skipped(make: Any, tokenizer: Any, patch: Any) -> Any:
    return make([{"prompt": ""}, {"prompt": None}])


@case("prompt lengths", "warning", r"^1 of 13 rows will be skipped: longer than max_prompt_length \(60\), the longest "
                                   r"has \d{3} tokens\. What to do: raise max_prompt_length")
def one_too_long(make: Any, tokenizer: Any, patch: Any) -> Any:
    return make([*TEXTS, {"prompt": "1 + 1 " * 40}], max_prompt_length=60)


@case("prompt lengths", "error", r"^no row of the dataset can be used: longer than 8 tokens, all that the context of "
                                 r"128 leaves, the longest has \d\d tokens\. What to do: load")
def all_too_long(make: Any, tokenizer: Any, patch: Any) -> Any:
    return make(max_completion_length=120)


@case("few rows", "warning", r"^a generation takes 2 prompts and the dataset has 1: ")
def one_row(make: Any, tokenizer: Any, patch: Any) -> Any:
    return make(ROWS[:1])


@case("duplicates", "warning", r"^3 of 15 rows repeat the prompt of another one\. What to do: remove")
def repeated_rows(make: Any, tokenizer: Any, patch: Any) -> Any:
    return make([*ROWS, *ROWS[:3]])


@case("duplicates", "warning", r"^1600 of 2000 rows repeat the prompt of another one\. What to do: remove")
def copies_side_by_side(make: Any, tokenizer: Any, patch: Any) -> Any:
    patch.setattr(repeats, "SECONDS", 60)
    return make([{"prompt": f"How much is {i}?"} for i in range(400) for _ in range(5)])


@case("generation prompt", "warning", r"leaves out '<\|im_start\|>assistant' at the end of a prompt")
def no_header(make: Any, tokenizer: Any, patch: Any) -> Any:
    tokenizer.chat_template = NO_HEADER
    return make()


@case("dropped messages", "warning", r"leaves out the text of 12 system messages in 12 prompts looked at")
def users_alone(make: Any, tokenizer: Any, patch: Any) -> Any:
    tokenizer.chat_template = USERS_ALONE
    return make(WITH_SYSTEM)


@case("two start tokens", "warning", r"^the prompts of all 12 rows begin with two start tokens\. What to do: give chat")
def two_starts(make: Any, tokenizer: Any, patch: Any) -> Any:
    tokenizer.bos_token = "<|endoftext|>"
    return make([{"prompt": f"{2 * tokenizer.bos_token}{row['prompt']}"} for row in TEXTS])


@case("no end token", "warning", r"^no token ends a completion: .*set tokenizer\.eos_token")
def no_end(make: Any, tokenizer: Any, patch: Any) -> Any:
    trainer = make()
    tokenizer.eos_token = None
    patch.setattr(trainer.policy.base.generation_config, "eos_token_id", None)
    return trainer


@case("another end token", "warning", r"an answer with '<\|im_end\|>', and completions end at '<\|endoftext\|>' alone")
def another_end(make: Any, tokenizer: Any, patch: Any) -> Any:
    trainer = make()
    tokenizer.eos_token = "<|endoftext|>"
    patch.setattr(trainer.policy.base.generation_config, "eos_token_id", None)
    return trainer


@case("unknown tokens", "error", r"^the end token 9999 lies beyond the model's vocabulary of 384")
def end_beyond(make: Any, tokenizer: Any, patch: Any) -> Any:
    trainer = make(TEXTS)
    tokenizer.eos_token = None
    patch.setattr(trainer.policy.base.generation_config, "eos_token_id", 9999)
    return trainer


@case("unknown tokens", "warning", r"^the end token 9999 lies beyond")
def one_end_beyond(make: Any, tokenizer: Any, patch: Any) -> Any:
    trainer = make()
    patch.setattr(trainer.policy.base.generation_config, "eos_token_id", [2, 9999])
    return trainer


@case("unknown tokens", "error", r"^a prompt holds the token 4\d\d \('<new 99>'\), and the model's vocabulary has 384")
def added_tokens(make: Any, tokenizer: Any, patch: Any) -> Any:
    model = load()
    model.loaded.tokenizer.add_tokens([f"<new {n}>" for n in range(100)])
    return make([*TEXTS, {"prompt": "what is <new 99>?"}], model=model)


@case("unknown tokens", "error", r"^the padding token 4\d\d lies beyond")
def padding_beyond(make: Any, tokenizer: Any, patch: Any) -> Any:
    model = load()
    model.loaded.tokenizer.add_tokens([f"<new {n}>" for n in range(100)])
    model.loaded.tokenizer.pad_token = "<new 99>"
    return make(model=model)


@case("reserved columns", "error", r"^dataset columns \['trainer_state'\] have names of reward function arguments\. ")
def reserved(make: Any, tokenizer: Any, patch: Any) -> Any:
    return make([row | {"trainer_state": 1} for row in ROWS])


@case("missing columns", "error", r"^reads_answer: it requires answer, which no dataset column provides; the dataset's "
                                  r"columns are prompt\. What to do: rename")
def missing(make: Any, tokenizer: Any, patch: Any) -> Any:
    return make([{"prompt": row["prompt"]} for row in ROWS], reads_answer)


@case("missing columns", "error", r"^reads_answer: .*; the evaluation dataset's columns are prompt\. What")
def missing_in_evaluation(make: Any, tokenizer: Any, patch: Any) -> Any:
    return make(ROWS, reads_answer, evaluation=[{"prompt": "1 + 1?"}])


@case("empty columns", "warning", r"^reads_answer: it reads the column 'answer', which is None in all 12 rows")
def empty(make: Any, tokenizer: Any, patch: Any) -> Any:
    return make([row | {"answer": None} for row in ROWS], [reads_answer, digit_sum])


@case("evaluation rows", "error", r"^no row of the evaluation dataset can be used; the first one: empty prompt")
def no_evaluation(make: Any, tokenizer: Any, patch: Any) -> Any:
    return make(evaluation=[{"prompt": ""}])


@case("output_dir", "error", r"^output_dir is '.*file/run', and .*file is a file\. What to do: choose another")
def a_file(make: Any, tokenizer: Any, patch: Any) -> Any:
    trainer = make()
    trainer.run_dir = trainer.run_dir.parent / "file" / "run"
    trainer.run_dir.parent.write_text("")
    return trainer


@case("output_dir", "error", r"may not be written to\. What to do: choose another output_dir, or change")
def read_only(make: Any, tokenizer: Any, patch: Any) -> Any:
    patch.setattr(room.os, "access", lambda path, mode: False)
    return make()


def with_free(patch: Any, free: int) -> None:
    patch.setattr(room.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


@case("disk", "error", r"0\.1 MiB free, and one checkpoint takes 0\.\d MiB\. What to do: make room")
def no_room(make: Any, tokenizer: Any, patch: Any) -> Any:
    with_free(patch, 100_000)
    return make(save_strategy="steps")


@case("disk", "error", r"0\.0 MiB free, and the adapter takes 0\.\d MiB\. What to do: make room, or choose")
def no_room_for_the_adapter(make: Any, tokenizer: Any, patch: Any) -> Any:
    with_free(patch, 100)
    return make(save_strategy="no")


@case("disk", "warning", r"2\.0 MiB free; 5 checkpoints take \d\.\d MiB, and completions.jsonl up to ")
def little_room(make: Any, tokenizer: Any, patch: Any) -> Any:
    with_free(patch, 2**21)
    return make(save_strategy="steps", save_steps=1, max_steps=9)


def planned(trainer: Any, card: str, **settings: Any) -> Any:
    plan = plan_run(replace(settings_of(trainer.model, trainer.args, "transformers", 128), **settings), trainer.model,
                    device(card))
    trainer.memory.advice.plan = plan
    return trainer


@case("host memory", "warning", r"^the host has (0\.50 GiB|512\.0 MiB) of memory to spare; .* may take .*\. ")
def little_host_memory(make: Any, tokenizer: Any, patch: Any) -> Any:
    patch.setattr(room, "available_host_bytes", lambda: GIB // 2)
    return planned(make(), "16GiB", checkpointing="offload")


@case("plan", "warning", r"^by the plan this run takes .* of the card, and may use 1\.0 MiB: .*tried all the same.*\. "
                         r"What to do: try a lower max_completion_length")
def over_plan(make: Any, tokenizer: Any, patch: Any) -> Any:
    return planned(make(), "1MiB")


@case("bfloat16", "warning", r"^the run computes in bfloat16, which this card only emulates\. What to do: load")
def emulated(make: Any, tokenizer: Any, patch: Any) -> Any:
    trainer = make()
    patch.setattr(room, "is_bfloat16_supported", lambda: False)
    patch.setattr(type(trainer.policy), "device", torch.device("cuda"))
    trainer.policy.autocast_dtype = torch.bfloat16
    return trainer


@case("scale", "note", r"^the run has 2 steps \(from 300 on is usual\) and 12 rows \(from 500 on is usual\)")
def small(make: Any, tokenizer: Any, patch: Any) -> Any:
    return make()


@pytest.mark.parametrize(("check", "severity", "said", "build"), CASES, ids=[entry[3].__name__ for entry in CASES])
def test_what_is_wrong_is_not_said_or_something_else_is(
    tmp_path: Path, shared: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, check: str, severity: str, said: str,
    build: Callable[..., Any],
) -> None:
    def make_here(dataset: Any = ROWS, reward: Any = digit_sum, model: Any = shared, **settings: Any) -> GRPOTrainer:
        return make(tmp_path, dataset, reward, model, **settings)

    trainer = build(make_here, tokenizer, monkeypatch)
    (line,) = found(trainer, "note") if severity == "note" else found(trainer)
    assert re.search(said, line)
    assert "\n" not in line
    subject = Subject.of(trainer)
    (look,) = [one.look for one in CHECKS if one.name == check]
    assert [one.severity for one in look(subject)] == [severity]


def test_a_check_is_not_tried_here_or_its_worst_severity_is_another() -> None:
    worst = {one.name: min((severity for name, severity, _, _ in CASES if name == one.name), key=SEVERITIES.index)
             for one in CHECKS}
    assert worst == {one.name: one.severity for one in CHECKS}


def test_stop_strings_that_end_an_answer_do_not_count(
    tmp_path: Path, shared: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found_with(**stops: Any) -> list[str]:
        params = SamplingParams(max_tokens=24, n=4, **stops)
        return [line.partition(":")[0] for line in found(make(tmp_path, model=shared, vllm_sampling_params=params))]

    assert found_with(ignore_eos=True, stop="<|im_end|>") == []
    assert found_with(ignore_eos=True) == ["no token ends a completion"]
    trainer = another_end(lambda: make(tmp_path, model=shared), tokenizer, monkeypatch)
    assert len(found(trainer)) == 1
    assert found_with(stop="<|im_end|>") == found_with(stop_token_ids=[2]) == []


# What happens then


def test_a_run_that_cannot_work_costs_the_files_of_the_one_before_it(tmp_path: Path, shared: Any) -> None:
    make(tmp_path, max_steps=1, save_strategy="steps").train()
    run = tmp_path / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    rows = [{"prompt": "1 + 1 = " * 30}]
    trainer = make(tmp_path, rows, reads_answer, shared, overwrite_output_dir=True, disable_tqdm=True)
    with pytest.raises(PreflightError, match=r"(?s)preflight found 2 problems; .*:\n- no row.*\n- reads_answer: it "):
        trainer.train()
    with pytest.raises(PreflightError):
        trainer.train(resume_from_checkpoint=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert trainer.source.position == 0


def test_warnings_stop_a_run_or_stay_unsaid(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert make(tmp_path, [*ROWS, {"prompt": ""}], max_steps=1, disable_tqdm=True).train().finished
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("preflight")]
    assert said == ["preflight: 1 of 13 rows will be skipped: empty prompt (1). What to do: mend or remove such rows"]


def test_preflight_cannot_be_turned_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lowmem_grpo.preflight.before_run.look_over", lambda subject: pytest.fail("it looked"))
    trainer = make(tmp_path, [*ROWS, {"prompt": ""}], nothing_right, preflight=False, max_steps=3)
    assert trainer.train().finished
    assert [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()] == ["step"] * 3
    assert [record for record in caplog.records if record.getMessage().startswith(("preflight", "first step"))] == []
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["expected_seconds"] > 0


def test_fine_tuning_is_not_looked_at_or_asked_for_rewards(
    tmp_path: Path, shared: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row | {"completion": row["answer"]} for row in ROWS]
    settings: dict[str, Any] = {"output_dir": str(tmp_path / "sft"), "max_steps": 3, "per_device_train_batch_size": 2}
    trainer = SFTTrainer(load(), rows, SFTConfig(**settings))
    assert found(trainer) == []
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("preflight: 12 of 12 rows") and " s a step: " in lines[3] and len(lines) == 5
    tokenizer.chat_template = None
    with pytest.raises(PreflightError, match="no chat template"):
        SFTTrainer(shared, rows, SFTConfig(**(settings | {"output_dir": str(tmp_path / "none")}))).train()
    assert not (tmp_path / "none").exists()


# A sample of rows


class Slow:
    """A dataset whose rows take long."""

    column_names = ("prompt",)

    def __init__(self, length: int, seconds: float) -> None:
        self.length, self.seconds, self.seen = length, seconds, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        self.seen.append(index)
        return {"prompt": f"row {index}"}


def test_a_large_or_slow_dataset_holds_up_a_run_or_only_its_beginning_is_seen(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, slow, encoder = Slow(10**6, 0), Slow(10**6, 0.01), PromptEncoder(tokenizer, 100)
    assert len(rows.sample_rows(large, encoder).rows) == len(set(large.seen)) == rows.MOST_ROWS
    monkeypatch.setattr(rows, "SECONDS", 0.2)
    assert rows.LEAST_ROWS <= len(rows.sample_rows(slow, encoder).rows) < 40
    for seen in (large.seen, slow.seen):
        quarters = [sum(place * 250_000 <= index < (place + 1) * 250_000 for index in seen) for place in range(4)]
        assert max(quarters) - min(quarters) <= 1


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 256])
def test_a_row_is_left_out_or_looked_at_twice(count: int) -> None:
    assert sorted(rows.spread(count)) == list(range(count))


# The first steps


def groups_of(*rewards: list[float | None], finish: Any = "stop", invalid: bool = False) -> list[RolloutGroup]:
    """A group for each list, of rollouts that a function `pays` has paid so."""
    broken = {"pays": float("nan")} if invalid else {}
    return [RolloutGroup({}, [1], [
        Rollout([1], [0.0], finish, rewards={"pays": pay}, reward=pay, invalid_rewards=broken) for pay in pays
    ]) for pays in rewards]


def pays(completions: list[Any], **kwargs: Any) -> list[float]:
    return []


@pytest.mark.parametrize(("groups", "said"), [
    (groups_of([0, 0]), r"^0 of 1 groups carry signal, the completions of each prompt all earn the same"),
    (groups_of(*[[1, 1]] * 4), r"^0 of 4 groups carry signal"),
    (groups_of([1, 0], *[[1, 1]] * 5), r"^1 of 6 groups carry signal, in the others all completions earn the same"),
    (groups_of([1, 0], finish="length"), r"^100% of the completions were cut off at max_completion_length"),
    (groups_of([None, 1, 0], invalid=True), r"^pays: NaN or infinity for 3 of 3 completions"),
    (groups_of([1, 0]), None), (groups_of([1, 0], *[[1, 1]] * 2), None), (groups_of(*[[1, 0]] * 4), None),
], ids=["one alike", "all alike", "most alike", "cut off", "NaN", "one good", "some good", "all good"])
def test_what_the_first_step_shows_is_not_said(groups: list[RolloutGroup], said: str | None) -> None:
    lines = [str(one) for one in about_rewards(groups, RewardScorer(pays))]
    assert len(lines) == (said is not None)
    assert said is None or re.search(said, lines[0])


def test_a_disk_without_room_for_checkpoints_stops_a_run_that_writes_none(
    tmp_path: Path, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path, model=shared, save_strategy="no")
    subject = room.Subject.of(trainer)
    whole = room.checkpoint_bytes(replace(subject, args=replace(trainer.args, save_strategy="steps")))
    with_free(monkeypatch, whole - 1)
    assert not [line for line in found(trainer, "error") if "adapter" in line]
    assert room.checkpoint_bytes(subject) < whole


def test_copies_are_looked_for_longer_than_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "SECONDS", 0.0)
    slow = Slow(10**6, 0)
    assert repeats.count_repeats(slow) == (0, repeats.BLOCK)
    assert slow.seen == list(range(repeats.BLOCK))


@pytest.mark.parametrize("count", [1, 6])
def test_labels_that_no_function_can_read_are_not_named(count: int) -> None:
    lines = [str(one) for one in about_rewards(groups_of(*[[None] * 4] * count), RewardScorer(pays))]
    assert f"pays: None for all {4 * count} completions. What to do: see that its column holds labels" in "".join(lines)


def test_what_all_earn_beside_a_function_that_tells_is_a_warning() -> None:
    groups = groups_of(*[[1, 0]] * 4)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.rewards["pays_2"] = 0.1
    assert [one.severity for one in about_rewards(groups, RewardScorer([pays, pays]))] == ["note"]
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.rewards["pays_2"] = 0.0
    assert [one.severity for one in about_rewards(groups, RewardScorer([pays, pays]))] == ["warning"]


def test_a_constant_function_is_not_named_or_a_metric_is() -> None:
    groups = groups_of(*[[1, 0]] * 4)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.rewards["pays_2"] = 0.5
    (line,) = [str(one) for one in about_rewards(groups, RewardScorer([pays, pays]))]
    assert line.startswith("pays_2: it pays 0.5 for all 8 completions")
    assert about_rewards(groups, RewardScorer([pays, pays], [1.0, 0.0])) == []


def test_a_newcomer_is_not_told_that_nothing_is_learned_or_again_and_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, reward=nothing_right, max_steps=3, disable_tqdm=True).train()
    (said,) = [record.getMessage() for record in caplog.records if "first step" in record.getMessage()]
    assert said.startswith("first step: 0 of 2 groups carry signal, the completions of each prompt all earn the same")
    assert "easier" in said or "sometimes solved" in said


def test_the_pace_counts_the_first_step_or_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("lowmem_grpo.views.pace.time.monotonic", lambda: now[0])
    pace = Pace()
    pace.begin(10)
    assert pace.left(20) is None
    for step, at in ((11, 150.0), (12, 153.0), (12, 160.0), (14, 159.0)):
        now[0] = at
        pace.mark(step)
        if step == 11:
            assert pace.left(20) == 450.0
    assert pace.per_step == 3.0
    assert pace.left(20) == 18.0


def test_the_expected_time_is_wrong_or_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("lowmem_grpo.views.pace.time.monotonic", lambda: now[0])
    args = GRPOConfig(save_steps=25)
    said: list[str] = []
    first = FirstSteps(RunRecords(tmp_path), said.append)
    state = TrainerState(global_step=20, max_steps=100, elapsed=500.0)
    first.on_train_begin(args, state, None)
    for step, seconds in ((21, 60.0), (22, 12.0), (23, 12.0)):
        now[0] += seconds
        state.global_step, state.elapsed = step, state.elapsed + seconds
        state.log_history = [{"step": step, "time/generate": 0.75, "time/reward": 0.05, "time/train": 0.2}]
        first.on_step_end(args, state, None)
    assert said == ["12 s a step (sampling 75%, rewards 5%, training 20%): 15 min 36 s to go until step 100; the "
                    "next checkpoint is due at step 25, in 36 s"]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"expected_seconds": 572 + 78 * 12}


@pytest.mark.parametrize(("seconds", "said"), [(0.0312, "0.031 s"), (4.26, "4.3 s"), (61.7, "1 min 2 s")])
def test_seconds_a_step_are_not_as_people_read_them(tmp_path: Path, seconds: float, said: str) -> None:
    first = FirstSteps(RunRecords(tmp_path))
    first.pace.marks = [(1, 0.0), (2, seconds)]
    line = first.expectation(SFTConfig(), TrainerState(global_step=2, max_steps=5), 5 * seconds)
    assert line.startswith(f"{said} a step: ") and line.endswith("to go until step 5")


def test_a_warning_is_lost_under_the_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    handler, above = CurrentStderr(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", above)  # as rich does while a live view is drawn
    handler.emit(logging.LogRecord("lowmem_grpo", logging.WARNING, "", 0, "first step: %s", ("0 of 1 groups",), None))
    assert above.getvalue() == "first step: 0 of 1 groups\n"


def test_a_listener_does_not_see_the_groups_of_a_step(tmp_path: Path) -> None:
    seen: list[int] = []

    class Looks:
        def on_step_end(self, args: Any, state: Any, control: Any, groups: Any = None, **kwargs: Any) -> None:
            seen.extend(len(group.rollouts) for group in groups)

    trainer = make(tmp_path, max_steps=1, disable_tqdm=True)
    trainer.callbacks.listeners.append(Looks())
    trainer.train()
    assert seen == [4, 4]


# The page


def test_the_page_is_not_that_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    monkeypatch.syspath_prepend(str(docs))
    page = import_module("make_preflight").page()
    assert page == (docs / "preflight.md").read_text(encoding="utf-8"), "run python docs/make_preflight.py"
