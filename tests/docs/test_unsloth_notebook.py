"""A GRPO notebook written for Unsloth and TRL works here when its imports, model name and data source change."""

import json
import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file

SCRIPT = Path(__file__).parents[1] / "support" / "unsloth_grpo_notebook.py"
REWRITES = {
    "from trl import": "from lowmem_grpo import", "from unsloth import": "from lowmem_grpo import",
    "from vllm import": "from lowmem_grpo import", '"Qwen/Qwen2.5-3B-Instruct"': '"tiny"',
    'load_dataset("openai/gsm8k", "main")': 'load_dataset("json", data_files="rows.jsonl")',
}
REWARDS = ["xmlcount_reward_func", "soft_format_reward_func", "strict_format_reward_func", "int_reward_func",
           "correctness_reward_func"]


@pytest.mark.slow
def test_an_unsloth_notebook_works_with_its_import_lines_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = SCRIPT.read_text()
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
