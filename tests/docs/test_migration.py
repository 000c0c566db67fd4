"""The page for people from Unsloth and TRL: its scripts run, the names in its table are there, and a notebook that was
written for them works when its imports, model name and data source change."""

import json
import re
import runpy
from importlib import import_module
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
NOTEBOOK = ROOT / "tests" / "support" / "unsloth_grpo_notebook.py"
REWRITES = {
    "from trl import": "from lowmem_grpo import", "from unsloth import": "from lowmem_grpo import",
    "from vllm import": "from lowmem_grpo import", '"Qwen/Qwen2.5-3B-Instruct"': '"tiny"',
    'load_dataset("openai/gsm8k", "main")': 'load_dataset("json", data_files="rows.jsonl")',
}
REWARDS = ["strict_format_reward_func", "int_reward_func", "correctness_reward_func"]
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


@pytest.mark.slow
def test_an_unsloth_notebook_works_with_its_import_lines_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = NOTEBOOK.read_text()
    for old, new in REWRITES.items():
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    rows = [{"question": f"What is {i} + {i}?", "answer": f"Twice {i}.\n#### {2 * i}"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "notebook.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("notebook.py", run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("Extracted:") == 2  # the reward functions ran once a step
    assert "before: " in said
    assert "after: " in said
    lines = [json.loads(line) for line in (tmp_path / "outputs" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert {f"rewards/{name}/mean" for name in REWARDS} <= lines[0].keys()
    assert all(line["completions/total"] == 4 for line in lines)
    assert load_file(tmp_path / "grpo_saved_lora" / "adapter_model.safetensors")
