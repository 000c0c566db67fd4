"""The memory benchmark: its rows, its order of stages, its section of the page and its picture."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import lowmem_grpo

BENCH = Path(__file__).parents[2] / "bench"
STAGES = ["naive", "+ no logits", "+ packing", "+ 8-bit optimizer", "+ host embedding"]
CONTEXT = 512
PARTS = ("weights", "adapters", "gradients", "optimizer", "engine")
SECTION = "import json, sys, bench.memory.section as r; print('\\n'.join(r.memory_table(json.load(sys.stdin))))"
PICTURE = "import json, sys, bench.memory.picture as p, bench.memory.section as r; " \
          "print(p.svg(r.newest_cases(json.load(sys.stdin))))"


def bench(*arguments: str, content: Any = None) -> str:
    """Standard output of a call in bench/."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=BENCH.parent, input=json.dumps(content), capture_output=True, text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a run of some stages, as written and as printed."""
    output = tmp_path_factory.mktemp("memory") / "rows.jsonl"
    printed = bench("-m", "bench.memory.bench", "--shape", "qwen3-8b", "--context", str(CONTEXT), "--generations", "4",
                    "--json",
                    "--output", str(output), *(word for stage in STAGES for word in ("--stage", stage)))
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [json.loads(line) for line in printed.splitlines()] == written
    return written


def test_code_is_told_by_the_folder_of_its_package_and_not_by_a_path_that_contains_its_name() -> None:
    files = ["/home/me/lowmem_grpo/bench/memory/weigh.py", "/home/me/peft/run.py", lowmem_grpo.__file__]
    code = f"import bench.memory.live_bytes as live_bytes; print(*map(live_bytes.owner, {files!r}))"
    assert bench("-c", code).split() == ["None", "None", "lowmem_grpo"]


@pytest.mark.slow
def test_each_stage_holds_less_than_the_one_before(rows: list[dict[str, Any]]) -> None:
    assert [row["stage"] for row in rows] == STAGES
    sizes = [row["device_bytes"] for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)


@pytest.mark.slow
def test_a_peak_is_no_less_than_its_parts(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["device_bytes"] >= sum(row[f"{part}_bytes"] for part in PARTS)
        assert row["commit"]
        assert row["device"] == "fake"


@pytest.mark.slow
def test_the_host_gets_what_the_device_gives_up(rows: list[dict[str, Any]]) -> None:
    by_stage = {row["stage"]: row for row in rows}
    table = 2 * 151936 * 4096
    last, before = by_stage["+ host embedding"], by_stage["+ 8-bit optimizer"]
    assert last["host_bytes"] - before["host_bytes"] == table
    assert before["weights_bytes"] - last["weights_bytes"] == table


@pytest.mark.slow
def test_what_was_planned_stands_beside_what_was_weighed(rows: list[dict[str, Any]]) -> None:
    (row,) = [row for row in rows if "planned_bytes" in row]
    assert row["stage"] == "+ 8-bit optimizer"
    assert abs(row["planned_bytes"] / row["device_bytes"] - 1) < 0.05


@pytest.mark.slow
def test_the_page_gets_a_line_for_the_case(rows: list[dict[str, Any]]) -> None:
    section = bench("-c", SECTION, content=rows)
    assert "| qwen3-8b, 512 x 4 |" in section
    assert "fake tensors" in section


@pytest.mark.slow
def test_the_picture_has_a_bar_for_each_stage(rows: list[dict[str, Any]]) -> None:
    drawing = ElementTree.fromstring(bench("-c", PICTURE, content=rows))
    words = {element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")}
    assert set(STAGES) <= words
    parts = {title.text for title in drawing.iter("{http://www.w3.org/2000/svg}title")}
    assert f"weights: {rows[0]['weights_bytes'] / 2**30:.2f} GiB" in parts


def test_a_case_is_packed_from_sequences_of_different_lengths() -> None:
    lengths = json.loads(bench("-c", "import json, bench.memory.stages as m; "
                                     "print(json.dumps(m.completion_lengths(m.CASES[0])))"))
    assert lengths[0] == 20480
    assert lengths[-1] == 10240
    assert lengths == sorted(lengths, reverse=True)
    assert len(lengths) == 8


def test_without_a_card_measuring_for_real_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    monkeypatch.syspath_prepend(str(BENCH.parent))
    from bench.memory import on_card
    from bench.memory.features import Features

    with pytest.raises(SystemExit, match="needs a card"):
        on_card.measure({}, [64], Features(), 8, None)


SEARCH = """
import json, bench.memory.longest_context as found
def trial(fits_to):
    def one(context):
        return {"context": context, "fits": context <= fits_to, "device_bytes": 2**30 + context * 2**20, "gib": 3.0}
    return one
cases = ((2048, 1024, 6), (2048, 4096, 20), (64, 256, 6), (10**9, 1024, 4), (10**9, 131072, 4), (1500, 1024, 9))
print(json.dumps([[row["context"] for row in found.search(trial(limit), start, most, 131072)]
                  for limit, start, most in cases]))"""
LONGEST = "import json, sys, bench.memory.section as r; print('\\n'.join(r.longest_table(json.load(sys.stdin))))"


def test_the_search_ends_between_a_length_that_fits_and_one_that_does_not() -> None:
    grows, shrinks, hopeless, boundless, whole, halves = json.loads(bench("-c", SEARCH))
    assert grows[0] == 1024 and 2048 in grows and grows[-1] == 2176, "it did not go where the bytes pointed"
    assert len(grows) < 6
    assert shrinks[:2] == [4096, 3840] and shrinks[-2:] == [2048, 2176], "it went on below what fits"
    assert hopeless[0] == 256 and hopeless[-1] == 128, "below the shortest length there is nothing to try"
    assert len(boundless) == 4, "the number of trials does not end it"
    assert whole == [131072], "longer than the model's own longest context was tried"
    assert 1408 in halves and max(halves) > 1500, "the gap between a fit and a misfit was left open"


def test_the_first_trial_is_what_the_planner_says_of_training_alone() -> None:
    code = "import bench.memory.longest_context as l; from bench.memory.stages import Case; " \
           "c = Case('llama-3.1-8b', 0); print(*[l.planned_context(c, gib, 131072) for gib in (8, 16, 1000)])"
    small, middle, large = map(int, bench("-c", code).split())
    assert 0 < small < 40000 < middle < large == 131072


def test_the_page_shows_the_longest_that_fitted_of_the_newest_search() -> None:
    row = {"shape": "m", "generations": 8, "gib": 16.0, "device": "cuda", "gpu": "G", "planned_context": 900,
           "commit": "c", "host_bytes": 2**30, "device_bytes": 2**33}
    rows = [row | {"run": "1", "context": 1280, "fits": True}, row | {"run": "2", "context": 896, "fits": True},
            row | {"run": "2", "context": 1024, "fits": True}, row | {"run": "2", "context": 1152, "fits": False}]
    page = bench("-c", LONGEST, content=rows)
    assert "| m x 8 | 16 | 900 | 1,024 | 8.00 | 1.00 | 1,152 | G | c |" in page and "1,280" not in page
