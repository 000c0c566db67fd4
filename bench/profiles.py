"""Profile a training step and decoding: kernels, idle times, and copies that overlap kernels.

    python -m bench.profiles                        the 8B shape on the card if there is one, else a tiny one

Each part writes a page and its numbers (`.md`, `.json`) in --output. On a card the profiler slows the host down a
little, so idle times are somewhat longer than without it.
"""

import gc
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch

from bench.common import child, options, tables
from bench.common.model_folder import model_folder
from bench.common.rows import RESULTS, machine
from bench.gate import pretend
from bench.loop.inputs import RandomModel, loop_shape
from bench.loop.ours import load
from bench.rollout.shapes import Shape
from lowmem_grpo import GRPOConfig, GRPOTrainer, SamplingParams
from lowmem_grpo.types import Rollout, RolloutGroup

PARTS = {"train": "A training step", "decode": "Decoding"}
WARM_UP, TOP, GAPS = 2, 15, 10  # calls before the one that is profiled; lines of the tables
DECODED = {"full": 64, "3b": 64, "tiny": 8}  # tokens of each completion in the decoding call
COPIES = ("Memcpy HtoD", "Memcpy DtoH")  # copies within the device count as kernels
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cuGraphLaunch", "cudaLaunchCooperativeKernel")
Span = tuple[float, float]  # begin and end, microseconds


def train_step(folder: Path, size: Shape, device: str, outputs: str) -> Callable[[], object]:
    """Return a function that makes one optimizer step on completions of full length. Nothing is sampled, so the engine
    is transformers, which costs nothing."""
    model = load(folder, device, RandomModel(size), "transformers")
    args = GRPOConfig(
        output_dir=outputs, max_steps=WARM_UP + 1, per_device_train_batch_size=size.n,
        gradient_accumulation_steps=size.prompts, num_generations=size.n, max_completion_length=size.completion_tokens,
        beta=0.0, disable_tqdm=True, save_strategy="no",
    )
    trainer = GRPOTrainer(model=model, reward_funcs=[unused], args=args, train_dataset=[{"prompt": "unused"}])
    groups = [RolloutGroup({}, random_ids(size.prompt_tokens, size), [
        Rollout(random_ids(size.completion_tokens, size), [-8.0] * size.completion_tokens, "length",
                reward=float(place), advantage=1.0 if place % 2 else -1.0) for place in range(size.n)
    ]) for _ in range(size.prompts)]

    def step() -> None:
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            rollout.policy_version = trainer.state.policy_version  # as if it had been sampled just now
        trainer.forward_backward(groups)
        trainer.optim_step()

    return step


def decoding(folder: Path, size: Shape, device: str, engine: str, tokens: int) -> Callable[[], object]:
    """Return a function that samples `tokens` tokens of each completion, one per decode step."""
    sampler = load(folder, device, RandomModel(size), engine).engine()
    prompts = [random_ids(size.prompt_tokens, size) for _ in range(size.prompts)]
    params = SamplingParams(n=size.n, max_tokens=tokens, seed=0, ignore_eos=True)
    return lambda: sampler.generate(prompts, params)


def unused(completions: list[Any], **columns: Any) -> list[float]:
    """Raise RuntimeError: nothing is sampled, so no reward may be computed."""
    raise RuntimeError("nothing is sampled here, so nothing is scored")


def random_ids(count: int, size: Shape) -> list[int]:
    return random.choices(range(3, size.config["vocab_size"]), k=count)


def recorded(work: Callable[[], object], device: str, trace: Path | None) -> Any:
    """Call `work` WARM_UP times, then once under torch's profiler; return its events, and write them to `trace`."""
    for _ in range(WARM_UP):
        work()
    on_card = device == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_card else [])]
    if on_card:
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=kinds) as profiler:
        work()
        if on_card:
            torch.cuda.synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
        click.echo(trace)
    return profiler.events()


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the union of the spans as spans that neither overlap nor touch, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Return the time that is covered by any of the spans."""
    return sum(end - begin for begin, end in union(spans))


def span(event: Any) -> Span:
    return event.time_range.start, event.time_range.end


def summarize(events: Iterable[Any], steps: int) -> dict[str, Any]:
    """Return the figures of a profile: milliseconds, and counts over all `steps`. If the device recorded no kernels,
    they are figures of the CPU's ops."""
    kept = [event for event in events if not getattr(event, "is_user_annotation", False)]
    host = [event for event in kept if event.device_type == torch.autograd.DeviceType.CPU]
    device = [event for event in kept if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [span(event) for event in device if event.name.startswith(COPIES)]
    work = [event for event in device if not event.name.startswith(COPIES)] or host
    spans = [span(event) for event in work]
    busy, whole = union(spans), sum(own_time(event) for event in work)
    took, calls = Counter[str](), Counter[str](event.name for event in work)
    for event in work:
        took[event.name] += own_time(event)
    gaps = sorted(((after[0] - before[1], before[1]) for before, after in pairwise(busy)), reverse=True)[:GAPS]
    extent = busy[-1][1] - busy[0][0] if busy else 0.0
    return {
        "of": "ops" if work is host else "kernels", "steps": steps, "span_ms": extent / 1e3,
        "busy_ms": length(spans) / 1e3, "idle_share": 1 - length(spans) / extent if extent else 0.0, "count": len(work),
        "launches": sum(event.name.startswith(LAUNCHES) for event in host), "copy_ms": length(copies) / 1e3,
        "overlapped_ms": (length(copies) + length(spans) - length([*copies, *spans])) / 1e3,
        "top": [{"name": name, "calls": calls[name], "ms": time / 1e3, "share": time / whole if whole else 0.0}
                for name, time in took.most_common(TOP)],
        "gaps": [{"ms": long / 1e3, "during": running(host, (start, start + long))} for long, start in gaps],
    }


def own_time(event: Any) -> float:
    """Return the microseconds of an event, without those of the events that it called."""
    on_host = event.device_type == torch.autograd.DeviceType.CPU
    return float(event.self_cpu_time_total if on_host else event.time_range.elapsed_us())


def running(host: list[Any], gap: Span) -> str:
    """Return the host's op that covers most of a gap; of several that cover as much, the innermost."""
    def covers(event: Any) -> tuple[float, float]:
        begin, end = span(event)
        return min(end, gap[1]) - max(begin, gap[0]), begin - end

    best = max(host, key=covers, default=None)
    return str(best.name) if best is not None and covers(best)[0] > 0 else ""


def page(title: str, row: dict[str, Any]) -> str:
    """Return a profile as Markdown, with the machine on which it was made."""
    facts = [(name, f"{row[name]:,.3f}" if isinstance(row[name], float) else str(row[name])) for name in (
        "of", "steps", "span_ms", "busy_ms", "idle_share", "count", "launches", "copy_ms", "overlapped_ms")]
    top = ([f"`{one['name'].replace('|', '/')[:90]}`", str(one["calls"]), f"{one['ms']:.3f}", f"{one['share']:.1%}"]
           for one in row["top"])
    gaps = ([f"{one['ms']:.3f}", one["during"][:90]] for one in row["gaps"])
    where = row["gpu"] if row["device"] == "cuda" else row["cpu"]
    lines = [f"# {title}", "", f"{where}; commit {row['commit']}, {row['date']}; torch {row['versions'].get('torch')}."]
    for columns, cells in ((("", ""), facts), (("most time", "calls", "ms", "share"), top),
                           (("longest idle times, ms", "the CPU ran"), gaps)):
        lines += ["", *tables.markdown(columns, cells)]
    return "\n".join(lines) + "\n"


def profile(part: str, folder: Path, given: dict[str, Any], where: dict[str, Any]) -> None:
    """Profile one part; write its page and its numbers."""
    os.environ.update(child.SETTINGS | pretend.environment(where["gpu"]))  # before vLLM is imported
    device, shape, output = given["device"], given["shape"], given["output"]
    size, tokens = loop_shape(shape, given["prompts"]), given["tokens"] or DECODED[shape]
    file = output / f"{part}_{shape}_{device}"
    output.mkdir(parents=True, exist_ok=True)
    random.seed(0)
    with tempfile.TemporaryDirectory() as outputs:
        work = (train_step(folder, size, device, outputs) if part == "train"
                else decoding(folder, size, device, given["engine"], tokens))
        events = recorded(work, device, Path(f"{file}.trace.json.gz") if given["trace"] else None)
    row = where | {"part": part, "device": device, "shape": shape, "engine": given["engine"],
                   "sequences": size.sequences, "context": size.context,
                   **summarize(events, 1 if part == "train" else tokens)}
    text = page(f"{PARTS[part]}: {shape}, {size.sequences} sequences of {size.context:,} tokens", row)
    Path(f"{file}.md").write_text(text)
    Path(f"{file}.json").write_text(json.dumps(row, indent=1))
    click.echo(f"{text}\n{file}.md")


@click.command(help=__doc__)
@options.DEVICE
@options.SHAPE
@click.option("--part", "parts", multiple=True, type=click.Choice(list(PARTS)), help="By default both.")
@click.option("--engine", type=click.Choice(["vllm", "transformers"]), default="vllm", show_default=True,
              help="The engine that decodes.")
@options.PROMPTS
@click.option("--tokens", type=click.IntRange(min=2), help="Decoded of each completion; by default 64, with tiny 8.")
@options.WEIGHTS
@click.option("--trace", is_flag=True, help="Keep torch's trace of each part, packed.")
@click.option("--output", default=RESULTS / "profiles", type=click.Path(file_okay=False, path_type=Path))
def main(parts: tuple[str, ...], weights: Path | None, **given: Any) -> None:
    where, failed = machine(), []
    given["device"], given["shape"] = options.place(given["device"], given["shape"], where["gpu"])
    with model_folder(weights, given["shape"], given["device"]) as folder:
        for part in parts or PARTS:
            try:
                profile(part, folder, given, where)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is printed, and the other part runs
                click.echo(f"{part} is missing: {type(error).__name__}: {error}", err=True)
                failed += [part] if type(error).__name__ != "EngineUnavailableError" else []
            gc.collect()
    if failed:
        raise click.ClickException(f"{', '.join(failed)} failed; see above")


if __name__ == "__main__":
    main()
