"""Compare rollouts of our engines with those of vLLM on its own weights: speed, memory, agreement with the trainer.

    python -m bench.rollout.bench                   the 8B shape on the card if there is one, else a tiny one

First a model with random weights and an adapter are written to a folder. Each provider then samples from them in a
separate process. Providers that are not installed are named and left out.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click

from bench.common import child, options, tables
from bench.common.model_folder import model_folder
from bench.common.rows import machine, newest, percentiles, run_now
from bench.common.targets import OURS, ByProvider, Goal, judged, section
from bench.rollout.shapes import SHAPES
from lowmem_grpo.utils import MIB

BNB, BF16 = "vllm_bnb_lora", "vllm_bf16_lora"
EAGER = "lowmem_grpo_eager"  # ours without CUDA graphs
FP8_CACHE = "lowmem_grpo_fp8_cache"  # ours with a KV cache in 8 bits
PROVIDERS = (OURS, EAGER, BNB, BF16, "transformers", "transformers_eager", FP8_CACHE)
PACKAGES = ("lowmem-grpo", "torch", "triton", "transformers")


def row_of(provider: str, found: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    """Return the row to record for one provider: tokens per second, bytes, agreement; or why it is missing."""
    row = {"provider": provider, **common, "versions": common["versions"] | found.get("versions", {})}
    if "missing" in found:
        return row | {"missing": found["missing"]}
    speeds = percentiles([found["tokens"] / seconds for seconds in found["seconds"]])
    names = ("tokens", "trainer_bytes", "added_bytes", "kv_bytes", "used_bytes", "parity_mean", "parity_max",
             "importance_ratio", "sleep_freed_bytes", "sleep_ms", "wake_ms")
    sync = {"sync_ms": round(median(found["sync_ms"]), 4)} if "sync_ms" in found else {}
    return row | speeds | {name: found[name] for name in names if name in found} | sync


# The targets, and the section of bench/RESULTS.md


def goal(
    demand: str, limit: float, value: Callable[[ByProvider], float], at_least: bool = False, device: str = "cuda",
    shape: str = "full",
) -> Goal:
    fields = {"device": device, "shape": shape}
    return Goal(f"rollout, {shape}", demand, limit, value, lambda value, run: f"{value:.4g}", fields, at_least)


def speedup(other: str) -> Callable[[ByProvider], float]:
    """Return the function of our tokens per second divided by another provider's."""
    return lambda run: run[OURS]["p50"] / run[other]["p50"]


def of_ours(name: str) -> Callable[[ByProvider], float]:
    return lambda run: run[OURS][name]


def added_share(run: ByProvider) -> float:
    """Return the bytes of weights that the engine adds, divided by those that it borrows."""
    return float(run[OURS]["added_bytes"] / run[OURS]["trainer_bytes"])


def alike(device: str, shape: str) -> list[Goal]:
    """Return the goals that hold on every machine."""
    return [
        goal("weights that vLLM adds, of the model's bytes: under 1%", 0.01, added_share, device=device, shape=shape),
        goal("sync after an optimizer step, ms: at most 1", 1.0, of_ours("sync_ms"), device=device, shape=shape),
        goal("importance ratio, distance from 1: at most 0.001", 0.001,
             lambda run: abs(run[OURS]["importance_ratio"] - 1), device=device, shape=shape),
    ]


GOALS = [
    goal(f"tokens/s at least 1.5 x {BNB}", 1.5, speedup(BNB), at_least=True),
    goal(f"tokens/s at least 1 x {BF16}", 1.0, speedup(BF16), at_least=True),
    goal("weights of rollout and training: at most 1.02 x one NF4 copy", 1.02, lambda run: 1 + added_share(run)),
    *alike("cuda", "full"),
    goal("sleep frees, of the key-value cache: at least 0.95", 0.95,
         lambda run: run[OURS]["sleep_freed_bytes"] / run[OURS]["kv_bytes"], at_least=True),
    goal("log-probabilities, mean difference: at most 0.003", 0.003, of_ours("parity_mean"), device="cpu",
         shape="tiny"),
    *alike("cpu", "tiny"),
]
CASE = ("shape", "provider", "device", "gpu", "cpu", "cores", "threads")
COLUMNS: tables.Columns = {
    "shape": lambda row: f"{row['shape']}: {row['sequences']} x {row['completion_tokens']}", "provider": "provider",
    "tokens/s p20": ("p20", ".0f"), "p50": ("p50", ".0f"), "p80": ("p80", ".0f"),
    "trainer's weights, MiB": ("trainer_bytes", ".2f", MIB), "added, MiB": ("added_bytes", ".2f", MIB),
    "KV cache, MiB": ("kv_bytes", ".2f", MIB), "parity mean": ("parity_mean", ".5f"), "max": ("parity_max", ".5f"),
    "sync, ms": ("sync_ms", ".4f"), "machine": lambda row: row["gpu"] or f"{row['cpu']}, {row['threads']} threads",
    "commit": "commit",
}


def rollout_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the section with the newest row of each provider, shape and machine, then the targets."""
    lines = ["", "## Rollouts: our engine on the trainer's NF4 weights and live LoRA, and vLLM with weights of its own",
             "", *tables.page(newest(rows, *CASE).values(), COLUMNS)]
    return lines + section("Rollouts: the targets", judged(GOALS, rows))


@click.command()
@options.DEVICE
@options.SHAPE
@click.option("--provider", "names", multiple=True, type=click.Choice(PROVIDERS), help="By default all.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Timed calls of each.")
@options.THREADS
@options.WEIGHTS
@options.RUN
@options.output("rollout")
@options.AS_JSON
def main(
    device: str | None, shape: str | None, names: tuple[str, ...], rounds: int, threads: int, weights: Path | None,
    run_name: str | None, output: Path, as_json: bool,
) -> None:
    """Measure rollouts and append rows."""
    common = machine(PACKAGES)  # first, so that the commit is the one at the start of the run
    device, shape = options.place(device, shape, common["gpu"])
    size, usual = SHAPES[shape], [name for name in PROVIDERS if device == "cuda" or not name.endswith("_eager")]
    common |= {"run": run_name or run_now(), "device": device, "shape": shape, "threads": threads,
               "sequences": size.sequences, "completion_tokens": size.completion_tokens,
               "prompt_tokens": size.prompt_tokens}
    with model_folder(weights, shape, device) as folder:
        given = {"folder": folder, "shape": shape, "device": device, "rounds": rounds}
        tables.measure_each(
            names or usual, lambda name: child.call(
                "bench.rollout.provider:run", given | {"what": name}, tables.is_peer(name),
                settings={"OMP_NUM_THREADS": str(threads)}),
            lambda name, found: row_of(name, found, common), COLUMNS, output, as_json)


if __name__ == "__main__":
    main()
