"""Fixtures of the tests of exports: saved adapters, each made once."""

import shutil
from pathlib import Path

import pytest
from export_tools import adapted, export_command

from lowmem_grpo.fast_model import FastPeftModel


@pytest.fixture(scope="module", params=[False, True], ids=["16 bit", "NF4"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[FastPeftModel, Path]:
    """A model that is held in 16 or in 4 bits, and the folder of its adapter."""
    model, folder = adapted(request.param), tmp_path_factory.mktemp("saved") / "adapter"
    model.save_lora(folder)
    return model, folder


@pytest.fixture(scope="module")
def merged(saved: tuple[FastPeftModel, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of that model merged by the command, and what the command printed."""
    out = tmp_path_factory.mktemp("merged") / "out"
    done = export_command(saved[1], "--out", out)
    assert done.exit_code == 0, done.output
    return out, done.output


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter on 16-bit weights."""
    folder = tmp_path_factory.mktemp("plain") / "adapter"
    adapted(False).save_lora(folder)
    return folder


@pytest.fixture
def copy(adapter: Path, tmp_path: Path) -> Path:
    """Copy that folder to one that may be changed."""
    return shutil.copytree(adapter, tmp_path / "copy")


@pytest.fixture
def unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the comparison of logits, which loads three models and is not what is tested."""
    monkeypatch.setattr("lowmem_grpo.models.export.merged.LARGEST", 0)
