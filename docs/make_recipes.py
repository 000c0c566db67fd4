"""Write docs/recipes.md, and the picture docs/recipes/NAME.svg of every recipe in which a model learned.

    python docs/make_recipes.py

The words come from recipe_words.toml and recipe_page.toml, options and presets from the recipes, memory on cards from
the planner, and measured figures from the rows of bench/learning/recipe_runs.py.
"""

import ast
import inspect
import json
import math
import re
import textwrap
import tomllib
from collections import Counter
from dataclasses import MISSING, fields, replace
from importlib import import_module
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.memory.cards import device
from lowmem_grpo.memory.families import family_of
from lowmem_grpo.memory.model_shape import named_config
from lowmem_grpo.memory.plan import RunSettings
from lowmem_grpo.memory.planner import plan
from lowmem_grpo.recipes import RECIPES
from lowmem_grpo.recipes.options import ProblemOptions, RecipeOptions
from lowmem_grpo.recipes.presets import OTHER_MODELS, SIZES, Preset
from lowmem_grpo.runs.accuracy import wilson_interval
from lowmem_grpo.runs.views.chart import LINES, smooth, window
from lowmem_grpo.utils import GIB, MIB

HERE = Path(__file__).resolve().parent
PAGE, PICTURES = HERE / "recipes.md", HERE / "recipes"
ROWS = HERE.parent / "bench" / "results" / "recipe_runs.jsonl"
WORDS: dict[str, dict[str, Any]] = tomllib.loads((HERE / "recipe_words.toml").read_text(encoding="utf-8"))
TEXTS: dict[str, str] = tomllib.loads((HERE / "recipe_page.toml").read_text(encoding="utf-8"))
WIDTH = 120


def module_of(name: str) -> Any:
    return import_module(f"lowmem_grpo.recipes.{name}")


def read_rows() -> dict[tuple[str, str], dict[str, Any]]:
    """The newest row of each recipe on each device ("" is a CPU)."""
    lines = ROWS.read_text(encoding="utf-8").splitlines() if ROWS.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["recipe"], row["gpu"] or ""): row for row in rows}


def page() -> str:
    """Return docs/recipes.md."""
    shared = [TEXTS["options"], *option_table(ProblemOptions, shared_options()), *preset_tables()]
    sections = [line for name in RECIPES for line in section(name)]
    return "\n".join([TEXTS["head"], *measured(), *not_on_a_card(), *shared, *other_models(), *sections]) + "\n"


def measured() -> list[str]:
    """Return a table for each machine, what the columns mean, and the recipes in which no model learned."""
    rows = [row for _, row in sorted(read_rows().items(), key=lambda item: order(item[0]))]
    tables = [measured_table(list(group)) for _, group in groupby(filter(worth_showing, rows), machine_of)]
    names = [row["recipe"] for row in rows if not worth_showing(row)]
    lines = "\n".join(f"- [{name}](#{name}): {WORDS[name]['teaches']}" for name in names)
    unlearned = [TEXTS["unlearned"].format(lines)] if names else []
    return ["\n\n".join(tables), TEXTS["foot"], *unlearned]


def worth_showing(row: dict[str, Any]) -> bool:
    """Return whether the page shows a row: one from a GPU, one whose run failed, or one in which a model learned."""
    before, after = row.get("accuracy_before") or 0, row.get("accuracy_after") or 0
    return bool(row["gpu"]) or "missing" in row or after > before


def machine_of(row: dict[str, Any]) -> str:
    return f"{row['gpu'] or row['cpu']}, {row['cores']} cores"


def measured_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the rows of one machine."""
    memory = "peak memory allocated by torch" if rows[0]["gpu"] else "peak resident memory of the process"
    head = TEXTS["measured"].format(machine=machine_of(rows[0]), memory=memory)
    return "\n".join([head, *map(measured_line, rows)])


def not_on_a_card() -> list[str]:
    """Return a caveat that names the recipes without a row from a card."""
    on_cards = {recipe for recipe, gpu in read_rows() if gpu}
    names = ", ".join(f"`{name}`" for name in RECIPES if name not in on_cards)
    return [TEXTS["no_card"].format(f"of {names} " if on_cards else "")] if names else []


def other_models() -> list[str]:
    """What newer models take with the presets of one recipe, as the planner expects."""
    presets, defaults = module_of("gsm8k").PRESETS, module_of("gsm8k").DEFAULTS
    lines = []
    for model in OTHER_MODELS:
        engine = engine_of(model)
        added = "" if engine == "vllm" else " engine=transformers"
        chosen = {size: replace(presets[size], model=model) for size in SIZES[1:]}
        configs = {size: GRPOConfig(**(defaults | presets[size].settings)) for size in chosen}
        peaks = [f"{planned(size, chosen[size], configs[size], engine)[0]:.1f}" for size in chosen]
        lines.append(f"| `lowmem-grpo run gsm8k model={model}{added}` | {' | '.join(peaks)} |")
    sizes = " | ".join(f"planned peak with gpu={size}, GiB" for size in SIZES[1:])
    rule = "|".join(["---"] * len(SIZES[1:]))
    return [TEXTS["others"].format(sizes=sizes, rule=rule), *lines]


def engine_of(model: str) -> str:
    """What samples a model on a card: vLLM where it has a class for its family."""
    row = family_of(named_config(model))
    return "vllm" if row is not None and row.vllm else "transformers"


def order(key: tuple[str, str]) -> tuple[str, int]:
    """CPU rows first, then by card; recipes in the order of the command line."""
    return key[1], list(RECIPES).index(key[0])


def measured_line(row: dict[str, Any]) -> str:
    """One row of the table."""
    name = row["recipe"]
    if "missing" in row:
        return f"| [{name}](#{name}) | missing: {row['missing'][:80]} {'| ' * 7}|"
    memory = row["peak_bytes"] if row["gpu"] else row["host_peak_bytes"]
    median = sorted(row["step_seconds"])[len(row["step_seconds"]) // 2]
    cells = [f"[{name}](#{name})", WORDS[name]["teaches"], row["model"], share(row, "before"), share(row, "after"),
             str(row["steps"]), f"{median:.2f}", f"{row['command_seconds']:.0f}",
             f"{memory / MIB:.0f}"]
    return f"| {' | '.join(cells)} |"


def share(row: dict[str, Any], when: str) -> str:
    """Accuracy with its interval."""
    if (found := row.get(f"accuracy_{when}")) is None:
        return "not measured"
    low, high = wilson_interval(found, row["eval_problems"])
    return f"{found:.1%} ({low:.1%} to {high:.1%})"


def section(name: str) -> list[str]:
    """Return the lines on one recipe."""
    words, module = WORDS[name], module_of(name)
    return [
        "", f"## {name}", "",
        "\n\n".join(map(filled, words["about"].strip().split("\n\n"))), "",
        *(f"    {command}" for command in words["commands"]), "",
        "**Rewards**", "", *(filled(f"- {line}", "  ") for line in words["rewards"]), "",
        *own_options(module.OPTIONS),
        filled(f"**What to expect.** {words['expect']}"), *curve(name),
    ]


def filled(text: str, indent: str = "") -> str:
    """One paragraph, wrapped to the width of the page."""
    return textwrap.fill(" ".join(text.split()), WIDTH, subsequent_indent=indent, break_long_words=False,
                         break_on_hyphens=False)


def preset_tables() -> list[str]:
    """Return a table of the usual preset of each card size, and a table of the presets of each recipe for cards."""
    heads = [f"| {' | '.join([head_of(size), *map(str, usual(size)), *peaks(size)])} |" for size in SIZES]
    return [TEXTS["presets"], *heads, TEXTS["cells"], *map(preset_row, filter(presets_for_cards, RECIPES))]


def head_of(size: str) -> str:
    return f"gpu={size}"


def usual(size: str) -> tuple[str, int]:
    """Return the model and the LoRA rank that most recipes have for this size."""
    presets = [presets_for_cards(name)[size] for name in filter(presets_for_cards, RECIPES)]
    return Counter((preset.model, preset.lora_rank) for preset in presets).most_common(1)[0][0]


def presets_for_cards(name: str) -> dict[str, Preset]:
    """Return the presets of a recipe by card size; {} if the recipe has only a CPU preset, for every machine."""
    return {size: preset for size, preset in module_of(name).PRESETS.items() if size in SIZES}


def preset_row(name: str) -> str:
    """Return the contexts and completions per step of a recipe's presets, and what is not as usual."""
    presets = presets_for_cards(name)
    steps = {size: config_of(name, preset).completions_per_step for size, preset in presets.items()}
    contexts = {size: preset.max_seq_length for size, preset in presets.items()}
    unusual = [f"{head_of(size)}: {text}" for size in SIZES if (text := unusual_in(name, size))]
    cells = [f"[{name}](#{name})", by_size(contexts), by_size(steps), "; ".join(unusual) or "as above"]
    return f"| {' | '.join(cells)} |"


def by_size(values: dict[str, int]) -> str:
    """Return the value of most card sizes, and the sizes that have another."""
    most = Counter(values[size] for size in SIZES).most_common(1)[0][0]
    others = [f"{values[size]} with {head_of(size)}" for size in SIZES if values[size] != most]
    return f"{most} ({', '.join(others)})" if others else str(most)


def config_of(name: str, preset: Preset) -> GRPOConfig:
    return GRPOConfig(**(module_of(name).DEFAULTS | preset.settings))


def unusual_in(name: str, size: str) -> str:
    """Return the model and the LoRA rank of a recipe's preset, where they are not as usual for the size."""
    preset, (model, rank) = presets_for_cards(name)[size], usual(size)
    texts = [preset.model] * (preset.model != model) + [f"LoRA rank {preset.lora_rank}"] * (preset.lora_rank != rank)
    return ", ".join(texts)


def peaks(size: str) -> list[str]:
    """Return the ranges of the planned peaks over all recipes in GiB, on the GPU and on the host."""
    presets = {name: presets_for_cards(name)[size] for name in filter(presets_for_cards, RECIPES)}
    figures = [planned(size, preset, config_of(name, preset)) for name, preset in presets.items()]
    return [f"{min(each):.1f} to {max(each):.1f}" for each in zip(*figures, strict=True)]


def planned(size: str, preset: Preset, config: GRPOConfig, engine: str = "vllm") -> tuple[float, float]:
    """Return the planned peaks in GiB, on the card and on the host, of a run that samples with this engine."""
    shape = re.sub("-Instruct|-Coder|-VL", "", preset.model.partition("/")[2])
    asked = RunSettings(
        preset.max_seq_length, config.num_generations, preset.lora_rank, optim=config.optim,
        completions_per_step=config.completions_per_step, engine=engine,
    )
    chosen = plan(named_config(shape), asked, device(f"{size}GB"), preset.model)
    return chosen.peak / GIB, chosen.host / GIB


def curve(name: str) -> list[str]:
    """The picture, where there is a row to draw."""
    rows = [row for (recipe, _), row in sorted(read_rows().items()) if recipe == name and pictured(row)]
    if not rows:
        return []
    row = rows[-1]
    what = next(iter(row.get("curves", {"divergence" if "divergence" in row else "mean reward": []})))
    return ["", f"![{what.capitalize()} of {row['steps']} steps](recipes/{name}.svg)"]


def pictured(row: dict[str, Any]) -> bool:
    return worth_showing(row) and "missing" not in row


def shared_options() -> dict[str, str]:
    """Return the defaults of the options that most recipes have, with the names of recipes where they differ."""
    names = [entry.name for entry in fields(ProblemOptions) if entry.name != "config"]
    return {name: shared_default(name) for name in names}


def shared_default(option: str) -> str:
    """Return the default of most recipes as code, and the other ones with the recipes that have them."""
    kinds = {name: module_of(name).OPTIONS for name in RECIPES}
    recipes = {name: default_of(kind, option) for name, kind in kinds.items() if has_option(kind, option)}
    lacking = ", ".join(name for name in RECIPES if name not in recipes)
    most = Counter(recipes.values()).most_common(1)[0][0]
    others = [f"`{value}` in {', '.join(name for name in recipes if recipes[name] == value)}"
              for value in dict.fromkeys(recipes.values()) if value != most]
    return "; ".join([f"`{most}`", *others, *[f"no such option in {lacking}"] * bool(lacking)])


def has_option(kind: type[RecipeOptions], name: str) -> bool:
    return name in {entry.name for entry in fields(kind)}


def default_of(kind: type[RecipeOptions], name: str) -> Any:
    """Return the default of one option of a recipe; "" where it must be given."""
    (entry,) = [entry for entry in fields(kind) if entry.name == name]
    return "" if entry.default is MISSING else entry.default


def own_options(kind: type[RecipeOptions]) -> list[str]:
    """Return a table of the options that are not in the table for all recipes."""
    own = {entry.name: f"`{default_of(kind, entry.name)}`" for entry in fields(kind)
           if entry.name not in shared_options() and entry.name != "config"}
    return [*option_table(kind, own), ""] if own else []


def option_table(kind: type[RecipeOptions], defaults: dict[str, str]) -> list[str]:
    """Return a table with a line for each of these options and their defaults."""
    told = {name: text if base.__module__ in (kind.__module__, RecipeOptions.__module__) else see(base)
            for base in reversed(kind.__mro__[:-1]) for name, text in docs_of(base).items()}
    rows = [f"| `{name}` | {default} | {told.get(name, '')} |" for name, default in defaults.items()]
    return ["| option | default | meaning |", "|---|---|---|", *rows]


def see(kind: type) -> str:
    """Return a link to the section of the recipe that explains these options."""
    name = kind.__module__.rpartition(".")[2]
    return f"As in [{name}](#{name})."


def docs_of(kind: type) -> dict[str, str]:
    """The string below each field of a dataclass, by the name of the field."""
    tree = ast.parse(Path(inspect.getfile(kind)).read_text(encoding="utf-8"))
    body = next(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    found = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[field.target.id] = " ".join(str(text.value.value).split())  # type: ignore[union-attr]
    return found


def draw(row: dict[str, Any], path: Path) -> None:
    """Mean reward and the share of groups with signal, or the row's own curves, step by step."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = row["recipe"]  # the same rows give the same file
    figure, (rewards, shares) = pyplot.subplots(1, 2, figsize=(7.8, 3.0), layout="constrained")
    taught = {"divergence from the teacher, nats a token": row["divergence"], "entropy, nats a token": row["entropy"]} \
        if "divergence" in row else None
    own = row.get("curves", taught) or {
        "mean reward": [math.nan if reward is None else reward for reward in row["rewards"]],
        "share of groups with signal": row["groups_with_signal"]}
    paid, beside = own.values()
    for axis, values, colour, title in zip((rewards, shares), (paid, beside), LINES, own, strict=False):
        curve_on(axis, values, colour, title)
    if "mean reward" in own:
        known = [reward for reward in paid if not math.isnan(reward)]
        rewards.set_ylim(min([0.0, *known]), 1.05 * max([1.0, *known]))
        shares.set_ylim(0, 1.02)
        shares.yaxis.set_major_formatter("{x:.0%}")
    figure.suptitle(f"{row['recipe']}: {row['model']}, {row['gpu'] or 'CPU'}", fontsize=10, x=0.01, ha="left")
    figure.supxlabel(how_drawn(len(paid)), fontsize=8, x=0.01, ha="left")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def curve_on(axis: Any, values: list[float], colour: str, title: str) -> None:
    """One line over the steps, bold over faint where there are enough steps to smooth."""
    steps, around = range(1, len(values) + 1), window(len(values)) // 2
    axis.plot(steps, values, color=colour, linewidth=1, alpha=0.35 if around else 1, marker="" if around else ".")
    if around:
        axis.plot(steps, smooth(values, around), color=colour, linewidth=1.8)
    axis.set_ylabel(title, fontsize=9)
    axis.set_xlabel("optimizer step", fontsize=9)
    axis.locator_params(axis="x", integer=True)
    axis.tick_params(labelsize=8)
    axis.grid(axis="y", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def how_drawn(steps: int) -> str:
    """What bold and faint lines are."""
    return f"bold: mean of {window(steps)} steps, faint: each step" if window(steps) > 1 else ""


def main() -> None:
    for (name, _), row in sorted(read_rows().items()):  # a card's row, which comes later, is drawn over a CPU's
        if pictured(row):
            draw(row, PICTURES / f"{name}.svg")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
