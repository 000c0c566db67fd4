"""`lowmem-grpo run`: runs a recipe or recipe file, lists recipes, or shows their options. `report`: a report page."""

import sys
import textwrap
from pathlib import Path
from typing import Any

import click

from lowmem_grpo.config.launcher import leave_busy_cores, take_card, this_place, used_by_others
from lowmem_grpo.recipes import RECIPES
from lowmem_grpo.recipes.recipe_file import find_recipe, is_recipe_file, run_module, unknown_recipe
from lowmem_grpo.runs.files import check_place
from lowmem_grpo.runs.records import RunRecords
from lowmem_grpo.runs.views.terminal import UserPath, columns, fitting, plain_errors, quiet

WIDTH, WIDEST = 120, max(map(len, RECIPES))
LIST = "Recipes:\n" + "\n".join(
    textwrap.fill(text, columns(WIDTH), initial_indent=f"  {name:<{WIDEST + 2}}", subsequent_indent=" " * (WIDEST + 4))
    for name, text in RECIPES.items()
)
HOW_TO = """
lowmem-grpo run RECIPE [key=value ...]
lowmem-grpo new NAME [--data FILE]       writes a recipe for your own data
lowmem-grpo run ./NAME.py [key=value ...]"""


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    short_help="Train a model with a recipe, or list the recipes.",
    help="Run RECIPE, or your own recipe ./FILE.py. Change a setting with key=value or --key value: any field of "
    f"GRPOConfig, and model, lora_rank, load_in_4bit, resume and others.\n\n\b\n{LIST}",
)
@click.argument("recipe", required=False)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option("-h", "--help", "help_asked", is_flag=True, help="After RECIPE: show its options and presets.")
@click.pass_context
def run(context: click.Context, recipe: str | None, options: tuple[str, ...], help_asked: bool) -> None:
    """Run a recipe, or list them all."""
    if recipe is None:
        click.echo(context.get_help() if help_asked else f"{LIST}\n{HOW_TO}")
        return
    if problem := unknown_recipe(recipe):
        raise click.UsageError(f"{problem}\n\n{LIST}")
    if help_asked:
        from lowmem_grpo.cli.options import file_of, recipe_help

        with plain_errors():
            click.echo(recipe_help(Path(recipe).expanduser() if is_recipe_file(recipe) else file_of(recipe)))
        return
    with plain_errors():
        before = used_by_others()
        from lowmem_grpo.cli.options import check_recipe

        take_card()
        settings = check_recipe(recipe, options)
        if this_place().leads:  # the first rank writes; later ranks may find its folder in use
            check_run_folder(settings)
            place = f", records in {settings['output_dir']}" if "output_dir" in settings else ""
            click.echo(fitting(f"recipe {recipe}{place}; loading torch and other libraries ...", sys.stderr), err=True)
    quiet()
    with plain_errors():
        module = find_recipe(recipe)
        leave_busy_cores(before)  # `before` was measured seconds ago, before the imports
        run_module(module, list(options), recipe)


def check_run_folder(settings: dict[str, Any]) -> None:
    """Raise RecordError if the run's folder holds another run, OSError if it cannot be written to."""
    if "output_dir" not in settings:
        return
    folder = Path(settings["output_dir"])
    check_place(folder, "output_dir")
    if not settings["resume"] and not settings.get("overwrite_output_dir"):
        RunRecords(folder).refuse_another_run()


@click.command(short_help="Write the report page of a run again.")
@click.argument("run_dir", type=UserPath(exists=True, file_okay=False))
def report(run_dir: Path) -> None:
    """Write RUN_DIR/report.html from the files of a run, which may still be in progress."""
    with plain_errors():
        from lowmem_grpo.runs.views.report import write_report

        click.echo(write_report(run_dir))
