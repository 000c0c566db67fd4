"""bench/profiles.py: the arithmetic on made events, a real step on the CPU, and parts that fail."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from programs import ran

from bench import profiles
from bench.common import child, model_folder
from bench.common.model_folder import MADE
from bench.profiles import summarize
from bench.rollout.shapes import SHAPES

CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


def event(start: float, end: float, name: str = "gemm", device: Any = CUDA, annotation: bool = False) -> Any:
    """An event as torch's profiler has it; one of the host called nothing."""
    return SimpleNamespace(
        name=name, device_type=device, is_user_annotation=annotation, self_cpu_time_total=end - start,
        time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start))


def host(start: float, end: float, name: str) -> Any:
    return event(start, end, name, CPU)


def called(*arguments: str) -> Any:
    """A call in this process, which has torch already."""
    return CliRunner().invoke(profiles.main, list(arguments))


def test_kernels_side_by_side_are_busy_once_and_share_their_own_time() -> None:
    found = summarize([event(0, 10_000), event(5_000, 10_000, "norm"), event(30_000, 40_000),
                       event(0, 90_000, "step", annotation=True), host(0, 1, "cudaLaunchKernelExC")], steps=2)
    assert (found["span_ms"], found["busy_ms"], found["count"], found["idle_share"]) == (40, 20, 3, 0.5)
    assert [(one["name"], one["calls"], one["share"]) for one in found["top"]] == [("gemm", 2, 0.8), ("norm", 1, 0.2)]
    assert (found["of"], found["launches"], found["steps"]) == ("kernels", 1, 2)


def test_the_longest_idle_time_comes_first_with_the_innermost_op_that_ran() -> None:
    ops = [host(11, 50, "aten::item"), host(11.5, 29, "cudaStreamSynchronize"), host(0, 5, "aten::add")]
    kernels = [event(0, 10), event(30, 40), event(50, 60), event(60, 70)]
    gaps = summarize([*kernels, *ops], steps=1)["gaps"]
    assert [(gap["ms"], gap["during"]) for gap in gaps] == [(0.02, "aten::item"), (0.01, "aten::item")]
    inside = summarize([*kernels, host(9, 31, "outer"), host(10, 30, "inner")], steps=1)["gaps"]
    assert inside[0]["during"] == "inner" and inside[1]["during"] == ""


def test_copies_are_overlapped_by_kernels_and_are_no_work_of_the_compute_units() -> None:
    copies = [event(5, 15, "Memcpy DtoH"), event(12, 20, "Memcpy HtoD"), event(100, 105, "Memcpy HtoD (Pinned)")]
    kernels = [event(0, 10), event(8, 13), event(13, 13.5, "Memcpy DtoD")]
    found = summarize([*copies, *kernels, host(0, 200, "aten::copy_")], steps=1)
    assert (found["copy_ms"], found["overlapped_ms"], found["busy_ms"]) == pytest.approx((0.020, 0.0085, 0.0135))


def test_without_kernels_the_page_is_of_the_hosts_ops() -> None:
    row = {"gpu": None, "cpu": "some", "device": "cpu", "commit": "abc", "date": "2026-01-01", "versions": {}}
    page = profiles.page("A step", row | summarize([host(0, 1, "aten::a|b")], 1))
    assert "| of | ops |" in page and "| `aten::a/b` | 1 | 0.001 | 100.0% |" in page


@pytest.mark.slow
def test_both_parts_are_profiled_on_the_cpu(tmp_path: Path) -> None:
    ran("profiles", "--device", "cpu", "--engine", "transformers", "--output", tmp_path, "--trace")
    for part, steps in (("train", 1), ("decode", 8)):
        found = json.loads((tmp_path / f"{part}_tiny_cpu.json").read_text())
        assert (found["part"], found["of"], found["steps"], found["device"]) == (part, "ops", steps, "cpu")
        assert 0 < found["busy_ms"] <= found["span_ms"]
        assert 0 < sum(one["share"] for one in found["top"]) <= 1
        assert any("Backward" in one["name"] for one in found["top"]) == (part == "train")
        assert (tmp_path / f"{part}_tiny_cpu.trace.json.gz").stat().st_size > 0


def test_a_folder_of_the_same_model_is_used_again_and_one_of_another_model_is_refused(tmp_path: Path) -> None:
    """Nothing could be loaded from these files, so nothing may be made or read here."""
    (tmp_path / MADE).parent.mkdir()
    (tmp_path / MADE).touch()
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["tiny"].config))
    with model_folder.model_folder(tmp_path, "tiny", "cpu") as folder:
        assert folder == tmp_path and not (folder / MADE).read_bytes()
    done = called("--device", "cpu", "--shape", "full", "--weights", str(tmp_path), "--output", str(tmp_path / "pages"))
    assert done.exit_code == 1
    assert "holds another model" in done.output
    assert not (tmp_path / "pages").exists()


@pytest.mark.parametrize(("error", "code"), [("RuntimeError", 1), ("EngineUnavailableError", 0)])
def test_a_part_that_fails_is_named_and_the_other_one_runs(
    error: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []

    def profile(part: str, *_: Any) -> None:
        looked.append(part)
        if part == "train":
            raise type(error, (Exception,), {})("no room")

    monkeypatch.setattr(profiles, "profile", profile)
    monkeypatch.setattr(child, "call", lambda *_: {})
    done = called("--device", "cpu", "--shape", "tiny", "--output", str(tmp_path))
    assert looked == ["train", "decode"]
    assert done.exit_code == code, done.output
    assert f"train is missing: {error}: no room" in done.output
