"""A cell run twice: `train()` again, a second trainer on the same folder, a second process; and runs that fail."""

import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_runs
from programs import owner_of
from safetensors.torch import load_file
from small_models import shallow
from trainer_runs import make_dropping as make

from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.rewards.calling.scorer import RewardError
from lowmem_grpo.runs import lock
from lowmem_grpo.runs.records import RecordError
from lowmem_grpo.runs.saved_adapter import base_of_adapter, list_checkpoints
from lowmem_grpo.runs.state import Interrupt
from tests.attacks.small_run import StopAt, digit_sum, records

SHORT: dict[str, Any] = {"max_steps": 2, "save_steps": 1}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in records(folder)[0]]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"overwrite_output_dir": True}], ids=["plain", "overwrite_output_dir"])
def test_a_finished_trainer_trains_a_second_run_and_the_first_one_is_kept_whole(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(tmp_path, **SHORT, **settings)
    trainer.train()
    first = contents(tmp_path)
    again = trainer.train()
    assert again.finished and again.global_step == 2
    assert contents(tmp_path / "earlier" / "1") == first
    assert steps(tmp_path) == [1, 2] and (tmp_path / "report.html").is_file()
    assert f"It is now {tmp_path / 'earlier' / '1'}" in caplog.text and "as the run before has left them" in caplog.text
    rates = [[line["learning_rate"] for line in records(folder)[0]] for folder in (tmp_path, tmp_path / "earlier/1")]
    assert rates[0] == rates[1] and rates[0][1] > 0  # its schedule begins anew
    assert len(trainer.state.log_history) == 3
    assert contents(tmp_path).keys() - {f"earlier/1/{name}" for name in first} == first.keys()


def test_a_second_trainer_on_the_folder_gives_the_same_run_and_keeps_the_first(tmp_path: Path) -> None:
    for _ in range(2):
        make(tmp_path, **SHORT).train()
    assert records(tmp_path) == records(tmp_path / "earlier" / "1")
    held = [load_file(folder / "adapter/adapter_model.safetensors") for folder in (tmp_path, tmp_path / "earlier/1")]
    assert all(held[0][name].equal(held[1][name]) for name in held[0])


@pytest.mark.slow
def test_a_trainer_that_was_stopped_goes_on_unless_the_folder_is_anothers_by_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = StopAt(1)
    trainer = make(tmp_path, callbacks=[stop], **SHORT)
    assert not trainer.train().finished
    make(tmp_path / "other", **SHORT).train()
    stop.stop = 9
    assert trainer.train().finished
    assert "it goes on with the run" in caplog.text
    assert records(tmp_path) == records(tmp_path / "other")
    stop.stop = 1
    assert not trainer.train().finished
    make(tmp_path, **SHORT).train()
    stop.stop = 9
    assert trainer.train().global_step == 2
    assert sorted(path.name for path in (tmp_path / "earlier").iterdir()) == ["1", "2", "3"]


def test_a_failed_run_has_its_report_and_says_why_it_failed_until_it_goes_on(tmp_path: Path) -> None:
    broken = [True]

    def reward(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        if broken[0]:
            raise ZeroDivisionError("no units")
        return digit_sum(completions)

    trainer = make(tmp_path, reward, **SHORT)
    with pytest.raises(RewardError):
        trainer.train()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 0) and "no units" in summary["error"]
    assert "failed" in (tmp_path / "report.html").read_text() and not list_checkpoints(tmp_path)
    broken[0] = False
    assert trainer.train().finished
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("finished", None)


# One owner

@pytest.fixture
def owner(tmp_path: Path) -> Any:
    with owner_of(tmp_path / "run") as process:
        yield process


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_in_use_is_refused_with_its_owner_named_and_free_when_that_one_is_killed(
    tmp_path: Path, owner: Any, resume: bool
) -> None:
    before, trainer = contents(tmp_path), make(tmp_path / "run", **SHORT)
    with pytest.raises(lock.RunInUseError, match=rf"run belongs to .* process {owner.pid} \(since .*: -c"):
        trainer.train(resume_from_checkpoint=resume)
    assert contents(tmp_path) == before
    owner.kill()
    owner.wait(60)
    assert trainer.train(resume_from_checkpoint=resume).finished
    assert not (tmp_path / "run" / lock.FILE).exists()


def test_a_forked_child_that_outlives_its_parent_does_not_hold_the_folder(tmp_path: Path) -> None:
    with lock.owned(tmp_path):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        with lock.owned(tmp_path), pytest.raises(lock.RunInUseError), lock.owned(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


OTHER = {"pid": 1, "host": "another", "boot": "x", "since": "then", "command": "train.py"}


@pytest.mark.parametrize(("left", "refused"), [
    ({"host": "another"}, True), ({"boot": "an earlier one"}, False), ({"pid": 2**22 + 1}, False), ({}, True),
    ("not json", False), ("[" * 4000, False),
], ids=["another machine", "before the last boot", "no such process", "alive", "torn", "deep"])
def test_without_locks_of_the_file_system_the_file_says_whether_the_owner_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: Any, refused: bool
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    here = OTHER | {"host": lock.socket.gethostname(), "boot": lock.boot(), "pid": os.getppid()}
    (tmp_path / lock.FILE).write_text(left if isinstance(left, str) else json.dumps(here | left))
    if refused:
        with pytest.raises(lock.RunInUseError, match=r"has no locks: .*delete .*owner\.json"), lock.owned(tmp_path):
            pass
    else:
        with lock.owned(tmp_path):
            assert json.loads((tmp_path / lock.FILE).read_text())["pid"] == os.getpid()


def wandering(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward that goes to another folder, as one that runs a build or a test does."""
    os.chdir("..")
    return trainer_runs.digit_sum(completions)


def test_relative_paths_mean_the_folder_in_which_the_trainer_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`args.output_dir` stays as it was given, as in transformers; every file lies where it pointed at the start."""
    home = tmp_path / "a" / "b" / "c" / "d"
    home.mkdir(parents=True)
    shutil.copytree(shallow(), home / "model")
    monkeypatch.chdir(home)
    model = FastLanguageModel.get_peft_model(FastLanguageModel.from_pretrained("model", load_in_4bit=False)[0], r=4)
    model.save_lora("lora")
    request = model.load_lora("lora")
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "report_to": "tensorboard"}
    trainer = trainer_runs.make(Path("out"), wandering, model=model, **settings)
    os.chdir(tmp_path)  # a notebook's cell between the two
    assert trainer.train().finished and trainer.args.output_dir == "out"
    trainer.save_model()
    trainer.create_model_card()
    trainer.model.fast_generate(["1 + 1"], SamplingParams(max_tokens=1), lora_request=request)
    names = {path.name for path in (home / "out").iterdir()}
    assert {"checkpoint-1", "checkpoint-2", "adapter", "adapter_model.safetensors", "README.md", "summary.json",
            "report.html", "tensorboard", "metrics.jsonl", "completions.jsonl"} <= names
    assert json.loads((home / "out" / "summary.json").read_text())["config"]["output_dir"] == "out"
    for folder in (home / "out" / "adapter", home / "out" / "checkpoint-2"):
        assert base_of_adapter(folder).model == str(home / "model")
    assert [path.name for path in tmp_path.rglob("out")] == ["out"] and not Path("out").exists()


def test_a_folder_that_cannot_be_made_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="a file is where the run needs a folder: move it away"):
        lock.owned(tmp_path / "file").__enter__()


# Signals


class SendTwice:
    """Sends this process a signal in its second step."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for _ in range(2 * (state.global_step == 1)):
            os.kill(os.getpid(), self.number)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process that uses CUDA cannot fork")
@pytest.mark.skipif(torch.get_num_threads() > 1, reason="a fork would wait without end for OpenMP's other threads")
@pytest.mark.parametrize("ignored", [False, True], ids=["", "ignored as under nohup"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.every(2)
def test_schedulers_signals_finish_the_step_and_save_and_then_end_the_process(
    tmp_path: Path, number: signal.Signals, ignored: bool
) -> None:
    trainer = make(tmp_path, callbacks=[SendTwice(number)], max_steps=3)
    said = tmp_path / "said.txt"
    child = os.fork()
    if child == 0:
        try:
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
            sys.stdout = said.open("w")
            trainer.train()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if ignored else -number)
    assert steps(tmp_path) == ([1, 2, 3] if ignored else [1, 2])
    assert (f"{number.name}: finishing this step" in said.read_text()) != ignored
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"checkpoint-{3 if ignored else 2}"]
    status = json.loads((tmp_path / "summary.json").read_text())["status"]
    assert status == ("finished" if ignored else "interrupted")
    assert not (tmp_path / lock.FILE).exists()


def test_the_status_of_a_stop_is_what_shells_give() -> None:
    interrupt = Interrupt()
    assert interrupt.exit_status == 0
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        interrupt.got = number
        assert interrupt.exit_status == status
