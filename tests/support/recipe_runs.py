"""Commands of lowmem-grpo in this process, and runs of recipes for one small step on the embedded model."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from lowmem_grpo.__main__ import main

SMALL = ("gpu=cpu", "max_steps=1", "eval_problems=4", "num_generations=2", "per_device_train_batch_size=4",
         "gradient_accumulation_steps=1", "engine=transformers")


def invoke(*words: Any, typed: str = "") -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], input=typed)


def invoke_well(*words: Any) -> Result:
    """The result of a command that has to end well."""
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    return result


def run(name: str, folder: Path, *words: str) -> Result:
    """Run a recipe for one step; of options given twice, the later one counts."""
    return invoke("run", name, *SMALL, f"output_dir={folder}", *words)


def run_well(name: str, folder: Path, *words: str) -> Result:
    return invoke_well("run", name, *SMALL, f"output_dir={folder}", *words)


def records(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (summary, metrics of the only step) of a run."""
    (line,) = lines(folder / "metrics.jsonl")
    return json.loads((folder / "summary.json").read_text()), line


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]
