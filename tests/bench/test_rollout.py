"""The rollout benchmark: the rows that a run writes, what is missing named, and the targets."""

from pathlib import Path

import pytest
from programs import providers, ran

from bench.common.rows import read_rows
from bench.common.targets import OURS, judged
from bench.rollout.bench import BF16, BNB, GOALS
from bench.rollout.host import Timed, a_token


@pytest.mark.slow
def test_a_run_on_the_cpu_writes_speed_memory_and_parity_and_names_a_provider_that_cannot_run_here(
    tmp_path: Path
) -> None:
    """Ours with vLLM is a piece of `make gpu-cpu`."""
    output = tmp_path / "rows.jsonl"
    done = ran("rollout.bench", "--device", "cpu", "--rounds", 2, "--output", output, *providers("transformers", BNB))
    row, gone = read_rows(output)
    assert (row["provider"], gone["provider"]) == ("transformers", BNB)
    assert 0 < row["p20"] <= row["p50"] <= row["p80"]
    assert row["trainer_bytes"] > 2**20 < row["kv_bytes"]
    assert row["added_bytes"] < 0.01 * row["trainer_bytes"]
    assert 0 < row["parity_mean"] <= 0.003
    assert row["parity_mean"] < row["parity_max"] < 0.1
    assert row["sync_ms"] >= 0
    assert (row["sequences"], row["completion_tokens"], row["device"], row["shape"]) == (16, 48, "cpu", "tiny")
    assert gone["missing"] and "p50" not in gone and f"{BNB} is missing: " in done.stdout


def test_each_target_of_a_card_is_met_by_good_figures_and_missed_by_bad_ones() -> None:
    card = {"run": "1", "shape": "full", "device": "cuda", "gpu": "NVIDIA H200"}
    ours = {"provider": OURS, "p50": 100.0, "trainer_bytes": 5 * 10**9, "kv_bytes": 2**30}
    good = {"added_bytes": 10**6, "importance_ratio": 1.0001, "sync_ms": 0.01, "sleep_freed_bytes": 0.99 * 2**30}
    bad = {"added_bytes": 2 * 10**8, "importance_ratio": 0.99, "sync_ms": 1.1, "sleep_freed_bytes": 0.5 * 2**30}
    for figures, speeds, status in ((good, (60.0, 100.0), "met"), (bad, (70.0, 101.0), "missed")):
        peers = [{"provider": name, "p50": speed} for name, speed in zip((BNB, BF16), speeds, strict=True)]
        rows = [card | row for row in (ours | figures, *peers)]
        assert {standing.status for standing in judged(GOALS, rows, "cuda")} == {status}


def test_a_token_of_a_recorded_step_takes_the_host_few_operations_however_many_rows_there_are() -> None:
    few, many = (a_token(Timed("transformers", "cpu", rows).operations) for rows in (8, 64))
    assert few == many <= 13.5, "drawing takes 8 of them"
