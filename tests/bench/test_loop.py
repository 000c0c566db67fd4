"""bench/loop/bench.py: phases that add up, rows and what is missing, real steps on the CPU, the targets, and the
page."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from programs import providers, ran
from scripted_chat import until
from tables import every_row

from bench.common import child
from bench.common.rows import read_rows
from bench.common.targets import OURS, judged
from bench.loop import bench as loop
from bench.loop import inputs, phase_watch
from bench.loop import ours as loop_ours
from bench.loop import provider as loop_run
from bench.loop.bench import GOALS, row_of
from bench.loop.phase_watch import PhaseWatch


def called(*arguments: str) -> Any:
    return CliRunner().invoke(loop.main, list(arguments))


# The watch


def test_phases_of_a_step_stand_still_while_an_inner_one_runs_and_add_up_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    clocks = {"perf_counter": lambda: now[0], "process_time": lambda: now[0] / 2}
    monkeypatch.setattr(phase_watch, "time", SimpleNamespace(**clocks))
    watch = PhaseWatch("cpu")
    with watch.step():
        with watch.phase("score"):
            now[0] += 2
            with watch.phase("generate"):
                now[0] += 10
            now[0] += 3
        now[0] += 1
    watch.close()
    assert [step["seconds"] for step in watch.steps] == [{"score": 5, "generate": 10, "rest": 1}]
    assert [step["cpu_seconds"] for step in watch.steps] == [{"score": 2.5, "generate": 5, "rest": 0.5}]


def test_each_phase_has_its_own_peak_of_host_memory_which_is_looked_at_all_the_time(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    used, seen = [100], list[int]()
    monkeypatch.setattr(phase_watch, "LOOK_EVERY", 0.001)
    monkeypatch.setattr(phase_watch, "resident_bytes", lambda name: seen.append(used[0]) or used[0])
    watch = PhaseWatch("cpu")
    with watch.step():
        with watch.phase("train"):
            used[0] = 300
            until(lambda: 300 in seen)
            used[0] = 100
        with watch.phase("optimizer"):
            used[0] = 200
    watch.close()
    host = watch.steps[0]["host_bytes"]
    assert (host["train"], host["optimizer"]) == (300, 200)
    assert "used_bytes" not in watch.steps[0]


def test_phases_outside_of_a_step_count_for_none_and_a_step_must_end_outside_of_phases() -> None:
    watch = PhaseWatch("cpu")
    with watch.phase("generate"):
        pass
    watch.leave()
    watch.begin_step()
    watch.enter("train")
    with pytest.raises(RuntimeError, match="the step ends inside phase train"):
        watch.end_step()
    watch.leave()
    watch.end_step()
    watch.close()
    assert "generate" not in watch.steps[0]["seconds"]
    assert len(watch.steps) == 1


# What all providers get


def test_the_model_in_the_package_is_paid_as_its_recipe_pays_it() -> None:
    texts = ["3 + 4 = 7\nAnswer: 7", "Answer: 8", "it is 7", "nothing", "Answer: x7"]
    reward, said = inputs.RightAnswer(), [[{"role": "assistant", "content": text}] for text in texts]
    assert reward(said, ["7"] * 5, completion_ids=[[1, 2]] * 5) == [1.1, 0.1, 1.0, 0.0, 1.0]
    assert reward.tokens == [10]


def test_a_peers_vllm_gets_room_for_weights_and_cache_but_not_more_than_may_be_used() -> None:
    size = inputs.loop_shape("full")
    share = inputs.engine_share(size, False, None)
    assert inputs.weight_bytes(size, False) + size.kv_bytes < share * inputs.NO_CARD < 0.95 * inputs.NO_CARD
    assert inputs.engine_share(size, False, 16.0) == pytest.approx(0.95 * 16 / 64, abs=1e-4)


@pytest.mark.parametrize(("limit", "more"), [(float("inf"), True), (100.0, True), (33.0, False), (1.0, False)])
def test_a_step_that_would_not_end_in_time_is_not_begun(limit: float, more: bool) -> None:
    steps = [{"seconds": {"generate": 1.0}}, {"seconds": {"generate": 20.0, "train": 10.0}}]
    assert inputs.Patience(limit).another(steps) == more


def test_without_time_for_a_second_step_the_first_is_the_timed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(options: Any, watch: Any, outputs: str, engine: str) -> dict[str, Any]:
        for _ in range(options.steps):
            with watch.step():
                pass
        return {"engine": engine}

    monkeypatch.setattr(loop_ours, "run", run)
    for done, timed in ((1, 1), (2, 1), (4, 3)):
        found = loop_run.run(provider=OURS, folder=str(tmp_path), shape="tiny", device="cpu", steps=done)
        assert (len(found["steps"]), found["warm_up"], found["engine"]) == (timed, done - timed, "vllm")


def test_an_error_of_ours_is_a_failure_and_one_of_a_peer_or_of_a_missing_engine_is_a_reason(tmp_path: Path) -> None:
    """Each says where it was raised: a card is not lent a second time to find that out."""
    (tmp_path / "broken.py").write_text("def run(kind): raise type(kind, (Exception,), {})('no\\nroom')")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}

    def missing(kind: str, peer: bool = False) -> tuple[str, bool]:
        found = child.call("broken:run", {"kind": kind}, peer, settings=path)
        assert "broken.py\", line 1, in run" in found["log"]
        return found["missing"], "failed" in found

    assert missing("OutOfMemoryError", peer=True) == ("OutOfMemoryError: no room", False)
    assert missing("EngineUnavailableError") == ("EngineUnavailableError: no room", False)
    assert missing("OutOfMemoryError") == ("it ended with 1: broken.OutOfMemoryError: no", True)


# Rows


def ended(code: int, out: str = "", err: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.CompletedProcess([], code, out, err)


def test_what_a_process_says_last_is_its_result_or_the_reason_why_there_is_none() -> None:
    assert child.outcome(ended(0, '{"train_runtime": 1}\n{"tokens": [1]}\n')) == {"tokens": [1]}
    found = child.outcome(ended(-9, "", "loading\nKilled\n"))
    assert found["missing"] == "it ended with -9: Killed" and found["failed"]
    assert child.outcome(ended(1))["missing"] == "it ended with 1: it said nothing"


COMMON = {
    "run": "1", "device": "cuda", "shape": "full", "gib": None, "prompts": 1, "generations": 8, "sequences": 8,
    "prompt_tokens": 1024, "completion_tokens": 4096, "steps": 2, "threads": 1, "gpu": "NVIDIA H200", "cpu": "some",
    "cores": 8, "commit": "abc", "versions": {"torch": "2"},
}


def test_a_row_holds_medians_of_time_largest_peaks_and_speeds_of_each_phase() -> None:
    steps = [
        {"seconds": {"generate": 40.0, "train": 10.0, "rest": 0.0}, "used_bytes": {"generate": 5, "train": 9}},
        {"seconds": {"generate": 20.0, "train": 30.0, "switch": 2.0}, "used_bytes": {"generate": 7, "train": 8}},
        {"seconds": {"generate": 20.0, "train": 10.0, "rest": 0.0}, "used_bytes": {"generate": 6, "train": 8}},
    ]
    found = {"steps": steps, "warm_up": 1, "tokens": [32768] * 4, "config": {}, "versions": {"trl": "1.16.0"}}
    row = row_of(OURS, found, COMMON)
    assert row["step_seconds"] == [50, 52, 30] and row["seconds"] == 50
    assert row["phases"] == {"generate": 20, "train": 10, "rest": 0, "switch": 0}
    assert sum(row["shares"].values()) == pytest.approx(1)
    assert row["used_bytes"] == {"generate": 7, "train": 9}
    assert row["tokens_per_second"] == {"step": 655.36, "generate": 1638.4, "train": 4096.0}
    assert row["versions"] == {"torch": "2", "trl": "1.16.0"}
    assert "host_bytes" not in row


def test_a_provider_that_is_too_slow_or_whose_interpreter_is_not_there_is_missing(tmp_path: Path) -> None:
    given = {"device": "cpu", "shape": "tiny", "prompts": 1, "steps": 1, "gib": None, "peer_batch": 1, "threads": 1,
             "time_limit": 0.01, "gpu": None, "unsloth_python": str(tmp_path / "python")}
    assert loop.run("trl_transformers", tmp_path, given)["missing"] == "it took more than 0.01 s"
    why = loop.run("unsloth", tmp_path, given)["missing"]
    assert why == f"{tmp_path / 'python'} does not start: No such file or directory"


@pytest.mark.parametrize(("broken", "code"), [("trl", 0), ("lowmem_grpo_transformers", 1)])
def test_each_row_is_kept_at_once_and_only_a_failure_of_ours_is_one_of_the_command(
    broken: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "rows.jsonl"
    seen: list[int] = []

    def run(provider: str, folder: Path, given: Any) -> dict[str, Any]:
        seen.append(len(output.read_text().splitlines()) if output.exists() else 0)
        if provider == broken:
            return {"missing": "ended with 1: no room", "failed": True}
        if provider == "unsloth":
            return {"missing": "ModuleNotFoundError: No module named 'unsloth'", "log": "peers.py, line 9"}
        return {"steps": [{"seconds": {"generate": 1.0, "train": 1.0}}], "tokens": [128, 128], "warm_up": 1}

    monkeypatch.setattr(loop, "run", run)
    monkeypatch.setattr(child, "call", lambda *_: {})
    done = called("--device", "cpu", "--output", str(output), "--run", "mine", *providers(broken, "unsloth", OURS))
    assert done.exit_code == code, done.output
    assert seen == [0, 1, 2]
    assert [(row["provider"], "missing" in row, row["run"]) for row in read_rows(output)] == [
        (broken, True, "mine"), ("unsloth", True, "mine"), (OURS, False, "mine")
    ]
    assert f"{broken} is missing: ended with 1: no room" in done.output
    assert ("failed; see above" in done.output) == bool(code) and "peers.py, line 9" in done.output


# Real steps


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The rows of a run on the CPU by provider: ours and TRL without vLLM, and Unsloth, which is not installed."""
    output = tmp_path_factory.mktemp("loop") / "rows.jsonl"
    names = ["lowmem_grpo_transformers", "trl_transformers", "unsloth"]
    ran("loop.bench", "--device", "cpu", "--steps", 1, "--output", output, *providers(*names))
    rows = read_rows(output)
    assert [row["provider"] for row in rows] == names
    return {row["provider"]: row for row in rows}


@pytest.mark.slow
def test_a_step_on_the_cpu_has_phases_that_add_up_and_our_row_says_what_was_planned_and_trained_on(
    measured: dict[str, dict[str, Any]]
) -> None:
    for name in ("trl_transformers", "lowmem_grpo_transformers"):
        row = measured[name]
        assert row.get("missing") is None
        assert row["tokens"] == row["sequences"] * row["completion_tokens"] == 128
        assert sum(row["phases"].values()) == pytest.approx(row["seconds"], rel=0.01)
        assert {"generate", "score", "train", "optimizer", "rest"} <= set(row["phases"])
        assert min(row["phases"][phase] for phase in ("generate", "train", "optimizer")) > 0
        assert min(row["host_bytes"].values()) > 100 * 2**20
    assert row["trained"] == [row["sequences"]] * 2  # the step that warms up too
    assert 0 < row["planned"]["allocated_bytes"] <= row["planned"]["train_bytes"]
    assert row["config"]["weights"] == "nf4" and row["config"]["out_of_memory"]["memory/oom_train"] == 0
    assert measured["unsloth"]["missing"] == "ModuleNotFoundError: No module named 'unsloth'"


# Targets and page


def row(provider: str, seconds: float = 100.0, used: int = 30, **other: Any) -> dict[str, Any]:
    """A row as a run on the card writes it."""
    return {
        **COMMON, "provider": provider, "seconds": seconds, "used_bytes": {"generate": used, "train": used - 1},
        "host_bytes": {"train": 2**30}, "shares": {"generate": 0.75, "train": 0.25},
        "tokens_per_second": {"step": 327.0, "generate": 437.0, "train": 1638.0},
        "planned": {"rollout_bytes": 12 * 2**30, "train_bytes": 11 * 2**30, "host_bytes": 0},
    } | other


def statuses(rows: list[dict[str, Any]]) -> dict[str, str]:
    """How each goal stands by these rows."""
    return {one.goal.demand: one.status for one in judged(GOALS, rows)}


@pytest.mark.parametrize(("seconds", "used", "expected"), [
    (101.0, 31, ("met", "met")), (100.0, 30, ("missed", "met")), (99.0, 29, ("missed", "missed")),
])
def test_targets_compare_time_and_memory_with_each_peer_of_the_same_run(
    seconds: float, used: int, expected: tuple[str, str]
) -> None:
    older = row("trl", 1.0, 1, run="0")
    found = statuses([older, row(OURS), row("trl", seconds, used), row("unsloth", missing="no module")])
    assert (found.pop("seconds of a step: below 1 x trl"), found.pop("memory in use: at most 1 x trl")) == expected
    assert set(found.values()) == {"not run"}


@every_row("other", [
    {"run": "2"}, {"gib": 24.0}, {"prompts": 4}, {"shape": "tiny"}, {"gpu": "NVIDIA L4"}, {"missing": "why"},
])
def test_rows_of_another_run_case_or_card_are_not_compared(other: dict[str, Any]) -> None:
    assert set(statuses([row(OURS), row("trl", 200.0, 99, **other)]).values()) == {"not run"}
