"""`lowmem-grpo run`, `report`, and the commands for a server's jobs: `submit`, `jobs`, `logs`, `cancel`, `resume`."""

import codecs
import json
import re
import sys
import textwrap
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from lowmem_grpo.config.launcher import leave_busy_cores, take_card, this_process, used_by_others
from lowmem_grpo.recipes import RECIPES
from lowmem_grpo.recipes.recipe_file import find_recipe, is_recipe_file, run_module, unknown_recipe
from lowmem_grpo.runs.files import check_folder
from lowmem_grpo.runs.records import RunRecords
from lowmem_grpo.runs.views.terminal import UserPath, columns, echo, fitting, plain_errors, quiet
from lowmem_grpo.utils import visible

if TYPE_CHECKING:
    from lowmem_grpo.server.server_dir import ServerClient

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
        if this_process().leads:  # the first rank writes; later ranks may find its folder in use
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
    check_folder(folder, "output_dir")
    if settings["resume"]:
        from lowmem_grpo.runs.saved_adapter import read_summary

        read_summary(folder)  # raises for one that is damaged
    elif not settings.get("overwrite_output_dir"):
        RunRecords(folder).refuse_another_run()


@click.command(short_help="Write the report page of a run again.")
@click.argument("run_dir", type=UserPath(exists=True, file_okay=False))
def report(run_dir: Path) -> None:
    """Write RUN_DIR/report.html from the files of a run, which may still be in progress."""
    with plain_errors():
        from lowmem_grpo.runs.views.report import write_report

        click.echo(write_report(run_dir))


EVERY = 1.0  # seconds between polls of a log
SERVER = click.option(
    "--server", type=UserPath(), default=Path("~/.lowmem-grpo/server.json"), show_default=True,
    help="The file that `lowmem-grpo serve` writes, or its folder.")
TIME = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")
OVER = ("done", "failed", "stopped", "cancelled")


@click.command(context_settings={"ignore_unknown_options": True}, short_help="Let a recipe wait for the card.")
@click.argument("recipe")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@SERVER
@click.option("--priority", default=0, show_default=True, help="Of a user's jobs, higher ones start first.")
@click.option("--time-limit", help="The limit of one start, such as 90m or 2h. The job then finishes its step, "
              "saves and stops.")
@click.option("--share", default=1.0, show_default=True, help="The job's share of the card's memory. Jobs run "
              "together if their shares add up to at most 1.")
def submit(
    recipe: str, options: tuple[str, ...], server: Path, priority: int, time_limit: str | None, share: float
) -> None:
    """Submit RECIPE, with options as for `lowmem-grpo run`: key=value or --key value."""
    with plain_errors():
        from lowmem_grpo.server.jobs.queue import JobRequest

        asked = JobRequest.from_json({
            "recipe": recipe, "options": list(options), "priority": priority, "share": share,
            "time_limit": None if time_limit is None else seconds_of(time_limit)})
        job = remote(server).post("/jobs", vars(asked))
        echo(f"job {job['id']}: {job['state']}. `lowmem-grpo logs -f {job['id']}` follows it")


@click.command(short_help="List the jobs of a server, and why they wait.")
@click.argument("number", type=int, required=False)
@SERVER
@click.option("--json", "as_json", is_flag=True, help="Print the jobs as JSON.")
def jobs(number: int | None, server: Path, as_json: bool) -> None:
    """List the jobs, the newest first, or show the one with this NUMBER."""
    with plain_errors():
        reply = remote(server).get("/jobs" if number is None else f"/jobs/{number}")
        shown = reply["jobs"] if number is None else [reply]
        if as_json:
            click.echo(json.dumps(reply, indent=2))
        elif not shown:
            click.echo("no jobs yet: `lowmem-grpo submit RECIPE [key=value ...]`")
        else:
            from lowmem_grpo.runs.views.tables import show_jobs

            show_jobs(shown)


@click.command(short_help="Print the log of a job.")
@click.argument("number", type=int)
@SERVER
@click.option("-f", "--follow", is_flag=True, help="Follow the log until the job ends. The exit status is 0 if "
              "the job is done, else 1.")
def logs(number: int, server: Path, follow: bool) -> None:
    """Print the output of job NUMBER."""
    with plain_errors():
        at, offset, said = remote(server), 0, ""
        text = codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            job = at.get(f"/jobs/{number}")  # before the log, so that the log of an ended job is complete
            while piece := at.ask(f"/jobs/{number}/log?from={offset}"):
                offset += len(piece)
                if sys.stdout.isatty():  # the log is a program's of another user, for the server's owner
                    piece = visible(text.decode(piece).replace("\r", "\n")).encode()
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
            if not follow or job["state"] in OVER:
                break
            if job["state"] == "waiting" and job["why"] != said:
                said = job["why"]
                echo(f"job {number} {said if said.startswith('waits') else f'waits: {said}'}", err=True)
            time.sleep(EVERY)
        if follow:
            echo(f"job {number} is {job['state']}{': ' + job['why'] if job['why'] else ''}", err=True)
            raise SystemExit(0 if job["state"] == "done" else 1)


@click.command(short_help="Take a job back, or stop it after its step.")
@click.argument("number", type=int)
@SERVER
def cancel(number: int, server: Path) -> None:
    """Take job NUMBER out of the queue. A running job finishes its step and saves, so that it can be resumed."""
    with plain_errors():
        job = remote(server).post(f"/jobs/{number}/cancel", {})
        echo(f"job {number}: {job['why']}")


@click.command(context_settings={"ignore_unknown_options": True}, short_help="Let a job go on from its checkpoint.")
@click.argument("number", type=int)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@SERVER
def resume(number: int, options: tuple[str, ...], server: Path) -> None:
    """Queue job NUMBER again, to continue from its last checkpoint. OPTIONS such as max_steps=500 are added."""
    with plain_errors():
        job = remote(server).post(f"/jobs/{number}/resume", {"options": list(options)})
        echo(f"job {number}: {job['state']}")


def seconds_of(text: str) -> float:
    """Return the seconds of "90", "90s", "45m", "2h" or "1h30m". Raises ValueError for other texts, and for 0."""
    match = TIME.fullmatch(text.strip().lower())
    hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    if not (total := hours * 3600 + minutes * 60 + seconds):
        raise ValueError(f"the time {text!r} cannot be read, or is nothing; write 90s, 45m, 2h or 1h30m")
    return float(total)


def remote(server: Path) -> "ServerClient":
    from lowmem_grpo.server.server_dir import ServerClient, read_address

    return ServerClient(read_address(server))


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of a library's error, which may quote a file of others."""
    echo("".join(traceback.format_exception(kind, error, trace)).rstrip(), err=True)
