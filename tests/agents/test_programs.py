"""A whole program in ART's habits runs on the tiny model: it offers a tool, and trains and logs what came of it.
Further programs are the examples of docs/agents.md and the notebook `bring_your_agent`."""

import asyncio
import runpy
from pathlib import Path

import pytest

from lowmem_grpo.runs.records import read_lines


def test_a_tool_is_offered_and_its_trajectories_are_trained_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asyncio.run(runpy.run_path(str(Path(__file__).parent / "programs" / "tool.py"))["main"]())
    lines = read_lines(tmp_path / "runs" / "prices" / "001" / "metrics.jsonl")
    assert [line["trajectories/trained"] for line in lines if "reward" in line] == [6]
    assert [line["val/asked"] for line in lines if "val/asked" in line] == [6]
    assert {"val/calls", "val/llm_duration", "val/reward"} <= {name for line in lines for name in line}
