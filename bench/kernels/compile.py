"""Compile every kernel in every configuration that its launch rules can choose, for every chip, without a GPU.

    python -m bench.kernels.compile                    all kernels for sm_75 ... sm_120; bench/README.md says more

The exit code is 1, with a list, if a kernel does not compile, spills more than 64 bytes per thread, needs more shared
memory than its chip has, or is in no `variants()`.
"""

import json
import multiprocessing
import os
import pkgutil
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import click
import torch
import triton
from rich.console import Console
from rich.table import Column, Table

import lowmem_grpo.kernels
from bench.common import options
from lowmem_grpo.kernels.triton_utils import SHARED_MEMORY, Variant

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NO_BF16 = {75}  # chips without bfloat16
FUSION_WARNING = ".*TRITON_DEFAULT_FP_FUSION is unset.*"  # Triton 3.9 prints it once in every process


@dataclass(frozen=True)
class Job:
    """One variant on one chip; jobs with the same key are the same compilation."""

    module: str
    variant: Variant
    chip: int
    dtype: str
    hints: str

    @property
    def key(self) -> tuple[Any, ...]:
        launch, kernel = self.variant.launch, self.variant.kernel
        values = launch.constexprs | self.variant.constexprs
        settings = sorted((name, str(value)) for name, value in values.items())
        return (kernel.__module__, kernel.__name__, tuple(sorted(self.variant.types.items())), tuple(settings),
                launch.num_warps, launch.num_stages, self.chip, self.hints)

    @property
    def label(self) -> str:
        return f"{self.module}: {self.variant.name}, sm_{self.chip}, {self.dtype}, {self.hints}"


def kernel_modules() -> list[str]:
    """Return the names of all modules of lowmem_grpo.kernels."""
    return [info.name for info in pkgutil.iter_modules(lowmem_grpo.kernels.__path__, "lowmem_grpo.kernels.")]


def list_jobs(modules: list[ModuleType], chips: list[int], hints: list[str], one_dtype: bool = False) -> list[Job]:
    """Return every variant of every module for every chip, dtype and set of hints; with `one_dtype`, fp16 only if a
    chip has no bf16."""
    return [
        Job(module.__name__.rpartition(".")[2], variant, chip, dtype, hint)
        for module in modules if hasattr(module, "variants")
        for chip in chips
        for dtype in (["fp16"] if chip in NO_BF16 else ["bf16"] if one_dtype else DTYPES)
        for variant in module.variants(chip, DTYPES[dtype])
        for hint in hints
    ]


def unlisted(modules: list[ModuleType], jobs: list[Job]) -> list[str]:
    """Return kernels (named x_kernel) that are in no variant, so that nothing would compile them."""
    listed = {(job.variant.kernel.__module__, job.variant.kernel.__name__) for job in jobs}
    return [
        f"{module.__name__}: {name} is in no variants()" for module in modules for name, value in vars(module).items()
        if name.endswith("_kernel") and hasattr(value, "arg_names") and value.__module__ == module.__name__
        and (module.__name__, value.__name__) not in listed
    ]


QUEUE: list[Job] = []  # distinct jobs: kernels cannot be sent to forked workers, which look them up by number


def weigh_number(number: int) -> Any:
    """Return the weight of one job; runs in a worker, which imports the compiler."""
    from bench.kernels.aot import weigh

    warnings.filterwarnings("ignore", message=FUSION_WARNING)
    job = QUEUE[number]
    return weigh(job.variant, job.chip, job.hints)


def weigh_all(jobs: list[Job], workers: int) -> dict[tuple[Any, ...], Any]:
    """Return the weight of every distinct job, by its key."""
    from bench.kernels.aot import Weight

    QUEUE[:] = {job.key: job for job in jobs}.values()
    if workers == 1:
        return {job.key: weigh_number(number) for number, job in enumerate(QUEUE)}
    weights = {}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        waiting = [(job.key, pool.submit(weigh_number, number)) for number, job in enumerate(QUEUE)]
        for key, future in waiting:
            try:
                weights[key] = future.result()
            except BrokenProcessPool:
                weights[key] = Weight(error="the compiler's process ended; --jobs 1 shows at which kernel")
    return weights


def rows(jobs: list[Job], weights: dict[tuple[Any, ...], Any]) -> list[dict[str, Any]]:
    """Return a row per job, for --json."""
    return [
        {"module": job.module, "variant": job.variant.name, "kernel": job.variant.kernel.__name__,
         "chip": job.chip, "dtype": job.dtype, "hints": job.hints, "num_warps": job.variant.launch.num_warps,
         "num_stages": job.variant.launch.num_stages, **asdict(weights[job.key]),
         "complaints": weights[job.key].complaints(job.chip)}
        for job in jobs
    ]


def table(jobs: list[Job], weights: dict[tuple[Any, ...], Any], chips: list[int], every_variant: bool) -> Table:
    """Return a table of the most registers, shared memory and spills of each kernel, or variant, on each chip."""
    result = Table(Column("kernel", no_wrap=True), "variants", *(f"sm_{chip}" for chip in chips),
                   title="registers a thread, KiB of shared memory a block, s: bytes spilled a thread")
    lines: dict[str, list[Job]] = {}
    for job in jobs:
        name = f"{job.variant.name}, {job.dtype}" if every_variant else job.variant.kernel.__name__
        lines.setdefault(name, []).append(job)
    for name, line in lines.items():
        cells = [cell([weights[job.key] for job in line if job.chip == chip], chip) for chip in chips]
        result.add_row(name, str(len({job.variant.name for job in line})), *cells)
    return result


def cell(weights: list[Any], chip: int) -> str:
    """Return the table's cell for some compilations for one chip."""
    if not weights:
        return ""
    if any(weight.error for weight in weights):
        return "[red]error[/]"
    registers, spill = max(w.registers for w in weights), max(w.spill_bytes for w in weights)
    text = f"{registers} {max(w.shared_bytes for w in weights) / 1024:.1f}K" + (f" s{spill}" if spill else "")
    return f"[red]{text}[/]" if any(weight.complaints(chip) for weight in weights) else text


def require_compiler() -> None:
    """Raise ClickException if Triton would interpret kernels."""
    if triton.knobs.runtime.interpret:
        raise click.ClickException("TRITON_INTERPRET is set, so kernels would be interpreted and nothing compiled: "
                                   "env -u TRITON_INTERPRET python -m bench.kernels.compile")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of the table.")
@click.option("--all", "every_variant", is_flag=True, help="A line of the table for each variant.")
@click.option("--chips", callback=options.names([*map(str, SHARED_MEMORY)]), help="Such as 75,90; all by default.")
@click.option("--hints", type=click.Choice(["aligned", "odd", "both"]), default="aligned", show_default=True,
              help="Sizes and strides known to be multiples of 16 (as they mostly are), or not.")
@click.option("--one-dtype", is_flag=True, help="fp16 only for chips without bf16: half of the time.")
@click.option("--module", "names", multiple=True, help="Modules with variants(), in place of lowmem_grpo.kernels.")
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True, type=click.IntRange(min=1), help="Processes.")
def main(
    as_json: bool, every_variant: bool, chips: list[str], hints: str, one_dtype: bool, names: tuple[str, ...],
    jobs: int,
) -> None:
    """Compile every kernel for every chip and weigh it."""
    require_compiler()
    start, numbers = time.perf_counter(), [int(chip) for chip in chips or SHARED_MEMORY]
    modules = [import_module(name) for name in names or kernel_modules()]
    wanted = list_jobs(modules, numbers, ["aligned", "odd"] if hints == "both" else [hints], one_dtype)
    weights = weigh_all(wanted, jobs)
    problems = [f"{job.label}: {text}" for job in wanted for text in weights[job.key].complaints(job.chip)]
    problems += unlisted(modules, wanted)
    seconds = round(time.perf_counter() - start, 1)
    if as_json:
        click.echo(json.dumps({"triton": triton.__version__, "seconds": seconds, "compilations": len(weights),
                               "problems": problems, "rows": rows(wanted, weights)}))
    else:
        Console(width=None if sys.stdout.isatty() else 180).print(table(wanted, weights, numbers, every_variant))
        click.echo(f"{len(wanted)} variants, {len(weights)} compilations, Triton {triton.__version__}, {seconds} s")
    if problems:
        click.echo("\n".join([f"{len(problems)} problems:", *problems]), err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
