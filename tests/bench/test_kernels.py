"""The kernel benchmarks: what the compiler check refuses, the rows that a run writes, and the page made of rows."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import ran

from bench.common.make_results import document
from bench.common.rows import append_row, read_rows

pytest.importorskip("triton")
KERNELS = '''
import torch

from lowmem_grpo.kernels.triton_utils import TRITON_TYPES, Launch, Variant, tl, triton


@triton.jit
def good_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + places, tl.load(x_ptr + places, mask=places < N), mask=places < N)


@triton.jit
def broken_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), not_a_name)


@triton.jit
def spilling_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places).to(tl.float32)
    tl.store(y_ptr + places, x * tl.sum(x, 0) + tl.max(x, 0))


@triton.jit
def sharing_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    tile = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, N, BLOCK):  # every stage keeps two tiles
        total = tl.dot(tl.load(x_ptr + start + tile), tl.load(x_ptr + start * BLOCK + tile), total)
    tl.store(y_ptr + tile, total)


@triton.jit
def forgotten_kernel(x_ptr, N, BLOCK: tl.constexpr):
    tl.store(x_ptr, N)


def variants(capability: int, dtype: torch.dtype) -> list[Variant]:
    types = {"x_ptr": "*" + TRITON_TYPES[dtype], "y_ptr": "*fp32", "N": "i32"}
    return [Variant(kernel.__name__, kernel, types, Launch({"BLOCK": block}, num_warps, num_stages=8))
            for kernel, block, num_warps in CHOSEN if capability > 75 or kernel is good_kernel]
'''


def check(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """The compiler check in a process in which Triton compiles rather than interprets."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-m", "bench.kernels.compile", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=kept, check=False)


def compile_chosen(folder: Path, chosen: list[tuple[str, int, int]], chips: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of the compiler check on some of the kernels above."""
    path = folder / "some_kernels.py"
    listed = ", ".join(f"({', '.join(map(str, entry))})" for entry in chosen)
    path.write_text(f"{KERNELS}\n\nCHOSEN = [{listed}]\n")
    done = check("--json", "--file", path, "--chips", chips, "--jobs", 1, TRITON_CACHE_DIR=str(folder / "cache"))
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def problems(found: dict[str, Any], kernel: str) -> list[str]:
    """What the check says against one kernel."""
    return [problem for problem in found["problems"] if kernel in problem]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """One run of the check over kernels that are good, broken, spilling, too large for some chips, and unlisted."""
    chosen = [("good_kernel", 1024, 4), ("broken_kernel", 16, 4), ("spilling_kernel", 65536, 32),
              ("sharing_kernel", 64, 4)]
    return compile_chosen(tmp_path_factory.mktemp("compile"), chosen, "75,80,86")


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_fails_the_check(compiled: tuple[int, dict[str, Any]]) -> None:
    code, found = compiled
    assert code == 1
    assert all("does not compile" in problem and "not_a_name" in problem for problem in problems(found, "broken"))
    assert len(problems(found, "broken_kernel, sm_80")) == 2  # in both dtypes


@pytest.mark.slow
def test_a_kernel_that_spills_fails_the_check(compiled: tuple[int, dict[str, Any]]) -> None:
    assert len(problems(compiled[1], "spilling_kernel, sm_80")) == 2
    assert all("spills" in problem for problem in problems(compiled[1], "spilling_kernel"))
    spilled = [row["spill_bytes"] for row in compiled[1]["rows"] if row["kernel"] == "spilling_kernel"]
    assert min(spilled) > 64


@pytest.mark.slow
def test_a_kernel_fails_the_check_only_on_the_chip_whose_shared_memory_it_exceeds(
    compiled: tuple[int, dict[str, Any]]
) -> None:
    sharing = [row for row in compiled[1]["rows"] if row["kernel"] == "sharing_kernel"]
    assert {row["chip"] for row in sharing if any("shared memory" in text for text in row["complaints"])} == {86}
    assert {row["shared_bytes"] for row in sharing} == {7 * 2 * 64 * 64 * 2}


@pytest.mark.slow
def test_a_kernel_that_no_variant_lists_fails_the_check(compiled: tuple[int, dict[str, Any]]) -> None:
    assert len(problems(compiled[1], "forgotten_kernel is in no variants()")) == 1


@pytest.mark.slow
def test_good_kernels_pass_with_their_registers_counted(compiled: tuple[int, dict[str, Any]], tmp_path: Path) -> None:
    assert not problems(compiled[1], "good_kernel")
    good = [row for row in compiled[1]["rows"] if row["kernel"] == "good_kernel"]
    expected = [(75, "fp16"), (80, "bf16"), (80, "fp16"), (86, "bf16"), (86, "fp16")]
    assert [(row["chip"], row["dtype"]) for row in good] == expected
    assert all(8 <= row["registers"] <= 64 and row["spill_bytes"] == 0 and row["cubin_bytes"] for row in good)


@pytest.mark.slow
def test_the_check_refuses_to_interpret() -> None:
    done = check(TRITON_INTERPRET="1")
    assert done.returncode == 1 and "env -u TRITON_INTERPRET" in done.stderr


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a tiny run of every op on the CPU, without the compiler of torch."""
    output = tmp_path_factory.mktemp("measure") / "rows.jsonl"
    ran("kernels.bench", "--device", "cpu", "--shapes", "tiny", "--output", output, "--dtype", "float32",
        "--providers", "lowmem_grpo,reference,two_gemms,trl_chunked,dense", TRITON_INTERPRET="0")
    return read_rows(output)


@pytest.mark.slow
def test_every_op_is_measured_beside_its_reference(measured: list[dict[str, Any]]) -> None:
    ops = {"linear_logprobs", "nf4_linear", "nf4_dequantize", "fp8_linear", "fp8_dequantize", "rms_norm",
           "add_rms_norm", "rope", "swiglu", "geglu"}
    for provider in ("lowmem_grpo", "reference"):
        assert {row["op"] for row in measured if row["provider"] == provider} == ops
    assert {row["passes"] for row in measured} == {"fwd", "fwd+bwd"}


@pytest.mark.slow
def test_rows_say_what_was_measured_and_where(measured: list[dict[str, Any]]) -> None:
    for row in measured:
        assert row["p20"] <= row["p50"] <= row["p80"] and row["p50"] > 0
        assert {"run", "cpu", "cores", "gpu", "versions", "commit", "date", "device", "threads"} <= row.keys()
        if row["provider"] != "two_gemms":
            assert 0 <= row["error"] < 1e-4


@pytest.mark.slow
def test_memory_within_operators_counts(measured: list[dict[str, Any]]) -> None:
    """The reference holds logits and their softmax, 64 x 500 floats each, the bare products hold the logits."""
    peaks = {row["provider"]: row["peak_bytes"] for row in measured
             if row["op"] == "linear_logprobs" and row["passes"] == "fwd+bwd"}
    assert peaks["reference"] >= 2 * 64 * 500 * 4
    assert peaks["two_gemms"] >= 64 * 500 * 4


@pytest.mark.slow
def test_ours_is_set_against_its_bare_products(measured: list[dict[str, Any]]) -> None:
    rows = [row for row in measured if row["op"] == "linear_logprobs"]
    assert {row["gemm_ratio"] for row in rows if row["provider"] == "two_gemms"} == {1.0}
    assert all(row["gemm_ratio"] > 0 and row["tflops"] is not None for row in rows)


def page(folder: Path, rows: list[dict[str, Any]]) -> str:
    """RESULTS.md made of these kernel rows alone."""
    (folder / "kernels.jsonl").unlink(missing_ok=True)
    for row in rows:
        append_row(folder / "kernels.jsonl", row)
    return document(folder)


def logprob_row(provider: str, p50: float, peak: int, **fields: Any) -> dict[str, Any]:
    """A row of the CPU target of linear_logprobs."""
    return {
        "op": "linear_logprobs", "passes": "fwd+bwd", "shape": {"N": 2048, "D": 512, "V": 32768}, "dtype": "float32",
        "provider": provider, "version": "1", "p20": p50, "p50": p50, "p80": p50, "peak_bytes": peak, "error": 1e-6,
        "roofline": None, "tflops": 0.1, "gemm_ratio": None, "device": "cpu", "gpu": None, "cpu": "some processor",
        "cores": 2, "threads": 1, "copy_gbps": 10.0, "commit": "abc", "run": "first",
    } | fields


def test_the_page_says_that_nothing_was_measured_on_a_gpu_until_a_row_was(tmp_path: Path) -> None:
    row = logprob_row("lowmem_grpo", 1.0, 100)
    assert "Nothing here was measured on a GPU" in page(tmp_path, [row])
    idle = row | {"gpu": "Some Card"}  # of a machine that has a card, measured on its CPU
    assert "Nothing here was measured on a GPU" in page(tmp_path, [row, idle])
    text = page(tmp_path, [row, idle | {"device": "cuda"}])
    assert "Nothing here" not in text and "Some Card" in text


def test_the_page_shows_the_newest_row_of_each_provider(tmp_path: Path) -> None:
    old, new = logprob_row("lowmem_grpo", 777.0, 100), logprob_row("lowmem_grpo", 555.0, 100, run="second")
    other = logprob_row("reference", 333.0, 100)
    text = page(tmp_path, [old, other, new])
    assert "555.000" in text and "333.000" in text and "777.000" not in text


@pytest.mark.parametrize(("peak", "p50", "verdicts"), [(100, 1.0, ["met", "met"]), (101, 2.0, ["missed", "missed"])])
def test_targets_are_judged_within_one_run(tmp_path: Path, peak: int, p50: float, verdicts: list[str]) -> None:
    rows = [
        logprob_row("trl_full_logits", 1.5, 800), logprob_row("lowmem_grpo", p50, peak),
        logprob_row("lowmem_grpo", 99.0, 99999, run="second"),  # a later run without TRL says nothing about this target
    ]
    lines = [line for line in page(tmp_path, rows).splitlines() if "x trl_full_logits |" in line]
    assert [line.split("|")[4].strip() for line in lines] == verdicts


def test_targets_that_nothing_was_run_for_are_named(tmp_path: Path) -> None:
    text = page(tmp_path, [logprob_row("lowmem_grpo", 1.0, 100)])
    assert "Not run yet:" in text and "H200: time at most 1.2 x two_gemms" in text
