"""Whole programs in ART's habits run on the tiny model: a tool and a mail agent."""

import asyncio
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted

from lowmem_grpo.runs.records import read_lines

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a program by its name; its runs go into `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(PROGRAMS))
    for path in PROGRAMS.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return import_module


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / "metrics.jsonl") if "reward" in line]


def test_a_tool_is_offered_and_its_trajectories_are_trained_and_logged(
    tmp_path: Path, program: Callable[[str], Any]
) -> None:
    asyncio.run(program("tool").main())
    lines = read_lines(tmp_path / "runs" / "prices" / "001" / "metrics.jsonl")
    (step,) = steps_of(tmp_path / "runs" / "prices" / "001")
    assert (step["trajectories/trained"], step["trajectories/unexplained"]) == (6, 0)
    assert [line["val/asked"] for line in lines if "val/asked" in line] == [6]
    assert {"val/calls", "val/llm_duration", "val/reward"} <= {name for line in lines for name in line}


@pytest.mark.slow
def test_a_mail_agent_is_judged_without_labels_and_looked_at_on_held_out_questions(
    tmp_path: Path, program: Callable[[str], Any]
) -> None:
    mail, judge = program("mail"), Scripted()
    mail.JUDGE = judge
    asyncio.run(mail.main())
    folder = tmp_path / "runs" / "mail" / "mail-001"
    (step,) = steps_of(folder)
    assert step["metrics/ruler_score"] == pytest.approx(step["reward"]) and "metrics/independent_reward" in step
    assert all("You search mail." in question.prompt for question in judge.asked)
    assert any("val/correct" in line for line in read_lines(folder / "metrics.jsonl"))
    assert '"seen": 2' in (folder / "program_state.json").read_text()
