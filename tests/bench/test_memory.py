"""The memory benchmark: its rows, its order of stages, its section of the page and its picture."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import ran

import lowmem_grpo
from bench.memory import longest_context, on_card
from bench.memory.counted_storages import owner
from bench.memory.picture import draw
from bench.memory.section import longest_table, memory_table, newest_cases
from bench.memory.stages import Case, Features

STAGES = ["naive", "+ 8-bit optimizer", "+ host embedding"]
SVG = "{http://www.w3.org/2000/svg}"
PARTS = ("weights", "adapters", "gradients", "optimizer", "engine")


def test_code_is_told_by_the_folder_of_its_package_and_not_by_a_path_that_contains_its_name() -> None:
    files = ["/home/me/lowmem_grpo/bench/memory/weigh.py", "/home/me/peft/run.py", lowmem_grpo.__file__]
    assert [owner(file) for file in files] == [None, None, "lowmem_grpo"]


@pytest.mark.slow
def test_each_stage_holds_less_than_the_one_before_and_the_picture_and_the_page_show_all(tmp_path: Path) -> None:
    done = ran("memory.bench", "--shape", "qwen3-8b", "--context", 512, "--generations", 4, "--json",
               *(word for stage in STAGES for word in ("--stage", stage)))
    rows = [json.loads(line) for line in done.stdout.splitlines()]  # nothing else is printed
    assert [row["stage"] for row in rows] == STAGES
    sizes = [row["device_bytes"] for row in rows]
    assert sizes == sorted({*sizes}, reverse=True)
    for row in rows:
        assert row["device_bytes"] >= sum(row[f"{part}_bytes"] for part in PARTS)
        assert row["commit"] and row["device"] == "fake"
    before, last, table = *rows[-2:], 2 * 151936 * 4096
    assert last["host_bytes"] - before["host_bytes"] == before["weights_bytes"] - last["weights_bytes"] == table
    assert [row["stage"] for row in rows if "planned_bytes" in row] == ["+ 8-bit optimizer"]
    assert abs(before["planned_bytes"] / before["device_bytes"] - 1) < 0.05
    section = "\n".join(memory_table(rows))
    assert section.count("| qwen3-8b, 512 x 4 |") == 2 and "fake tensors" in section
    pictures = [tmp_path / name for name in ("first.svg", "second.svg")]
    for path in pictures:
        draw(newest_cases(rows), path)
    words = {(element.text or "").strip() for element in ElementTree.parse(pictures[0]).iter(f"{SVG}text")}
    assert {*STAGES, "activations", f"{sizes[0] / 2**30:.1f}"} <= words
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_without_a_card_measuring_for_real_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.raises(SystemExit, match="needs a card"):
        on_card.measure({}, [64], Features(), 8, None)


def tried(fits_to: int, start: int, most: int) -> list[int]:
    """The contexts that a search tries where those up to `fits_to` fit."""
    def trial(context: int) -> dict[str, Any]:
        return {"context": context, "fits": context <= fits_to}

    return [row["context"] for row in longest_context.search(trial, start, most, 131072)]


def test_the_search_ends_between_a_length_that_fits_and_one_that_does_not() -> None:
    assert tried(21000, 20480, 6) == [20480, 21632] and tried(2048, 1024, 20)[-2:] == [2048, 2176]
    assert tried(38000, 40960, 9) == [40960, 38656, 36480], "it went on below what fits"
    assert tried(64, 256, 6) == [256, 128], "below the shortest length there is nothing to try"
    assert len(tried(10**9, 1024, 4)) == 4, "the number of trials does not end it"
    assert tried(10**9, 131072, 4) == [131072], "longer than the model's own longest context was tried"
    assert tried(10**9, 130000, 4) == [130000, 131072], "the model's own longest context was not tried"


def test_the_first_trial_is_what_the_planner_says_of_training_alone() -> None:
    case = Case("llama-3.1-8b", 0)
    small, middle, large = (longest_context.planned_context(case, gib, 131072) for gib in (8, 16, 1000))
    assert 0 < small < 40000 < middle < large == 131072


def test_the_page_shows_the_longest_that_fitted_of_the_newest_search() -> None:
    row = {"shape": "m", "generations": 8, "gib": 16.0, "device": "cuda", "gpu": "G", "planned_context": 900,
           "commit": "c", "host_bytes": 2**30, "device_bytes": 2**33}
    rows = [row | {"run": "1", "context": 1280, "fits": True}, row | {"run": "2", "context": 896, "fits": True},
            row | {"run": "2", "context": 1024, "fits": True}, row | {"run": "2", "context": 1152, "fits": False}]
    page = "\n".join(longest_table(rows))
    assert "| m x 8 | 16 | 900 | 1,024 | 8.00 | 1.00 | 1,152 | G | c |" in page and "1,280" not in page
