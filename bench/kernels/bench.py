"""Measure time and memory of each kernel, of its plain reference and of other projects' kernels, in one run.

    python -m bench.kernels.bench                        on the card if there is one, else on the CPU

The providers of a case take turns. Peers (requirements-peers.txt) that are not installed are named and left out.
"""

import gc
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is imported: its profiler logs every start

import click
import torch
from rich.console import Console

from bench.common import options, tables
from bench.common.rows import append_row, machine, percentiles, run_now
from bench.gate.pretend import is_pretend
from bench.kernels import peer_divergence, peer_layers, peer_logprobs, peer_quantized
from bench.kernels.measure import Clock, copy_bandwidth, errors, peak_bytes
from bench.kernels.problems import DTYPES, FWD, FWD_BWD, OURS, Case, Problem, Provider, Run, UnsupportedError
from lowmem_grpo.utils import MIB

WRONG = 0.1  # a provider with a larger error, relative to the largest value, is left out
PROBLEMS: dict[str, Any] = (peer_logprobs.PROBLEMS | peer_divergence.PROBLEMS | peer_quantized.PROBLEMS
                            | peer_layers.PROBLEMS)
PRETENDS = torch.cuda.is_available() and is_pretend(torch.cuda.get_device_name(0))  # whose kernels compute nothing
BOTH = (FWD, FWD_BWD)
SHOWN: dict[str, tables.Figure] = {
    "provider": "provider", "p20 ms": ("p20", ".3f"), "p50 ms": ("p50", ".3f"), "p80 ms": ("p80", ".3f"),
    "peak MiB": ("peak_bytes", ".2f", MIB), "error": ("error", ".1e"), "GB/s": ("gbps", ".1f"),
    "of copy": ("roofline", ".0%"), "TFLOP/s": ("tflops", ".3g"), "x GEMMs": ("gemm_ratio", ".2f")}
PACKAGES = ("lowmem-grpo", "torch", "triton")
Sizes = dict[str, list[tuple[tuple[str, ...], dict[str, int]]]]


def sizes(logprobs: Any, rows: Any, linear: dict[str, int], norm: dict[str, int], rope: dict[str, int],
          glu: dict[str, int], passes: tuple[str, ...]) -> Sizes:
    """Return the shapes of all ops: `rows` are (passes, M, O, I) of linear layers, `linear` a weight to dequantize."""
    products = [(each, {"M": m, "O": outputs, "I": inputs}) for each, m, outputs, inputs in rows]
    return {
        "linear_logprobs": logprobs, "linear_divergence": logprobs, "nf4_linear": products, "fp8_linear": products,
        "nf4_dequantize": [((FWD,), linear)], "fp8_dequantize": [((FWD,), linear)],
        **{op: [(passes, shape)] for op, shape in (("rms_norm", norm), ("add_rms_norm", norm), ("rope", rope),
                                                   ("swiglu", glu), ("geglu", glu))},
    }


FULL = sizes(  # layers of an 8B model, 16,384 tokens; linear layers with few rows, and with a training step's
    [(BOTH, {"N": 16384, "D": 4096, "V": size}) for size in (128256, 151936)],
    [*(((FWD,), rows, outputs, inputs) for outputs, inputs in ((14336, 4096), (4096, 14336), (4096, 4096))
       for rows in (1, 8, 32, 64)), (BOTH, 4096, 14336, 4096)],
    {"O": 14336, "I": 4096}, {"N": 16384, "D": 4096}, {"T": 16384, "H": 32, "K": 8, "D": 128},
    {"N": 16384, "F": 14336}, BOTH)
SMALL = sizes(
    [((FWD,), {"N": 512, "D": 512, "V": 32768}), ((FWD_BWD,), {"N": 2048, "D": 512, "V": 32768})],
    [((FWD,), 1, 2816, 1024), ((FWD,), 32, 2816, 1024), ((FWD_BWD,), 512, 2816, 1024)],
    {"O": 2816, "I": 1024}, {"N": 2048, "D": 1024}, {"T": 2048, "H": 8, "K": 2, "D": 128}, {"N": 1024, "F": 2816},
    (FWD_BWD,))
TINY = sizes(
    [(BOTH, {"N": 64, "D": 32, "V": 500})], [((FWD,), 1, 64, 128), (BOTH, 16, 64, 128)], {"O": 64, "I": 128},
    {"N": 32, "D": 64}, {"T": 32, "H": 4, "K": 2, "D": 16}, {"N": 32, "F": 96}, BOTH)
SHAPES = {"full": FULL, "small": SMALL, "tiny": TINY}
console = Console(width=130)


@dataclass
class Bench:
    """The settings and failures that all cases of one run share."""

    clock: Clock
    providers: list[str]  # empty: all
    output: Path
    common: dict[str, Any]  # fields of every row
    failures: list[str] = field(default_factory=list)  # in our own providers; the run continues and ends with an error

    def measure(self, case: Case) -> None:
        """Measure all providers of one case in turn; each leaves a row."""
        make_problem, providers = PROBLEMS[case.op]
        try:
            problem = make_problem(case)
            truth = problem.truth()
        except torch.OutOfMemoryError:
            console.print(f"{case.label}: too large for this card", style="red", highlight=False)
            return
        runs, wrong = dict[str, Run](), dict[str, dict[str, float]]()
        providers = [one for one in providers if not self.providers or one.name in self.providers]
        missing: dict[str, str] = {}
        for provider in providers:
            try:
                runs[provider.name], wrong[provider.name] = prepare(provider, problem, truth)
            except UnsupportedError as reason:
                missing[provider.name] = str(reason)
                if provider.package == OURS:
                    self.failures.append(f"{case.label}: {provider.name}: {reason}")
        del truth
        peaks = {name: peak_bytes(run, case.device) for name, run in runs.items()}
        times = {name: percentiles(values) for name, values in self.clock.interleaved(runs).items()}
        rows = [self.row(problem, one, times, {"peak_bytes": peaks[one.name], "errors": wrong[one.name]})
                for one in providers if one.name in runs]
        for row in rows:
            append_row(self.output, row)
        tables.print_rows(rows, SHOWN, title=case.label, title_justify="left")
        for name, why in missing.items():
            console.print(f"  {name}: {why}", style="dim", highlight=False)

    def row(self, problem: Problem, provider: Provider, times: dict[str, dict[str, float]],
            measured: dict[str, Any]) -> dict[str, Any]:
        """Return the row to record for one provider."""
        case, own = problem.case, times[provider.name]
        moved, flops = problem.moved_bytes.get(case.passes), problem.flops.get(case.passes)
        rate = moved / own["p50"] / 1e6 if moved else None
        products = times.get("two_gemms")
        return {
            "op": case.op, "passes": case.passes, "shape": case.shape, "dtype": case.dtype, "provider": provider.name,
            "version": provider.package_version(), **own, **measured,
            "error": max(measured["errors"].values(), default=None),
            "gbps": rate and round(rate, 1), "roofline": rate and round(rate / self.common["copy_gbps"], 4),
            "tflops": round(flops / own["p50"] / 1e9, 3) if flops else None,
            "gemm_ratio": round(own["p50"] / products["p50"], 3) if products else None,
            "note": provider.note, **self.common,
        }


def prepare(provider: Provider, problem: Problem, truth: dict[str, torch.Tensor]) -> tuple[Run, dict[str, float]]:
    """Return a provider's call, warmed up, and its errors. Raises UnsupportedError with the reason if there is none."""
    try:
        run = provider.build(problem)
        found = errors(run.call(), truth)
        if (worst := max(found.values(), default=0.0)) > WRONG and not PRETENDS:
            raise RuntimeError(f"wrong results, by {worst:.0%} of the largest value")
    except UnsupportedError:
        raise
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise UnsupportedError("out of memory") from error
    except Exception as error:
        reason = "not installed" if isinstance(error, ImportError) else f"failed: {type(error).__name__}: {error}"
        raise UnsupportedError(reason.strip()[:300]) from error
    return run, found


ALL_PROVIDERS = list(dict.fromkeys(provider.name for _, providers in PROBLEMS.values() for provider in providers))


@click.command()
@options.DEVICE
@click.option("--ops", callback=options.names(PROBLEMS), help=f"Of {', '.join(PROBLEMS)}.")
@click.option("--providers", callback=options.names(ALL_PROVIDERS), help="Such as trl_chunked,dense; all by default.")
@click.option("--shapes", type=click.Choice(list(SHAPES)), help="full on a card, small on the CPU.")
@click.option("--dtype", "dtypes", callback=options.names(DTYPES), help="bfloat16 on a card, both on the CPU.")
@options.THREADS
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=2), help="Fewest on the CPU.")
@options.output("kernels")
def main(
    device: str | None, ops: list[str], providers: list[str], shapes: str | None, dtypes: list[str], threads: int,
    rounds: int, output: Path,
) -> None:
    """Measure the kernels and append rows."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    warnings.simplefilter("ignore")  # those of peers and compilers would stand between the tables
    torch.set_num_threads(threads)
    clock, failures = Clock(device, rounds), list[str]()
    common = machine(PACKAGES) | {"run": run_now(), "device": device, "threads": threads,
                                  "copy_gbps": round(copy_bandwidth(clock) / 1e9, 2)}
    console.print(f"{common['gpu'] or common['cpu']}, copies at {common['copy_gbps']} GB/s, rows to {output}")
    bench = Bench(clock, providers, output, common, failures)
    default = ["bfloat16"] if device == "cuda" else ["float32", "bfloat16"]
    shapes = shapes or ("full" if device == "cuda" else "small")
    for case in (Case(op, passes, shape, dtype, device) for op in ops or PROBLEMS for each, shape in SHAPES[shapes][op]
                 for dtype in dtypes or default for passes in each):
        bench.measure(case)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    if failures:
        click.echo("\n".join([f"{len(failures)} of our own failed:", *failures]), err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
