"""The rollout benchmark: the rows that a run writes, what is missing named, the targets, and its part of the page."""

from pathlib import Path
from typing import Any

import pytest
from programs import providers, ran

from bench.common.rows import read_rows
from bench.common.targets import OURS, judged
from bench.rollout.bench import BF16, BNB, GOALS


def statuses(rows: list[dict[str, Any]], device: str) -> dict[str, str]:
    """How each goal of a device stands by these rows."""
    return {one.goal.demand: one.status for one in judged(GOALS, rows, device)}


@pytest.fixture
def measured(tmp_path: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """The rows of a run on the CPU by provider, and what it printed. Ours with vLLM is a piece of `make gpu-cpu`."""
    output = tmp_path / "rows.jsonl"
    done = ran("rollout.bench", "--device", "cpu", "--rounds", 2, "--output", output, *providers("transformers", BNB))
    rows = read_rows(output)
    assert [row["provider"] for row in rows] == ["transformers", BNB]
    return {row["provider"]: row for row in rows}, done.stdout


@pytest.mark.slow
def test_a_run_on_the_cpu_writes_speed_memory_and_parity_and_names_a_provider_that_cannot_run_here(
    measured: tuple[dict[str, dict[str, Any]], str]
) -> None:
    rows, printed = measured
    row, gone = rows["transformers"], rows[BNB]
    assert 0 < row["p20"] <= row["p50"] <= row["p80"]
    assert row["trainer_bytes"] > 2**20 < row["kv_bytes"]
    assert row["added_bytes"] < 0.01 * row["trainer_bytes"]
    assert 0 < row["parity_mean"] <= 0.003
    assert row["parity_mean"] < row["parity_max"] < 0.1
    assert row["sync_ms"] >= 0
    assert (row["sequences"], row["completion_tokens"], row["device"], row["shape"]) == (16, 48, "cpu", "tiny")
    assert gone["missing"] and "p50" not in gone and f"{BNB} is missing: " in printed


def row(provider: str, run: str = "1", **values: Any) -> dict[str, Any]:
    """A row as a run on the card writes it."""
    return {
        "provider": provider, "run": run, "shape": "full", "device": "cuda", "gpu": "NVIDIA H200", "cpu": "some",
        "cores": 8, "threads": 1, "sequences": 64, "completion_tokens": 1024, "commit": "abc", "p20": 90.0,
        "p50": 100.0, "p80": 110.0, "trainer_bytes": 5 * 10**9, "added_bytes": 10**6,
        "kv_bytes": 10**9, "parity_mean": 0.002, "parity_max": 0.02, "importance_ratio": 1.0001, "sync_ms": 0.01,
    } | values


@pytest.mark.parametrize(("bnb", "bf16", "added", "expected"), [
    (60.0, 100.0, 10**6, ["met"] * 4), (70.0, 101.0, 2 * 10**8, ["missed"] * 4),
    (None, 99.0, 6 * 10**7, ["not run", "met", "met", "missed"]),
])
def test_targets_compare_providers_of_one_run(
    bnb: float | None, bf16: float, added: int, expected: list[str]
) -> None:
    rows = [row(OURS, added_bytes=added), row(BF16, p50=bf16),
            row(BNB, p50=bnb) if bnb else {**row(BNB), "missing": "no module"}, row(BNB, run="0", p50=1.0)]
    assert list(statuses(rows, "cuda").values())[:4] == expected
    assert set(statuses(rows, "cpu").values()) == {"not run"}


@pytest.mark.parametrize(("freed", "status"), [(0.99, "met"), (0.5, "missed"), (None, "not run")])
def test_a_cache_that_stays_when_the_engine_sleeps_misses_its_target(freed: float | None, status: str) -> None:
    measured = {} if freed is None else {"sleep_freed_bytes": freed * 2**30}
    found = statuses([row(OURS, kv_bytes=2**30, **measured)], "cuda")
    assert [how for demand, how in found.items() if "sleep" in demand] == [status]
