"""What new tokens mean, and where a run learns it: in their rows, or in LoRA. Embedded model, CPU.

    python -m bench.learning.new_tokens          # three seeds; finished runs in runs/new_tokens_bench are kept

For each seed it runs the recipe `new_tokens` as it is (also a row of recipe_runs.py), with LoRA as good as frozen, and
with the rows as good as frozen. It measures held-out problems with all that was trained, with the rows as they were
before training, and without LoRA. Each run leaves a row in bench/results/new_tokens.jsonl.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch

from bench.common.rows import RESULTS, append_row, machine
from bench.learning.recipe_runs import run_recipe

RUNS = {"both": [], "rows": ["learning_rate=1e-12", "lora_rank=1"], "lora": ["embedding_learning_rate=1e-12"]}
PARTS = {"trained": "", "without_rows": "trainable_tokens_delta", "without_lora": "lora_B"}  # and what is reset
PROBLEMS, TIME_LIMIT = 256, 3600.0


def learned(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run the recipe, unless it has finished; return accuracies on held-out problems."""
    place = folder / f"{name}-{seed}"
    told = place / "summary.json"
    if not told.is_file() or json.loads(told.read_text())["status"] != "finished":
        row = run_recipe("new_tokens", place, [f"seed={seed}", *RUNS[name]], TIME_LIMIT)
        if "missing" in row:
            raise SystemExit(f"{name}, seed {seed}: {row['missing']}")
        if name == "both":
            append_row(RESULTS / "recipe_runs.jsonl", row | machine())
    summary = json.loads(told.read_text())
    kept = ("accuracy_before", "accuracy_after_sft", "accuracy_after", "train_seconds", "steps", "sft_steps")
    return {key: summary[key] for key in kept} | dict(measured(place / "adapter", seed))


def measured(adapter: Path, seed: int) -> Iterator[tuple[str, float]]:
    """Yield the accuracies of an adapter, and of what is left of it, with temperature 1 and without sampling."""
    from lowmem_grpo import FastLanguageModel, SamplingParams
    from lowmem_grpo.recipes.new_tokens import EXAM
    from lowmem_grpo.rollout.assessment import answer, rows_of

    rows = rows_of(EXAM.problems_of("tiny")(PROBLEMS, seed, None), None)
    for name, reset in PARTS.items():
        model, _ = FastLanguageModel.from_pretrained(str(adapter), load_in_4bit=False)
        first = model.get_input_embeddings().token_adapter.trainable_tokens_original["default"]
        for path, parameter in model.named_parameters():
            if reset and reset in path:
                parameter.data.copy_(torch.zeros_like(parameter) if "lora" in reset else first)
        for temperature in (1.0, 0.0):
            params = SamplingParams(temperature=temperature, max_tokens=64, seed=seed)
            found = answer(model, rows, [EXAM.right], params, model.current_lora(), PROBLEMS)
            yield f"{name}/{'sampled' if temperature else 'greedy'}", found.accuracy


@click.command(help=__doc__)
@click.option("--seed", "seeds", type=int, multiple=True, default=(0, 1, 2), show_default=True)
@click.option("--run", "names", type=click.Choice([*RUNS]), multiple=True, help="Only this run; may be repeated.")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs/new_tokens_bench"), show_default=True)
def main(seeds: tuple[int, ...], names: tuple[str, ...], runs: Path) -> None:
    for name in names or RUNS:
        for seed in seeds:
            row = {"run": name, "seed": seed} | learned(name, seed, runs)
            append_row(RESULTS / "new_tokens.jsonl", row | machine())
            click.echo(f"{name}, seed {seed}: " + ", ".join(
                f"{key} {value:.1%}" for key, value in row.items() if "/" in key or key.startswith("accuracy")))


if __name__ == "__main__":
    main()
