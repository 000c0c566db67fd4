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
from bench.gate.stages import KERNEL_OPS
from lowmem_grpo.memory.layer_forms import DECODE_INSTRUCTIONS

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
    listed = ", ".join(f"({', '.join(map(str, entry))})" for entry in chosen)
    (folder / "some_kernels.py").write_text(f"{KERNELS}\n\nCHOSEN = [{listed}]\n")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = check("--json", "--module", "some_kernels", "--chips", chips, "--jobs", 1,
                 TRITON_CACHE_DIR=str(folder / "cache"), PYTHONPATH=path)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_what_does_not_compile_spills_exceeds_shared_memory_or_is_unlisted_fails_the_check_and_good_kernels_pass(
    tmp_path: Path
) -> None:
    chosen = [("good_kernel", 1024, 4), ("broken_kernel", 16, 4), ("spilling_kernel", 65536, 32),
              ("sharing_kernel", 64, 4)]
    code, found = compile_chosen(tmp_path, chosen, "75,80,86")
    rows = {name: [row for row in found["rows"] if row["kernel"] == f"{name}_kernel"]
            for name in ("good", "spilling", "sharing")}

    def problems(kernel: str) -> list[str]:
        return [problem for problem in found["problems"] if kernel in problem]

    assert code == 1 and len(problems("broken_kernel, sm_80")) == len(problems("spilling_kernel, sm_80")) == 2
    assert all("does not compile" in problem and "not_a_name" in problem for problem in problems("broken"))
    assert all("spills" in problem for problem in problems("spilling_kernel"))
    assert min(row["spill_bytes"] for row in rows["spilling"]) > 64
    exceeding = {row["chip"] for row in rows["sharing"] if any("shared memory" in text for text in row["complaints"])}
    assert exceeding == {86} and {row["shared_bytes"] for row in rows["sharing"]} == {7 * 2 * 64 * 64 * 2}
    assert len(problems("forgotten_kernel is in no variants()")) == 1 and not problems("good_kernel")
    assert [(row["chip"], row["dtype"]) for row in rows["good"]] == [
        (75, "fp16"), (80, "bf16"), (80, "fp16"), (86, "bf16"), (86, "fp16")]
    assert all(8 <= row["registers"] <= 64 and not row["spill_bytes"] and row["cubin_bytes"] for row in rows["good"])


COUNTED = '''
import json
import sys

import torch

from bench.kernels.aot import longest_loop
from lowmem_grpo.kernels import few_rows_kernels
from lowmem_grpo.kernels.few_rows import narrow_launch


def counted(form, rows, chip):
    launch = narrow_launch(rows, 8192, 4096, chip)
    listed = getattr(few_rows_kernels, f"{form}_variants")(chip, torch.bfloat16)
    (nested,) = [one for one in listed if one.launch == launch and one.constexprs.get("NESTED", True)]
    weights = launch.constexprs["BLOCK_N"] * 2 * launch.constexprs["BYTES"] / 32  # of a step, by one of 32 lanes
    return longest_loop(nested, chip, "aligned") / weights


print(json.dumps([(form, rows, max(counted(form, rows, chip) for chip in (80, 90, 120)))
                  for form in ("nf4", "nvfp4") for rows in map(int, sys.argv[1:])]))
'''


@pytest.mark.parametrize("rows", [[8], pytest.param([16, 32, 64], marks=pytest.mark.slow)], ids=str)
def test_the_loop_of_few_rows_in_4_bits_has_the_planned_instructions_a_weight(rows: list[int], tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COUNTED, *map(str, rows)], capture_output=True, text=True,
                          check=False, env=kept | {"TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    for form, few, most in json.loads(done.stdout):
        planned = DECODE_INSTRUCTIONS[form][80][few]
        assert planned - 0.2 < most <= planned, (form, few, most)
        assert few > 8 or form == "nvfp4" or most <= 5, f"7.8 with one block of 64 in a step; {most}"


@pytest.mark.slow
def test_the_check_refuses_to_interpret() -> None:
    done = check(TRITON_INTERPRET="1")
    assert done.returncode == 1 and "env -u TRITON_INTERPRET" in done.stderr


@pytest.mark.slow
def test_every_op_is_measured_beside_its_reference_and_rows_say_what_was_measured_and_where(tmp_path: Path) -> None:
    ran("kernels.bench", "--device", "cpu", "--shapes", "tiny", "--output", tmp_path / "rows.jsonl", "--dtype",
        "float32", "--providers", "lowmem_grpo,reference,two_gemms,trl_chunked,dense", TRITON_INTERPRET="0")
    measured = read_rows(tmp_path / "rows.jsonl")
    for provider in ("lowmem_grpo", "reference"):
        assert {row["op"] for row in measured if row["provider"] == provider} == {*KERNEL_OPS}
    assert {row["passes"] for row in measured} == {"fwd", "fwd+bwd"}
    for row in measured:
        assert 0 < row["p20"] <= row["p50"] <= row["p80"]
        assert {"run", "cpu", "cores", "gpu", "versions", "commit", "date", "device", "threads"} <= row.keys()
        assert row["provider"] == "two_gemms" or 0 <= row["error"] < 1e-4
    rows = {row["provider"]: row for row in measured if row["op"] == "linear_logprobs" and row["passes"] == "fwd+bwd"}
    # inside of operators: logits and their softmax, 64 x 500 floats each; the bare products hold the logits
    assert rows["reference"]["peak_bytes"] >= 2 * 64 * 500 * 4 and rows["two_gemms"]["peak_bytes"] >= 64 * 500 * 4
    assert rows["two_gemms"]["gemm_ratio"] == 1 and all(row["gemm_ratio"] > 0 for row in rows.values())


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


@pytest.mark.parametrize(("peak", "p50", "verdicts"), [(100, 1.0, ["met", "met"]), (101, 2.0, ["missed", "missed"])])
def test_targets_are_judged_within_one_run(tmp_path: Path, peak: int, p50: float, verdicts: list[str]) -> None:
    rows = [
        logprob_row("trl_full_logits", 1.5, 800), logprob_row("lowmem_grpo", p50, peak),
        logprob_row("lowmem_grpo", 99.0, 99999, run="second"),  # a later run without TRL says nothing about this target
    ]
    lines = [line for line in page(tmp_path, rows).splitlines() if "x trl_full_logits |" in line]
    assert [line.split("|")[4].strip() for line in lines] == verdicts
