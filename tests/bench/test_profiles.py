"""bench/profiles/bench.py: the arithmetic on hand-made events, the reader on a hand-made trace, a real step on the
CPU."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from programs import ran

from bench.common import model_folder
from bench.common.model_folder import MADE
from bench.profiles import bench as profiles
from bench.profiles.reader import events_of
from bench.profiles.timeline import Event, common, innermost, length, summarize, union
from bench.rollout.shapes import SHAPES


def event(start: float, end: float, kind: str = "kernel", name: str = "gemm", stream: str = "7") -> Any:
    return Event(start, end - start, stream, kind, name)


def called(*arguments: str) -> Any:
    """A call in this process, which has torch already."""
    return CliRunner().invoke(profiles.main, list(arguments))


@pytest.mark.parametrize(("spans", "merged"), [
    ([], []),
    ([(5.0, 7.0), (1.0, 3.0)], [(1.0, 3.0), (5.0, 7.0)]),
    ([(1.0, 3.0), (3.0, 4.0)], [(1.0, 4.0)]),
    ([(1.0, 9.0), (2.0, 3.0), (8.0, 10.0)], [(1.0, 10.0)]),
])
def test_spans_that_overlap_or_touch_become_one(spans: list[Any], merged: list[Any]) -> None:
    assert union(spans) == merged
    assert length(spans) == sum(end - begin for begin, end in merged)


def test_time_that_lies_in_both_is_counted_once() -> None:
    first = [(0.0, 4.0), (2.0, 5.0), (10.0, 12.0), (20.0, 21.0)]
    assert common(first, [(1.0, 3.0), (4.0, 11.0)]) == [(1.0, 3.0), (4.0, 5.0), (10.0, 11.0)]
    assert common(first, []) == []
    assert common([(0.0, 1.0)], [(1.0, 2.0)]) == []


def test_kernels_side_by_side_are_busy_once_and_share_their_own_time() -> None:
    found = summarize([event(0, 10), event(5, 10, name="norm", stream="8"), event(30, 40)], steps=2)
    assert (found.span, found.busy, found.kernels) == (40, 20, 3)
    assert found.idle_share == 0.5
    assert [(one.name, one.calls, one.share) for one in found.top] == [("gemm", 2, 0.8), ("norm", 1, 0.2)]


def test_the_longest_idle_time_comes_first_with_what_the_cpu_ran() -> None:
    host = [event(11, 50, "host", "aten::item"), event(11.5, 29, "host", "cudaStreamSynchronize"),
            event(55, 61, "host", "aten::mm"), event(0, 5, "host", "aten::add")]
    kernels = [event(0, 10), event(30, 40), event(50, 60), event(60, 70)]
    gaps = summarize([*kernels, *host], steps=1, gaps=2).gaps
    assert [(gap.start, gap.duration, gap.during) for gap in gaps] == [
        (10, 20, "aten::item"), (40, 10, "aten::item")
    ]
    inside = summarize([*kernels, event(9, 31, "host", "outer"), event(10, 30, "host", "inner")], steps=1, gaps=1)
    assert inside.gaps[0].during == "inner"
    alone = summarize([event(0, 1), event(2, 3), event(5, 6, "host", "later")], steps=1)
    assert alone.gaps[0].during == ""


def test_copies_are_overlapped_by_kernels_of_any_stream_and_by_nothing_else() -> None:
    copies = [event(5, 15, "copy", "Memcpy DtoH"), event(12, 20, "copy", "Memcpy HtoD"), event(100, 105, "copy")]
    kernels = [event(0, 10), event(8, 13, stream="9")]
    found = summarize([*copies, *kernels, event(0, 200, "host", "aten::copy_")], steps=1)
    assert found.copy == 20
    assert found.overlapped == 8  # 5 to 13
    assert found.copy_overlap == 0.4
    assert found.busy == 13  # copies are no work of the compute units
    assert summarize(kernels, steps=1).copy_overlap is None


def test_an_empty_profile_has_no_time_and_divides_by_nothing() -> None:
    found = summarize([], steps=1)
    assert (found.span, found.busy, found.idle_share, found.top, found.gaps) == (0, 0, 0, [], [])


def test_nested_ops_become_what_each_did_itself() -> None:
    ops = [event(0, 10, "host", "linear"), event(2, 6, "host", "mm"), event(3, 4, "host", "empty"),
           event(6, 8, "host", "add"), event(0, 3, "host", "other", stream="8"), event(12, 13, "host", "view")]
    found = [(one.name, one.start, one.end) for one in innermost(ops) if one.stream == "7"]
    assert found == [("linear", 0, 2), ("mm", 2, 3), ("empty", 3, 4), ("mm", 4, 6), ("add", 6, 8), ("linear", 8, 10),
                     ("view", 12, 13)]
    assert [(one.start, one.end) for one in innermost(ops) if one.stream == "8"] == [(0, 3)]


def entry(cat: str, name: str, ts: float, dur: float, tid: Any = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": tid, "args": {}}


TRACE = [
    entry("kernel", "gemm", 10, 10), entry("kernel", "norm", 30, 10), entry("gpu_memset", "Memset (Device)", 40, 2),
    entry("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 15, 10, 8), entry("gpu_memcpy", "Memcpy DtoD", 42, 8),
    entry("cuda_runtime", "cudaLaunchKernelExC", 1, 1, 1), entry("cuda_driver", "cuLaunchKernelEx", 3, 1, 1),
    entry("cuda_runtime", "cudaGraphLaunch", 5, 1, 1), entry("cuda_runtime", "cudaStreamSynchronize", 20, 10, 1),
    entry("cpu_op", "aten::mm", 0, 8, 1), entry("user_annotation", "step", 0, 50, 1),
    entry("python_function", "train", 0, 50, 1), {"ph": "M", "name": "process_name", "pid": 0},
    {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 3, "pid": 0, "tid": 1},
]


def test_the_reader_tells_kernels_copies_launches_and_ops_apart() -> None:
    found = events_of(TRACE)
    kinds = [(one.kind, one.name) for one in found]
    assert [name for kind, name in kinds if kind == "kernel"] == ["gemm", "norm", "Memset (Device)", "Memcpy DtoD"]
    assert [name for kind, name in kinds if kind == "copy"] == ["Memcpy HtoD (Pinned -> Device)"]
    assert [name for kind, name in kinds if kind == "launch"] == [
        "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch"
    ]
    assert {name for kind, name in kinds if kind == "host"} == {"cudaStreamSynchronize", "aten::mm"}
    assert len(kinds) == 10


def test_a_kept_trace_of_a_card_is_read_without_running_anything(tmp_path: Path) -> None:
    path = tmp_path / "decode.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": TRACE}).encode()))
    done = called("--read", str(path), "--steps", "2", "--output", str(tmp_path))
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "decode_read.json").read_text())
    assert (found["of"], found["span"], found["busy"], found["launches"], found["steps"]) == ("kernels", 40, 30, 3, 2)
    assert found["idle_share"] == 0.25 and found["copy_overlap"] == 0.5
    page = (tmp_path / "decode_read.md").read_text()
    assert "| launches a step (a graph is one) | 2 |" in page
    assert "| 0.010 | cudaStreamSynchronize |" in page
    assert "| `gemm` | 1 | 0.010 | 33.3% |" in page


@pytest.mark.parametrize("content", ["[]", '{"events": []}', "no json"])
def test_a_file_that_is_no_trace_is_refused_and_nothing_is_written(content: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    done = called("--read", str(path), "--output", str(tmp_path / "pages"))
    assert done.exit_code == 1
    assert f"{path} cannot be read" in done.output
    assert not (tmp_path / "pages").exists()


@pytest.mark.slow
def test_both_parts_are_profiled_on_the_cpu(tmp_path: Path) -> None:
    ran("profiles.bench", "--device", "cpu", "--engine", "transformers", "--output", tmp_path, "--trace")
    for part, steps in (("train", 1), ("decode", 8)):
        found = json.loads((tmp_path / f"{part}_tiny_cpu.json").read_text())
        assert (found["part"], found["of"], found["steps"], found["device"]) == (part, "ops", steps, "cpu")
        assert 0 < found["busy"] <= found["span"]
        assert 0 < sum(one["share"] for one in found["top"]) <= 1
        assert any("Backward" in one["name"] for one in found["top"]) == (part == "train")
        assert "note" not in found
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

    def look(part: str, folder: Path, options: dict[str, Any], row: dict[str, Any]) -> None:
        looked.append(part)
        if part == "train":
            raise type(error, (Exception,), {})("no room")

    monkeypatch.setattr(profiles, "look", look)
    monkeypatch.setattr(model_folder, "make", lambda folder, shape, device: None)
    done = called("--device", "cpu", "--shape", "tiny", "--output", str(tmp_path))
    assert looked == ["train", "decode"]
    assert done.exit_code == code, done.output
    assert f"train is missing: {error}: no room" in done.output


def test_a_card_whose_kernels_are_not_seen_says_so_on_its_page(tmp_path: Path) -> None:
    row = {"gpu": "some", "cpu": "some", "device": "cuda", "commit": "abc", "date": "2026-01-01", "versions": {}}
    profiles.keep("train", "A training step", row, summarize([event(0, 1)], 1), True, tmp_path)
    assert profiles.NO_KERNELS in (tmp_path / "train.md").read_text()
    assert json.loads((tmp_path / "train.json").read_text())["note"] == profiles.NO_KERNELS
