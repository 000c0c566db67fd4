"""Make the learner of bench/learner/bench.py: a model trained from scratch that knows both tasks and makes mistakes.

    python -m bench.learner.pretrain --size full --device cuda --seconds 180 --out DIR

It is a process of its own, so that the card is free afterwards. DIR holds the model and `lesson.json`: the settings it
was made with, and what training gave. A folder with the same settings is left as it is.
"""

import json
import os
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from bench.gate.pretend import is_pretend
from bench.learner.lessons import answer_of, lessons, sample_texts
from bench.learner.sizes import LESSON, SIZES, Size, read_lesson, settings
from bench.tiny_models.from_scratch import Batch, batches, describe, make_model, make_tokenizer, train

WORKERS = 12  # processes that write demonstrations beside a card, at most


class Demonstrations(IterableDataset[Batch]):
    """Endless batches; each worker process has a stream of its own."""

    def __init__(self, tokenizer: Any, size: int, seed: int) -> None:
        self.tokenizer, self.size, self.seed = tokenizer, size, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        stream = f"{self.seed}-{worker.id if worker else 0}"
        rng = random.Random(f"mistakes-{stream}")
        return batches(self.tokenizer, lessons(stream), lambda problem: answer_of(problem, rng), self.size)


def teach(size: Size, device: str, seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """Tokenizer, model and training; both are written to a folder."""
    if device == "cuda" and is_pretend(torch.cuda.get_device_name(0)):
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN does not start there
    tokenizer = make_tokenizer(sample_texts(seed), size.shape["vocab_size"])
    model = make_model(tokenizer, seed, size.shape).to(device)
    workers = min(WORKERS, max(1, (os.cpu_count() or 2) - 2)) if device == "cuda" else 0
    data = DataLoader(Demonstrations(tokenizer, size.batch, seed), batch_size=None, num_workers=workers)
    done = train(model, iter(data), size.steps, size.learning_rate, seconds)
    model.to("cpu").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return describe(model) | {"pretrain": asdict(done) | {"device": device, "examples": done.steps * size.batch}}


@click.command(help=__doc__)
@click.option("--size", type=click.Choice(list(SIZES)), default="full", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda", show_default=True)
@click.option("--seconds", default=180.0, show_default=True, type=click.FloatRange(min=1), help="Of training, at most.")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
def main(size: str, device: str, seconds: float, seed: int, out: Path) -> None:
    """Make the model, unless it is there."""
    wanted = settings(size, seconds, seed)
    if read_lesson(out, wanted):
        click.echo(f"{out} holds this model already")
        return
    (out / LESSON).unlink(missing_ok=True)  # of another model, which is about to be replaced
    out.mkdir(parents=True, exist_ok=True)
    found = teach(SIZES[size], device, seconds, seed, out)
    (out / LESSON).write_text(json.dumps({"settings": wanted, **found}, indent=2))
    trained = found["pretrain"]
    click.echo(f"{found['parameters']:,} parameters, {trained['steps']} steps in {trained['seconds']:.0f} s, "
               f"loss {trained['first_loss']:.3f} -> {trained['last_loss']:.3f}")


if __name__ == "__main__":
    main()
