"""Measure a step of the whole GRPO loop at full size: time by phase, and memory; ours beside TRL and Unsloth.

    python -m bench.loop.bench                  8B, random weights, prompts of 1,024 tokens, 8 completions of 4,096
    python -m bench.loop.bench --device cpu     a tiny one on the CPU, within minutes

Each provider runs in a separate process, and in its own environment if there is one. A provider that cannot run here is
named with the reason.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click

from bench.common import child, options, tables
from bench.common.model_folder import model_folder
from bench.common.rows import machine, newest, run_now
from bench.common.targets import BELOW_ONE, OURS, ByProvider, Goal, Row, judged, section
from bench.gate import pretend
from bench.loop.inputs import loop_shape
from lowmem_grpo.utils import GIB

KEPT = ("planned", "trained", "config")  # fields of a result that the row copies
PEAKS = ("allocated_bytes", "used_bytes", "host_bytes")
PROVIDERS = (OURS, "lowmem_grpo_transformers", "lowmem_grpo_16bit", "trl", "trl_nf4", "trl_transformers", "unsloth")


def run(provider: str, folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Run a provider in a separate process; return its measures, or why there are none (`missing`). `given` are the
    options that all providers of one call share, and the card's name (`gpu`)."""
    passed = {name: given[name] for name in ("shape", "device", "prompts", "steps", "gib", "time_limit")}
    peer = {"batch": given["peer_batch"]} if tables.is_peer(provider) else {}
    return child.call("bench.loop.provider:run", {"provider": provider, "folder": folder, **passed, **peer}, bool(peer),
                      seconds=given["time_limit"], python=given.get(f"{provider.partition('_')[0]}_python"),
                      settings=pretend.environment(given["gpu"]) | {"OMP_NUM_THREADS": str(given["threads"])})


def combined(steps: list[dict[str, dict[str, float]]], measure: str, combine: Callable[..., float]) -> dict[str, float]:
    """Return one number per phase, combined over the timed steps."""
    names = {name: None for step in steps for name in step.get(measure, {})}
    return {name: combine(step[measure].get(name, 0) for step in steps) for name in names}


def row_of(provider: str, found: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    """Return a provider's row: seconds, shares, tokens a second, peaks; or why it is missing."""
    row = {"provider": provider, **common, "versions": common["versions"] | found.get("versions", {})}
    if "missing" in found:
        return row | {"missing": found["missing"]}
    steps, tokens = found["steps"], median(found["tokens"])
    phases = combined(steps, "seconds", median)
    whole = [sum(step["seconds"].values()) for step in steps]
    peaks = {name: combined(steps, name, max) for name in PEAKS}
    trained = tokens + common["sequences"] * common["prompt_tokens"]  # prompts too
    speeds = {"step": tokens / median(whole), **{name: count / phases[name] for name, count in (
        ("generate", tokens), ("train", trained)) if phases.get(name)}}
    return row | {
        "seconds": round(median(whole), 4), "step_seconds": [round(value, 4) for value in whole],
        "phases": {name: round(value, 4) for name, value in phases.items()},
        "shares": {name: round(value / sum(phases.values()), 4) for name, value in phases.items()},
        "warm_up": found["warm_up"], "tokens": tokens,
        "tokens_per_second": {name: round(value, 2) for name, value in speeds.items()},
        **{name: value for name, value in peaks.items() if value},
        **{name: found[name] for name in KEPT if name in found},
    }


# The targets against peers, and the section of bench/RESULTS.md


PEERS = ("trl", "trl_nf4", "unsloth")  # whose loops have vLLM too
PHASES = ("generate", "switch", "score", "train", "optimizer", "rest")  # in the order of the table
CASE = ("shape", "prompts", "gib", "provider", "device", "gpu", "cpu", "cores", "threads")


def beside(peer: str, ours: str = OURS, memory: bool = False, shape: str = "full") -> Goal:
    """Return the goal for our figure divided by a peer's: seconds of a step, or the peak in use on the card. The shape
    3b is for any card."""
    def measure(row: Row) -> float:
        return float(max(row["used_bytes"].values()) if memory else row["seconds"])

    def ratio(run: ByProvider) -> float:
        return measure(run[ours]) / measure(run[peer])

    demand = "memory in use: at most" if memory else "seconds of a step: below"
    return Goal(f"loop, {shape}, {ours}", f"{demand} 1 x {peer}", 1.0 if memory else BELOW_ONE, ratio,
                lambda value, run: f"{value:.3g} x", {"device": "cuda", "shape": shape}, any_card=shape == "3b")


GOALS = [beside(peer, memory=memory, shape=shape) for shape in ("3b", "full") for peer in PEERS
         for memory in (False, True)]
GOALS.append(beside("trl_transformers", ours=f"{OURS}_transformers"))  # without vLLM only the time is compared


def case_of(row: Row) -> str:
    """Return the sequences and their lengths, and the limit of the card's memory."""
    cap = f", {row['gib']:g} GiB" if row["gib"] else ""
    return (f"{row['shape']}: {row['prompts']} x {row['generations']} x {row['completion_tokens']:,} tokens after "
            f"{row['prompt_tokens']:,}{cap}")


def peak(name: str, *phases: str) -> tables.Figure:
    """Return the figure of a row's most bytes, of all phases or of these, in GiB."""
    def most(row: Row) -> str:
        sizes = [size for phase, size in (row.get(name) or {}).items() if not phases or phase in phases]
        return f"{max(sizes) / GIB:.2f}" if sizes else ""

    return most


COLUMNS: tables.Columns = {
    "case": case_of, "provider": "provider", "s / step": ("seconds", ".2f"),
    **{phase: lambda row, phase=phase: f"{row['shares'].get(phase, 0):.1%}" for phase in PHASES},
    **{name: lambda row, kind=kind: tables.number(row["tokens_per_second"], kind, ".0f")
       for name, kind in (("tokens/s", "step"), ("sampling", "generate"), ("training", "train"))},
    "peak on the card, GiB": peak("used_bytes"), "on the host, GiB": peak("host_bytes"),
    "planned, GiB": peak("planned", "rollout_bytes", "train_bytes"),  # the larger of both phases
    "machine": lambda row: row["gpu"] if row["device"] == "cuda" else f"{row['cpu']}, {row['threads']} threads",
    "commit": "commit",
}


def loop_table(rows: list[Row]) -> list[str]:
    """Return the section with the newest row of each provider, case and machine, then the targets."""
    lines = [
        "", "## A step of the whole loop: time by phase, and peaks", "",
        "Llama-3.1-8B's shape with random weights. `switch` is sleeping, waking, and updating the sampler's weights. "
        "The peak on the card is all memory in use there; a CPU has none.", "",
        *tables.page(newest(rows, *CASE).values(), COLUMNS),
    ]
    return lines + section("The whole loop: the targets", judged(GOALS, rows))


@click.command()
@options.DEVICE
@options.SHAPE
@click.option("--provider", "names", multiple=True, type=click.Choice(PROVIDERS), help="By default all.")
@options.PROMPTS
@click.option("--steps", default=3, show_default=True, type=click.IntRange(min=1), help="Timed, after one to warm up.")
@click.option("--gib", type=click.FloatRange(min=0, min_open=True), help="On a card: the memory that torch may use.")
@click.option("--peer-batch", default=1, show_default=True, type=click.IntRange(min=1),
              help="Completions of a peer's micro-batch; ours are planned.")
@click.option("--trl-python", help="Interpreter with TRL 1.16.0; by default this one.")
@click.option("--unsloth-python", help="Interpreter with Unsloth; by default this one.")
@options.THREADS
@click.option("--time-limit", default=540.0, show_default=True, type=click.FloatRange(min=1),
              help="Seconds for one provider, which makes as many steps as fit; the first is untimed if possible.")
@options.WEIGHTS
@options.RUN
@options.output("loop")
def main(names: tuple[str, ...], weights: Path | None, run_name: str | None, output: Path, **given: Any) -> None:
    """Measure steps of the whole loop and append rows."""
    where = machine()  # first, so that the commit is the one at the start of the run
    given["gpu"] = where["gpu"]
    given["device"], given["shape"] = options.place(given["device"], given["shape"], where["gpu"])
    size = loop_shape(given["shape"], given["prompts"])
    common = where | {name: given[name] for name in ("device", "shape", "gib", "prompts", "steps", "threads")} | {
        "run": run_name or run_now(), "generations": size.n, "sequences": size.sequences,
        "prompt_tokens": size.prompt_tokens, "completion_tokens": size.completion_tokens}
    with model_folder(weights, given["shape"], given["device"]) as folder:
        tables.measure_each(names or PROVIDERS, lambda name: run(name, folder, given),
                            lambda name, found: row_of(name, found, common), COLUMNS, output)


if __name__ == "__main__":
    main()
