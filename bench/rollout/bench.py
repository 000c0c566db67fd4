"""Compare rollouts of our engines with those of vLLM on its own weights: speed, memory, agreement with the trainer.

    python -m bench.rollout.bench                   the 8B shape on the card if there is one, else a tiny one

First a model with random weights and an adapter are written to a folder. Each provider then samples from them in a
separate process. Providers that are not installed are named and left out.
"""

from pathlib import Path
from statistics import median
from typing import Any

import click

from bench.common import child, options, tables
from bench.common.model_folder import model_folder
from bench.common.rows import machine, percentiles, run_now
from bench.common.targets import OURS
from bench.rollout.section import BF16, BNB, COLUMNS, EAGER, FP8_CACHE
from bench.rollout.shapes import SHAPES

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


@click.command()
@options.DEVICE
@options.SHAPE
@click.option("--provider", "names", multiple=True, type=click.Choice(PROVIDERS), help="By default all.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=2), help="Timed calls of each.")
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
