"""bench/learning/bench.py: verdicts on made-up runs, the page and its picture, and one short real run."""

from pathlib import Path
from typing import Any

import pytest

from bench.common.make_results import card_learning_table
from bench.learning.bench import one
from bench.learning.recipe_runs import rises
from bench.learning.report import distance, failures, write_report
from bench.learning.settings import BY_NAME, COMMON, SETTINGS
from lowmem_grpo import GRPOConfig


def made_up(name: str, seed: int, last: float = 0.9) -> dict[str, Any]:
    """A run from 40% to `last`, a little different for each seed."""
    return {"setting": name, "seed": seed, "steps": 20, "cpu": "any", "seconds": 1.0,
            "right": [0.4] * 5 + [last + 0.01 * seed] * 15}


def test_runs_that_learn_and_agree_are_no_failures() -> None:
    rows = [made_up(name, seed) for name in ("dr_grpo", "dr_grpo, 4-bit", "grpo") for seed in range(3)]
    assert failures(rows) == []
    apart, allowed = distance(rows, "dr_grpo, 4-bit") or (1.0, 0.0)
    assert apart == pytest.approx(0.0) and allowed == pytest.approx(2.5 * 0.01 * (2 / 3) ** 0.5)
    assert distance(rows, "grpo") is None


def test_a_run_that_does_not_learn_or_broke_off_and_settings_that_differ_are_failures() -> None:
    rows = [made_up("dr_grpo", s) for s in range(3)] + [made_up("dr_grpo, vLLM", s, last=0.8) for s in range(3)]
    assert failures(rows) == ["dr_grpo, vLLM: -10.0% from dr_grpo, allowed are 2.0%"]
    lame = [made_up("dr_grpo", 0), made_up("grpo", 0, last=0.5)]
    assert failures(lame) == ["grpo, seed 0: 40.0% -> 50.0%, so it did not learn"]
    assert failures([{"setting": "grpo", "seed": 1, "missing": "MemoryError"}]) == ["grpo, seed 1: MemoryError"]


def test_page_and_picture_show_every_setting_and_the_picture_is_the_same_every_time(tmp_path: Path) -> None:
    rows = [made_up(setting.name, seed) for setting in SETTINGS for seed in range(2)]
    page = write_report(rows, tmp_path)
    assert all(f"| {setting.name} |" in page for setting in SETTINGS)
    assert page == (tmp_path / "learning.md").read_text()
    picture = (tmp_path / "learning.svg").read_text()
    write_report(rows, tmp_path)
    assert picture == (tmp_path / "learning.svg").read_text() and all(s.name in picture for s in SETTINGS)


def test_every_setting_is_accepted_and_agrees_with_one_that_exists() -> None:
    for setting in SETTINGS:
        GRPOConfig(**(COMMON | setting.config))
        assert setting.like is None or setting.like in BY_NAME


def ended(after: float, problems: int = 1000, **more: Any) -> dict[str, Any]:
    """A recipe's row on a card."""
    return {"recipe": "arithmetic", "gpu": "NVIDIA H200", "device": "cuda", "commit": "abc", "accuracy_before": 0.4,
            "accuracy_after": after, "eval_problems": problems, "steps": 10, "train_seconds": 61.0,
            "peak_bytes": 2**30} | more


def test_accuracy_rises_only_beyond_the_noise_of_so_many_problems() -> None:
    assert [rises(ended(after)) for after in (0.6, 0.45, 0.44, 0.3)] == [True, True, False, False]
    assert not rises(ended(0.5, problems=100)) and not rises({"missing": "out of memory"})


def test_the_page_shows_the_newest_run_of_each_recipe_on_a_card() -> None:
    gone = {"recipe": "proximity", "gpu": "NVIDIA H200", "device": "cuda", "commit": "abc", "missing": "no | vLLM"}
    lines = card_learning_table([ended(0.1), ended(0.6), gone, ended(1.0, gpu=None)])[3:]
    assert "| arithmetic | 40.0% | 60.0% | 1000 | 10 | 61 | 1024 | NVIDIA H200 | abc |" in lines
    assert len(lines) == 4 and "missing: no / vLLM" in lines[-1]
    assert {line.count("|") for line in lines} == {10}
    assert card_learning_table([ended(1.0, gpu=None)]) == []


@pytest.mark.slow
def test_a_real_run_gives_a_curve() -> None:
    row = one("dr_grpo, one step stale, corrected", 0, 2)
    assert "missing" not in row, row
    assert len(row["right"]) == len(row["rewards"]) == 3  # one rollout more than updates
    assert all(0 <= value <= 1 for value in row["right"])
