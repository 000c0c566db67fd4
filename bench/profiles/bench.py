"""Where the time of a training step and of decoding goes: kernels, idle times, copies beside kernels.

    python -m bench.profiles.bench                        the 8B shape on the card if there is one, else a tiny one
    python -m bench.profiles.bench --device cpu --part train  the CPU's ops instead of kernels
    python -m bench.profiles.bench --trace                also keep torch's traces, for chrome://tracing or Perfetto
    python -m bench.profiles.bench --read trace.json.gz --steps 64  only reads a trace that was kept

Each part leaves a page and its numbers (`.md`, `.json`) in --output. On a card the profiler slows the host down a
little, so idle times are somewhat longer than without it.
"""

import gc
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from gzip import open as open_packed
from pathlib import Path
from typing import Any

import click

from bench.common import child
from bench.common import options as shared
from bench.common.model_folder import model_folder
from bench.common.rows import machine
from bench.gate import pretend
from bench.loop.shapes import loop_shape
from bench.profiles.page import page, show
from bench.profiles.reader import events_of, ops_as_kernels, read_trace
from bench.profiles.timeline import KERNEL, Summary, summarize

BENCH = Path(__file__).resolve().parents[1]
RESULTS = BENCH / "results" / "profiles"
PARTS = ("train", "decode")
TITLES = {"train": "A training step", "decode": "Decoding"}
NO_KERNELS = "The profiler saw no kernel of the device, so this shows the CPU's ops and nothing of the device."


def summary_of(path: Path, steps: int, device: str) -> tuple[Summary, bool]:
    """A trace in numbers, and whether they are of the CPU's ops."""
    events = events_of(read_trace(path))
    of_ops = device == "cpu" or not any(event.kind == KERNEL for event in events)
    return summarize(ops_as_kernels(events) if of_ops else events, steps), of_ops


def keep(name: str, title: str, row: dict[str, Any], summary: Summary, of_ops: bool, output: Path) -> None:
    """Show a part and write its page and its numbers."""
    if of_ops and row["device"] != "cpu":
        row |= {"note": NO_KERNELS}
        click.echo(NO_KERNELS)
    show(title, summary, of_ops)
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{name}.md").write_text(page(title, row, summary, of_ops))
    numbers = asdict(summary) | {"idle_share": summary.idle_share, "copy_overlap": summary.copy_overlap}
    (output / f"{name}.json").write_text(json.dumps(row | {"of": "ops" if of_ops else "kernels"} | numbers, indent=1))
    click.echo(f"{output / name}.md")


def look(part: str, folder: Path, options: dict[str, Any], row: dict[str, Any]) -> None:
    """Run one part under the profiler and keep what it showed."""
    from bench.profiles.steps import DECODED, decode_job, recorded, train_job

    os.environ.update(child.SETTINGS | pretend.environment(row["gpu"]))  # before vLLM is imported or memory asked for
    size = loop_shape(options["shape"], options["prompts"])
    given = {"tokens": options["tokens"] or DECODED[options["shape"]]} if part == "decode" else {}
    make = decode_job if part == "decode" else train_job
    with tempfile.TemporaryDirectory() as temporary:
        job = make(folder, size, options["device"], options["engine"], temporary, **given)
        trace = Path(temporary) / "trace.json"
        recorded(job, options["device"], trace)
        name = f"{part}_{options['shape']}_{options['device']}"
        summary, of_ops = summary_of(trace, job.steps, options["device"])
        shape = f"{size.sequences} x {size.context:,} tokens" if part == "train" else f"{size.sequences} sequences"
        keep(name, f"{TITLES[part]}: {options['shape']}, {shape}", row | job.settings, summary, of_ops,
             options["output"])
        if options["trace"]:
            pack(trace, options["output"] / f"{name}.trace.json.gz")


def pack(source: Path, target: Path) -> None:
    with source.open("rb") as plain, open_packed(target, "wb") as packed:
        shutil.copyfileobj(plain, packed)
    click.echo(f"{target}")


def look_at_all(parts: tuple[str, ...], options: dict[str, Any], where: dict[str, Any]) -> list[str]:
    """Profile every part, also where another one fails. Returns the parts that failed."""
    failed = []
    with model_folder(options["weights"], options["shape"], options["device"]) as folder:
        for part in parts:
            row = where | {"part": part, "device": options["device"], "shape": options["shape"]}
            try:
                look(part, folder, options, row)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is printed, and the other part runs
                click.echo(f"{part} is missing: {type(error).__name__}: {error}", err=True)
                if type(error).__name__ != "EngineUnavailableError":
                    failed.append(part)
            gc.collect()
    return failed


@click.command()
@shared.DEVICE
@shared.SHAPE
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="By default both.")
@click.option("--engine", type=click.Choice(["vllm", "transformers"]), default="vllm", show_default=True,
              help="The engine that decodes.")
@shared.PROMPTS
@click.option("--tokens", type=click.IntRange(min=2), help="Decoded of each completion; by default 64, with tiny 8.")
@shared.WEIGHTS
@click.option("--trace", is_flag=True, help="Keep torch's trace of each part, packed.")
@click.option("--read", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Only summarize this trace.")
@click.option("--steps", default=1, show_default=True, type=click.IntRange(min=1), help="With --read: steps in it.")
@click.option("--output", default=RESULTS, type=click.Path(file_okay=False, path_type=Path), show_default=True)
def main(
    device: str | None, shape: str | None, parts: tuple[str, ...], engine: str, prompts: int, tokens: int | None,
    weights: Path | None, trace: bool, read: Path | None, steps: int, output: Path,
) -> None:
    """Profile a training step and decoding, and write what took the time."""
    where = machine()
    device, shape = shared.place(device, shape, where["gpu"])
    if read is not None:
        name = read.name.partition(".")[0]
        try:
            summary, of_ops = summary_of(read, steps, "any")
        except (ValueError, OSError) as error:
            raise click.ClickException(f"{read} cannot be read: {error}") from None
        keep(f"{name}_read", f"Trace {read.name}", where | {"device": device}, summary, of_ops, output)
        return
    options = {"device": device, "shape": shape, "engine": engine, "prompts": prompts, "tokens": tokens,
               "weights": weights, "trace": trace, "output": output}
    if failed := look_at_all(parts or PARTS, options, where):
        raise click.ClickException(f"{', '.join(failed)} failed; see above")


if __name__ == "__main__":
    main()
