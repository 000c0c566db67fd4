"""A recipe that is a file of the user's: found, loaded, run; its own errors are shown with their own traceback."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from lowmem_grpo.rewards.by_name import load_file
from lowmem_grpo.views.terminal import is_ours, plain_errors, quiet

NEEDED = (
    "A recipe has OPTIONS, a subclass of lowmem_grpo.recipes.options.RecipeOptions, and run(options); "
    "`lowmem-grpo new NAME` writes one"
)


def is_recipe_file(name: str) -> bool:
    """Whether a file is meant, and not a recipe of the package."""
    return name.endswith(".py") or "/" in name or "\\" in name


def file_hint(name: str) -> str:
    """What to write where a file of that name lies here; else empty."""
    return f"; there is a file {name}.py here: write ./{name}.py" if Path(f"{name}.py").is_file() else ""


def load_recipe(name: str) -> Any:
    """The module in a file. Modules beside it can be imported, as when it is run by itself; they hide no others."""
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        missing = " (no such file)" if not path.exists() else ""
        raise ValueError(f"{name} is no recipe{missing}: expected a Python file, or the name of a recipe")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    with own_traceback(path):
        return load_file(path)


def run_module(module: Any, arguments: list[str], name: str) -> None:
    """Run a module with OPTIONS and run(); ValueError for one without them."""
    from lowmem_grpo.recipes.options import RecipeOptions, fill

    options, run = getattr(module, "OPTIONS", None), getattr(module, "run", None)
    if not (isinstance(options, type) and issubclass(options, RecipeOptions)) or not callable(run):
        lacks = "run(options)" if not callable(run) else "OPTIONS"
        raise ValueError(f"{name} is no recipe: it has no {lacks}. {NEEDED}")
    filled = fill(options, arguments)
    with own_traceback(Path(name)):
        run(filled)


def start(run: Callable[[Any], None], options: type) -> None:
    """`python FILE.py key=value` as `lowmem-grpo run FILE.py key=value`."""
    from lowmem_grpo.recipes.options import fill

    try:
        quiet()
        with plain_errors(), own_traceback(Path(sys.argv[0])):
            run(fill(options, sys.argv[1:]))
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from error


@contextmanager
def own_traceback(path: Path) -> Iterator[None]:
    """An error in the user's file, or in what it called, is shown from that file on: what stands above is ours."""
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except SyntaxError as error:
        show(error, first_frame(error.__traceback__, path))
        raise SystemExit(1) from error
    except Exception as error:
        trace, cause = first_frame(error.__traceback__, path), error.__cause__
        if trace is not None and not is_ours(trace):
            show(error, trace)
            raise SystemExit(1) from error
        if cause is not None and (trace := first_frame(cause.__traceback__, path)) is not None:
            show(cause, trace)  # of a reward function; what it means for the run, the error itself says
        raise


def show(error: BaseException, trace: Any) -> None:
    """Print an error with a part of its traceback."""
    click.echo("".join(traceback.TracebackException(type(error), error, trace).format()).rstrip(), err=True)


def first_frame(trace: Any, path: Path) -> Any:
    """The part of a traceback that begins in a file; None where that file has no part in it."""
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).resolve() != path.resolve():
        trace = trace.tb_next
    return trace
