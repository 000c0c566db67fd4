"""The command `lowmem-grpo`. Heavy libraries are imported by the commands that need them, not here."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from lowmem_grpo import __version__
from lowmem_grpo.commands.doctor import doctor
from lowmem_grpo.commands.eval import evaluate
from lowmem_grpo.commands.export import export
from lowmem_grpo.commands.new import new
from lowmem_grpo.recipes import RECIPES as RECIPES
from lowmem_grpo.recipes.recipe_file import file_hint, is_recipe_file, load_recipe, run_module
from lowmem_grpo.views.terminal import plain_errors, quiet

OWN_RECIPES = (
    "lowmem-grpo new NAME [--data FILE]       writes one for your own data, NAME.py\n"
    "lowmem-grpo run ./NAME.py [key=value ...]"
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lowmem-grpo")
def main() -> None:
    """GRPO fine-tuning on one GPU (or on a CPU, with the embedded tiny model)."""


def list_recipes() -> str:
    """A line for each recipe."""
    return "\n".join(f"  {name:<12}{text}" for name, text in RECIPES.items())


@main.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    help="Run RECIPE, or your own ./FILE.py, with its own settings, changed by key=value or --key value (any field of "
    "GRPOConfig, and model, lora_rank, load_in_4bit, resume, ...).\n\n\b\nRecipes:\n" + list_recipes(),
)
@click.argument("recipe", required=False)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option("-h", "--help", "help_asked", is_flag=True, help="Of RECIPE: its own options and presets.")
@click.pass_context
def run(context: click.Context, recipe: str | None, options: tuple[str, ...], help_asked: bool) -> None:
    """Run a recipe, or list them."""
    if help_asked and recipe is None:
        click.echo(context.get_help())
        return
    if recipe is None:
        click.echo(f"Recipes:\n{list_recipes()}\n\nlowmem-grpo run RECIPE [key=value ...]\n{OWN_RECIPES}")
        return
    if recipe not in RECIPES and not is_recipe_file(recipe):
        import difflib

        close = difflib.get_close_matches(recipe, RECIPES, n=2)
        hint = file_hint(recipe) or (f"; did you mean {' or '.join(close)}?" if close else "")
        raise click.UsageError(f"no recipe {recipe!r}{hint}\n\nRecipes:\n{list_recipes()}")
    own = is_recipe_file(recipe)
    if help_asked:
        from lowmem_grpo.commands.recipe_help import file_of, recipe_help

        with plain_errors():
            click.echo(recipe_help(Path(recipe) if own else file_of(recipe)))
        return
    quiet()
    with plain_errors():
        module = load_recipe(recipe) if own else import_module(f"lowmem_grpo.recipes.{recipe}")
        run_module(module, list(options), recipe)


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path, exists=True, file_okay=False))
def report(run_dir: Path) -> None:
    """Remake RUN_DIR/report.html, also while the run goes on."""
    with plain_errors():
        from lowmem_grpo.views.report import write_report

        click.echo(write_report(run_dir))


@main.command()
@click.argument("prompt")
@click.option("--model", default="tiny", show_default=True, help="Hub name or folder.")
@click.option("--adapter", type=click.Path(path_type=Path), help="Folder of a saved adapter.")
@click.option("-n", "--samples", default=1, show_default=True)
@click.option("--temperature", default=1.0, show_default=True)
@click.option("--max-tokens", default=256, show_default=True)
@click.option("--seed", type=int, default=None)
@click.option("--load-in-4bit", is_flag=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a sample.")
def generate(prompt: str, model: str, adapter: Path | None, as_json: bool, load_in_4bit: bool, **sampling: Any) -> None:
    """Answer PROMPT as a chat turn, with the base model or with a saved adapter."""
    quiet()
    with plain_errors():
        from lowmem_grpo.config.sampling import SamplingParams
        from lowmem_grpo.loader import FastLanguageModel

        params = SamplingParams(n=sampling.pop("samples"), **sampling)
        loaded: Any = None
        loaded, _ = FastLanguageModel.from_pretrained(model, max_seq_length=2048, load_in_4bit=load_in_4bit)
        request = None
        if adapter is not None:
            loaded = FastLanguageModel.get_peft_model(loaded, use_gradient_checkpointing=False)
            request = loaded.load_lora(adapter)
        (output,) = loaded.fast_generate([[{"role": "user", "content": prompt}]], params, request)
        for completion in output.outputs:
            record = {"text": completion.text, "tokens": len(completion.token_ids), "finish": completion.finish_reason}
            click.echo(json.dumps(record, ensure_ascii=False) if as_json else completion.text)


@main.command()
@click.option("--model", required=True, help="A shape's name, a hub name, or a folder or file with a config.json.")
@click.option("--gpu", required=True, help="A card (t4, 4090, a100-40, ...) or a size (16GiB).")
@click.option("--context", default=2048, show_default=True, help="Tokens of the longest sequence.")
@click.option("--generations", "num_generations", default=8, show_default=True, help="Completions of a prompt.")
@click.option("--rank", "lora_rank", default=32, show_default=True, help="Of LoRA on all linears.")
@click.option("--gpu-memory-utilization", type=float, help="Share of the card that may be filled.")
@click.option("--load-in-4bit/--16bit", "load_in_4bit", default=True, show_default=True)
@click.option("--checkpointing", type=click.Choice(["offload", "true", "false"]), default="offload", show_default=True)
@click.option("--engine", type=click.Choice(["vllm", "transformers"]), default="vllm", show_default=True)
@click.option("--max-tokens", type=int, help="Of a training micro-batch; chosen where left out.")
@click.option("--mlp-tile", type=int, help="Tokens that an MLP takes at a time; chosen where left out.")
@click.option("--optim", help="As in GRPOConfig; chosen where left out.")
@click.option("--prompts", type=int, help="Prompts of a step.  [default: 8]")
@click.option("--prompt-length", type=int, help="Tokens of a prompt, on average.  [default: a fifth of the context]")
@click.option("--completion-length", type=int, help="Tokens of a completion, on average.  [default: 40% of the most]")
@click.option("--max-completion-length", type=int, help="Tokens of the longest.  [default: what prompts leave]")
@click.option("--max-context", is_flag=True, help="Find the longest context that fits.")
@click.option("--json", "as_json", is_flag=True, help="The plan as JSON, in bytes.")
def plan(
    model: str, gpu: str, gpu_memory_utilization: float | None, checkpointing: str, max_context: bool, as_json: bool,
    prompts: int | None, prompt_length: int | None, completion_length: int | None, max_completion_length: int | None,
    **settings: Any,
) -> None:
    """Say what a run will hold in memory, choose settings that fit, and estimate what a step takes.

    No card and no weights are needed. Prompts and generations say how many completions a step has:
    the sampler decodes as many together, and no micro-batch holds more. Lengths decide the estimate of time only.
    """
    with plain_errors():
        from lowmem_grpo.memory.cards import MOST_SEQUENCES, device
        from lowmem_grpo.memory.model_shape import ModelShape
        from lowmem_grpo.memory.plan import RunSettings
        from lowmem_grpo.planning import planner
        from lowmem_grpo.planning.time_plan import plan_time
        from lowmem_grpo.planning.workload import PROMPTS, Workload

        card, config = device(gpu, gpu_memory_utilization), config_of(model)
        modes: dict[str, bool | str] = {"true": True, "false": False}
        asked = RunSettings(checkpointing=modes.get(checkpointing, checkpointing), **settings)
        if prompts is not None and prompts < 1:
            raise ValueError(f"prompts is {prompts}; it must be at least 1")
        step = (PROMPTS if prompts is None else prompts) * asked.num_generations
        asked = replace(asked, completions_per_step=step, sequences=min(step, MOST_SEQUENCES))
        longest = planner.max_context(config, asked, card) if max_context else None
        found = planner.plan(config, replace(asked, context=longest) if longest else asked, card, model)
        work = Workload.within(found.settings.context, prompts, found.settings.num_generations, prompt_length,
                               completion_length, max_completion_length)
        time = plan_time(found, ModelShape.of(config), work)
        if as_json:
            extra = {"max_context": longest} if max_context else {}
            click.echo(json.dumps(found.to_dict() | {"time": time.to_dict()} | extra, indent=2))
        else:
            from lowmem_grpo.views.plan_table import show

            show(found, longest, time=time)
    if not found.fits:
        raise SystemExit(1)


def config_of(model: str) -> Any:
    """A model's config: of a name that ships with the package, of a folder or file, or from the hub."""
    from lowmem_grpo.memory.model_shape import named_config

    try:
        return named_config(model)
    except ValueError as unknown:
        if model.count("/") != 1 or Path(model).exists():
            raise
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(model)
        except (OSError, ValueError) as error:
            cause = str(error).splitlines()[0]
            raise ValueError(f"{unknown} (the hub did not give a config either: {cause})") from error


for command in (doctor, evaluate, export, new):
    main.add_command(command)
