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

from lowmem_grpo.runs import listeners

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
