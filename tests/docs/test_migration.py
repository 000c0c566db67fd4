"""The page for people from Unsloth and TRL: its scripts run, and the names in its table are there."""

import re
import runpy
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
SCRIPTS = dict(zip(("unsloth", "trl", "tokens"), re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), strict=True))


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.chdir(folder)
    (folder / "script.py").write_text(SCRIPTS[name], encoding="utf-8")
    return runpy.run_path("script.py")


@pytest.mark.parametrize(("name", "adapter"), [("unsloth", "grpo_saved_lora"), ("trl", "adapter")])
def test_a_script_on_the_page_runs(name: str, adapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = run(name, tmp_path, monkeypatch)
    assert left["trainer"].state.global_step == 2  # type: ignore[attr-defined]
    assert (tmp_path / adapter / "adapter_model.safetensors").is_file()


def test_what_the_page_says_of_transformers_5_is_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("tokens", tmp_path, monkeypatch)
    tokens, alike = capsys.readouterr().out.split()
    assert int(tokens) > 10 and alike == "True"


def test_the_imports_on_the_page_are_there() -> None:
    found = re.findall(r"from (lowmem_grpo[\w.]*) import ([\w, ]+)`", PAGE)
    assert len(found) >= 4
    for module, names in found:
        assert [name for name in names.split(", ") if not hasattr(import_module(module), name)] == []
