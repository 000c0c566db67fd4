"""Metrics reach the services that report_to names, through their own libraries."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer_runs import ROWS, make
from transformers import TrainingArguments
from transformers.integrations import TensorBoardCallback

from lowmem_grpo import SFTConfig
from lowmem_grpo.runs import listeners
from lowmem_grpo.runs.state import TrainerState

WRITES = """
from lowmem_grpo import SFTConfig
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.runs.listeners import make_sinks

args, state = SFTConfig(report_to="trackio", project="a-project", run_name="a-run"), TrainerState(global_step=1)
(sink,) = make_sinks(args.report_to)
sink.on_train_begin(args, state, None)
sink.on_log(args, state, None, logs={"loss": 0.5, "note": "text"})
state.global_step = 2
sink.on_log(args, state, None, logs={"step": 2, "epoch": 1.0, "eval_loss": 0.125})
sink.on_train_end(args, state, None)
"""


def test_trackio_keeps_what_was_logged_and_evaluated(tmp_path: Path) -> None:
    """With the real library, which reads where its files lie when it is imported."""
    pytest.importorskip("trackio")
    place = {**os.environ, "TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", WRITES], env=place, check=True, capture_output=True, timeout=400)

    def values(metric: str) -> list[tuple[int, float]]:
        asked = ["get", "metric", "--project", "a-project", "--run", "a-run", "--metric", metric, "--json"]
        found = subprocess.run([sys.executable, "-c", "from trackio.cli import main; main()", *asked], env=place,
                               check=True, capture_output=True, text=True, timeout=200)
        return [(value["step"], value["value"]) for value in json.loads(found.stdout)["values"]]

    assert values("train/loss") == [(1, 0.5)] and values("eval/loss") == [(2, 0.125)]


def test_all_means_every_library_that_is_installed(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "lowmem_grpo")
    monkeypatch.setattr(listeners, "find_spec", lambda name: SimpleNamespace() if name != "wandb" else None)
    assert [type(sink).__name__ for sink in listeners.make_sinks(["all"])] == ["TensorboardSink", "TrackioSink"]
    assert "report_to='all': tensorboard, trackio" in caplog.text
    with pytest.raises(ImportError, match='report_to names "wandb", which is not installed: pip install wandb'):
        listeners.make_sinks(["wandb"])
    assert listeners.make_sinks(["none"]) == []


class Run:
    """A run as wandb 0.31 and trackio 0.43 have it: after its end it takes no line."""

    def __init__(self, library: "Library", name: str | None, known: Any = None) -> None:
        self.library, self.name, self.project = library, name or "a name of the library", "the project"
        self.id, self.lines, self.config = known or f"id {len(library.runs)}", [], {}
        self.config = SimpleNamespace(update=lambda values, allow_val_change=False: None)
        self.define_metric = lambda names, step_metric: None
        library.run = self
        library.runs.append(self)

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        assert self.library.run is self, f"Run ({self.id}) is finished"
        self.lines += [f"{name} {value}" for name, value in values.items() if name != "train/global_step"]

    def finish(self) -> None:
        self.library.run = None


class Library:
    """wandb, or trackio where `closes` is True: its `init` closes the open run, where wandb's returns it."""

    def __init__(self, closes: bool) -> None:
        self.run: Run | None = None
        self.runs: list[Run] = []
        self.closes, self.context_vars = closes, SimpleNamespace(current_run=SimpleNamespace(get=lambda: self.run))

    def init(self, project: str = "", name: str | None = None, id: str | None = None, **options: Any) -> Run:
        if self.run is not None and not self.closes:
            return self.run
        earlier = [run.id for run in self.runs if run.name == name and self.closes]  # trackio knows a run by its name
        return Run(self, name, id or next(iter(earlier), None))

    def finish(self) -> None:
        assert self.run is not None, "Call trackio.init() before trackio.finish()."
        self.run.finish()

    def lines(self) -> dict[str, list[str]]:
        """The lines of each run, by its id."""
        return {run.id: [line for other in self.runs if other.id == run.id for line in other.lines]
                for run in self.runs}


@pytest.fixture(params=["wandb", "trackio"])
def library(request: Any, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setitem(sys.modules, request.param, Library(request.param == "trackio"))
    monkeypatch.setattr(listeners.SINKS[request.param], "opened", None)
    library: Any = sys.modules[request.param]
    library.sink = listeners.SINKS[request.param]
    return library


def log(sink: Any, loss: float) -> None:
    sink.on_log(SFTConfig(), TrainerState(global_step=1), None, logs={"loss": loss})


def train(sink: Any, loss: float) -> None:
    sink.on_train_begin(SFTConfig(), TrainerState(), None)
    log(sink, loss)
    if hasattr(sink, "on_train_end"):
        sink.on_train_end(SFTConfig(), TrainerState(), None)


def test_lines_before_between_and_after_trainings_stand_in_one_run(library: Any) -> None:
    """As in transformers, whose WandbCallback begins with the first line and writes on after training."""
    sink = library.sink()
    log(sink, 1.0), train(sink, 2.0), log(sink, 3.0), train(sink, 4.0), log(sink, 5.0)
    assert library.lines() == {"id 0": [f"train/loss {float(loss)}" for loss in range(1, 6)]}


def test_a_run_that_the_user_opened_gets_the_lines_and_stays_open(library: Any) -> None:
    mine, sink = library.init(name="mine"), library.sink()
    train(sink, 1.0), log(sink, 2.0)
    mine.log({"own": 3})
    assert library.lines() == {"id 0": ["train/loss 1.0", "train/loss 2.0", "own 3"]} and library.run is mine
    mine.finish()
    log(sink, 4.0)  # after the user closed it: the same run goes on
    assert library.lines()["id 0"][-1] == "train/loss 4.0" and library.lines().keys() == {"id 0"}


def test_each_of_several_trainers_has_a_run_and_an_earlier_one_can_still_write(library: Any) -> None:
    first, second = library.sink(), library.sink()
    log(first, 1.0), train(second, 2.0), log(first, 3.0)
    assert library.lines() == {"id 0": ["train/loss 1.0", "train/loss 3.0"], "id 1": ["train/loss 2.0"]}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_gets_what_transformers_callback_writes_before_in_and_after_training(tmp_path: Path) -> None:
    theirs: Any = TensorBoardCallback()
    theirs.logging_dir = str(tmp_path / "theirs")
    for sink, args in ((listeners.TensorboardSink(), SFTConfig(output_dir=tmp_path)),
                       (theirs, TrainingArguments(output_dir=str(tmp_path)))):
        for step, event in enumerate(("on_init_end", "on_log", "on_train_begin", "on_log", "on_train_end", "on_log")):
            details = {"logs": {"loss": 0.5 * step, "eval_loss": 0.25, "test_loss": 1.0}} if event == "on_log" else {}
            getattr(sink, event)(args, TrainerState(global_step=step), None, **details)
    wanted = scalars(tmp_path / "theirs")
    assert scalars(tmp_path / "tensorboard") == wanted and wanted["train/loss"] == [(1, 0.5), (3, 1.5), (5, 2.5)]


def test_an_evaluation_before_a_run_stands_in_its_folder_or_in_that_of_the_run_before_it(tmp_path: Path) -> None:
    for earlier in (0, 1):
        trainer = make(tmp_path, report_to="tensorboard", max_steps=1, eval_dataset=ROWS[:1], num_generations_eval=2)
        trainer.evaluate()
        trainer.train()
        trainer.evaluate()
        written = scalars(tmp_path / "tensorboard")
        assert [step for step, _ in written["eval/reward"]] == [0, 1][earlier:] and len(written["train/reward"]) == 1
        assert len(list(tmp_path.glob("earlier/*"))) == earlier
    before = scalars(tmp_path / "earlier" / "1" / "tensorboard")
    # files that were begun within one second have no order
    assert len(before["train/reward"]) == 1 and sorted(step for step, _ in before["eval/reward"]) == [0, 0, 1]
