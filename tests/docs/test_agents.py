"""The page on agents: every example runs, and every name of the door is on it."""

import re
import runpy
from pathlib import Path

import pytest

from lowmem_grpo import agents as art
from lowmem_grpo.runs.records import read_lines

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
KINDS = ("Backend", "FailedRollout", "LocalTrainResult", "Message", "Messages", "MessagesAndChoices", "Tools",
         "TrainResult")  # of what others return or take


@pytest.mark.parametrize("example", EXAMPLES, ids=re.findall(r'project="([\w-]+)"', PAGE))
@pytest.mark.every(3)
def test_an_example_on_the_page_runs_to_its_end(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(example.replace("Qwen/Qwen3-0.6B", "tiny-games"), encoding="utf-8")
    runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    (project,) = re.findall(r'project="([\w-]+)"', example)
    (folder,) = (tmp_path / "runs" / project).iterdir()
    assert (folder / "report.html").is_file()
    if project != "poems":  # the tiny model is no judge
        assert read_lines(folder / "metrics.jsonl")[-1]["trajectories/unexplained"] == 0


def test_every_name_of_the_door_is_on_the_page() -> None:
    assert [name for name in art.__all__ if name not in KINDS and not re.search(rf"\b{name}\b", PAGE)] == []
