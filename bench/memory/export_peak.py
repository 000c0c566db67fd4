"""The memory of a merged export of a whole model: `lowmem-grpo export --format merged`, watched from outside.

    python -m bench.memory.export_peak --shape llama-3.1-8b --folder /tmp/export  # 32 GB on disk, half an hour
    python -m bench.memory.export_peak --shape tiny

Weights and adapter are random numbers in a real model's shape. A row goes to bench/results/export.jsonl: the peak of
the process's own memory (RssAnon), and the peak with the pages of files, which the system can drop.
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bench.common import options
from bench.common.rows import append_row, machine
from bench.loop.processes import TARGETS
from lowmem_grpo.memory.named_configs import named_config
from lowmem_grpo.models.named import resolve
from lowmem_grpo.runs.saved_adapter import BaseRecord
from lowmem_grpo.units import GIB

RESULTS = Path(__file__).parents[1] / "results" / "export.jsonl"
SHARD, BLOCK = 2**30, 2**24  # bytes of a file; random numbers that are repeated over every tensor


def make_base(folder: Path, shape: str) -> Any:
    """A checkpoint in bfloat16 with every tensor of the model; its config."""
    folder.mkdir(parents=True)
    if shape == "tiny":
        shutil.copytree(resolve("tiny"), folder, dirs_exist_ok=True)
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config = AutoConfig.for_model(**named_config(shape))
    config.architectures = ["LlamaForCausalLM" if config.model_type == "llama" else "Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve("tiny"), trust_remote_code=False).save_pretrained(folder)
    places: dict[str, str] = {}
    for number, part in enumerate(shards(tensors(config))):
        name = f"model-{number:05}.safetensors"
        save_file({key: filled(size) for key, size in part.items()}, folder / name, {"format": "pt"})
        places |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return config


def tensors(config: Any) -> dict[str, torch.Size]:
    """Names and shapes of the model's tensors, tied ones once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return {name: tensor.shape for name, tensor in model.named_parameters()}


def shards(sizes: dict[str, torch.Size]) -> Iterator[dict[str, torch.Size]]:
    """Parts of at most SHARD bytes, or of one tensor."""
    part: dict[str, torch.Size] = {}
    for name, size in sizes.items():
        if part and 2 * sum(map(math.prod, [*part.values(), size])) > SHARD:
            yield part
            part = {}
        part[name] = size
    yield part


def filled(size: torch.Size) -> torch.Tensor:
    """Numbers like those of weights, a block of them repeated."""
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    count = math.prod(size)
    return block.repeat(-(-count // BLOCK))[:count].reshape(size)


def make_adapter(folder: Path, base: Path, config: Any, rank: int) -> None:
    """LoRA on every linear layer, as PEFT stores it."""
    folder.mkdir(parents=True)
    wanted = {name: size for name, size in tensors(config).items() if name.split(".")[-2] in TARGETS and len(size) == 2}
    made = {}
    for name, (rows, columns) in wanted.items():
        place = f"base_model.model.{name.removesuffix('.weight')}"
        made[f"{place}.lora_A.weight"] = torch.randn(rank, columns) * 0.01
        made[f"{place}.lora_B.weight"] = torch.randn(rows, rank) * 0.01
    save_file(made, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0,
                "bias": "none", "target_modules": TARGETS, "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    BaseRecord(str(base), load_in_4bit=True, dtype="bfloat16").write(folder)


def watched(command: list[str]) -> tuple[int, dict[str, int], str]:
    """Exit status, the largest of each kind of resident memory in bytes, and what was printed."""
    peaks = {"RssAnon": 0, "VmRSS": 0}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            for kind, size in resident(process.pid).items():
                peaks[kind] = max(peaks[kind], size)
            time.sleep(0.05)
        output.seek(0)
        return process.returncode, peaks, output.read()


def resident(pid: int) -> dict[str, int]:
    """Bytes of the process now: its own, and with the pages of files."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return {}
    table = dict(line.split(":", 1) for line in lines)
    return {kind: int(table[kind].split()[0]) * 1024 for kind in ("RssAnon", "VmRSS") if kind in table}


@click.command(help=__doc__)
@click.option("--shape", default="llama-3.1-8b", show_default=True, help="A shape of lowmem_grpo/shapes, or tiny.")
@click.option("--folder", type=click.Path(path_type=Path), help="Room for both models; by default a temporary one.")
@click.option("--rank", default=16, show_default=True)
@options.output(RESULTS)
def main(shape: str, folder: Path | None, rank: int, output: Path) -> None:
    where = machine()  # the code that runs is what is there now: another commit may be there at the end
    with tempfile.TemporaryDirectory(prefix="export_", dir=folder) as name:
        base, adapter, out = (Path(name) / part for part in ("base", "adapter", "merged"))
        config = make_base(base, shape)
        make_adapter(adapter, base, config, rank)
        started = time.perf_counter()
        code, peaks, said = watched([sys.executable, "-m", "lowmem_grpo", "export", str(adapter), "--format", "merged",
                                     "--out", str(out)])
        seconds = time.perf_counter() - started
        if code:
            raise click.ClickException(said[-2000:])
        size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    row = {"shape": shape, "rank": rank, "seconds": seconds, "own_bytes": peaks["RssAnon"],
           "with_files_bytes": peaks["VmRSS"], "written_bytes": size, "threads": torch.get_num_threads()}
    append_row(output, row | where)
    click.echo(f"{shape}: {size / GIB:.2f} GiB written in {seconds:.0f} s; {peaks['RssAnon'] / GIB:.2f} GiB of its own "
               f"memory at the peak, {peaks['VmRSS'] / GIB:.2f} with pages of files")
    click.echo(said.strip()[-600:])


if __name__ == "__main__":
    main()
