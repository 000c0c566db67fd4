"""How many completions reach which accuracy: GRPO, and the recipes whose teacher is the point. Embedded model, CPU.

    python -m bench.learning.distillation            # three seeds; finished runs in runs/distillation are kept
    python -m bench.learning.distillation --report   # only draw docs/distillation.svg from the rows

For each seed it runs `arithmetic` (the teacher of `distill`), `distill` and `self_distill`, and measures checkpoints on
held-out problems at temperature 1. Each run leaves a row in bench/results/distillation.jsonl.
"""

import json
from pathlib import Path
from typing import Any

import click

from bench.common.pictures import panels, save
from bench.common.rows import RESULTS, append_row, machine, newest, read_rows
from bench.learning.recipe_runs import run_recipe
from lowmem_grpo.runs.saved_adapter import list_checkpoints

ROWS, PICTURE = RESULTS / "distillation.jsonl", Path(__file__).parents[2] / "docs" / "distillation.svg"
LABELS = {"arithmetic": "GRPO (arithmetic)", "distill": "distill: an adapter as teacher",
          "self_distill": "self_distill: worked solutions"}
SAVED = {"arithmetic": 3, "distill": 4, "self_distill": 4}  # steps between checkpoints
PROBLEMS, TIME_LIMIT = 256, 1800.0  # held-out problems of a checkpoint; seconds of a run


def run(recipe: str, seed: int, folder: Path) -> Path:
    """Run a recipe with all checkpoints, unless it has finished; return its folder. The row of a recipe with a teacher
    is also one of recipe_runs.py."""
    place = folder / f"{recipe}-{seed}"
    if not (place / "adapter").is_dir():
        words = [f"seed={seed}", f"save_steps={SAVED[recipe]}", "save_total_limit=100"]
        teacher = [f"teacher={folder / f'arithmetic-{seed}'}"] if recipe == "distill" else []
        row = run_recipe(recipe, place, [*words, *teacher], TIME_LIMIT)
        if "missing" in row:
            raise SystemExit(f"{recipe}, seed {seed}: {row['missing']}")
        if recipe != "arithmetic":
            append_row(RESULTS / "recipe_runs.jsonl", row | machine())
    return place


def curve(place: Path, seed: int) -> dict[str, Any]:
    """Return the accuracy on held-out problems before training and at each checkpoint, with the completions until
    then."""
    from lowmem_grpo import FastLanguageModel, SamplingParams
    from lowmem_grpo.recipes.proximity import RIGHT, STEPS, make_dataset
    from lowmem_grpo.rollout.assessment import answer, rows_of

    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    taken = [line["completions/total"] for line in lines if "completions/total" in line]
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=16, lora_alpha=32)
    rows = rows_of(make_dataset("test", PROBLEMS, seed, STEPS), None)
    params = SamplingParams(temperature=1.0, max_tokens=64, seed=seed)
    found: dict[str, Any] = {"completions": [], "accuracy": []}
    for checkpoint in [None, *list_checkpoints(place)]:
        adapter = None if checkpoint is None else model.load_lora(str(checkpoint))
        made = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
        found["completions"].append(int(sum(taken[:made])))
        found["accuracy"].append(answer(model, rows, [RIGHT], params, adapter, PROBLEMS).accuracy)
    summary = json.loads((place / "summary.json").read_text())
    return found | {name: summary.get(name) for name in ("accuracy_before", "accuracy_after", "train_seconds", "steps")}


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw the accuracy over the completions that were sampled, a line for each run."""
    figure, (axis,) = panels(1, 7.4, 3.6)
    axis.set_prop_cycle(None)
    for colour, (recipe, label) in enumerate(LABELS.items()):
        for row in (row for row in rows if row["recipe"] == recipe):
            axis.plot(row["completions"], row["accuracy"], color=f"C{colour}", linewidth=1.5, marker=".", label=label)
            label = "_"  # one entry for each recipe in the legend
    axis.set(xlabel="completions sampled in training", ylabel="accuracy, held-out", ylim=(0.3, 1), xlim=(0, 6000))
    axis.axhline(0.9, linewidth=0.8, color="grey", linestyle=":")
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.legend(fontsize=9, loc="lower right")
    save(figure, PICTURE)


def to_reach(row: dict[str, Any], accuracy: float = 0.9) -> int | None:
    """Return the completions at the first checkpoint with this accuracy; None if there is none."""
    return next((made for made, right in zip(row["completions"], row["accuracy"], strict=True) if right >= accuracy),
                None)


@click.command(help=__doc__)
@click.option("--seed", "seeds", type=int, multiple=True, default=(0, 1, 2), show_default=True)
@click.option("--recipe", "recipes", multiple=True, help="Only this recipe; may be repeated.")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs/distillation"), show_default=True)
@click.option("--report", is_flag=True, help="Only draw the picture from the rows.")
def main(seeds: tuple[int, ...], recipes: tuple[str, ...], runs: Path, report: bool) -> None:
    for recipe in () if report else recipes or LABELS:
        for seed in seeds:
            append_row(ROWS, {"recipe": recipe, "seed": seed} | curve(run(recipe, seed, runs), seed) | machine())
    rows = list(newest(read_rows(ROWS), "recipe", "seed").values())
    for row in rows:
        click.echo(f"{row['recipe']}, seed {row['seed']}: 90% after {to_reach(row)} completions, "
                   f"{row['accuracy_after']:.1%} at the end")
    draw(rows)


if __name__ == "__main__":
    main()
