"""Find, load and run recipes and the user's recipe files; find the reward functions that command lines name."""

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Any

import click

from lowmem_grpo import rewards  # its __all__ lists what a command line may name
from lowmem_grpo.config.launcher import take_card
from lowmem_grpo.config.unsupported import suggestion
from lowmem_grpo.data.files import KINDS
from lowmem_grpo.recipes import RECIPES
from lowmem_grpo.rewards.reward import Reward, Verifier
from lowmem_grpo.runs.saved_adapter import read_summary
from lowmem_grpo.runs.views.terminal import echo, is_ours, plain_errors, quiet


def find_function(name: str) -> Any:
    """Return a reward function or a verifier by its name: of lowmem_grpo.rewards, such as "number_match", or of the
    user, such as "my_rewards.py:score" or "package.module:score". ValueError if it does not exist."""
    home, colon, attribute = name.rpartition(":")
    refuse_unknown(name)
    if not colon:
        return made(name, getattr(rewards, name))
    if home.endswith(".py"):
        module = load_file(Path(home))
    else:
        try:
            module = import_module(home)
        except ModuleNotFoundError as error:
            if not f"{home}.".startswith(f"{error.name}."):  # the module is there, and lacks another
                raise
            raise ValueError(f"there is no module {home!r} here") from error
    if not hasattr(module, attribute):
        raise ValueError(f"{home} has no {attribute!r}")
    return made(name, getattr(module, attribute))


def refuse_unknown(name: str) -> None:
    """Raise ValueError for a name without a colon that is not in lowmem_grpo.rewards, and for a name whose file or
    package does not exist. The user's files are not imported."""
    home, colon, _ = name.rpartition(":")
    if home.endswith(".py") and not Path(home).is_file():
        raise ValueError(f"there is no file {home}")
    if colon and not home.endswith(".py") and importlib.util.find_spec(home.partition(".")[0]) is None:
        raise ValueError(f"there is no module {home!r} here")
    if not colon and name not in rewards.__all__:
        close = difflib.get_close_matches(name, rewards.__all__, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else "."
        raise ValueError(f"no reward {name!r} in lowmem_grpo.rewards{hint} Name your own as FILE.py:FUNCTION")


def made(name: str, value: Any) -> Any:
    """Return `value` if it is a reward function or a verifier, else what `value()` makes. ValueError if it makes
    neither, or requires arguments."""
    if isinstance(value, Verifier):
        return value
    parameters = inspect.signature(value).parameters if callable(value) else {}
    if "completions" in parameters:
        return value
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in several]
    if needed or not callable(value):
        needs = f", and needs {', '.join(needed)}, which a name cannot give" if needed else ""
        raise ValueError(f"{name} is not a reward function: it takes no `completions`{needs}. Write one that calls it, "
                         "and name that one as FILE.py:FUNCTION")
    built = value()
    if not isinstance(built, Verifier | Reward):
        raise ValueError(f"{name}() returns a {type(built).__name__}, which is neither a reward nor a verifier")
    return built


def load_file(path: Path) -> Any:
    """Import a user's file, under a name that hides no installed module. ValueError if it is not a Python file."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


NO_EXAM = "the recipe {!r} has no EXAM; test it with --dataset FILE --reward NAME"
NEEDED = ("A recipe has OPTIONS, a subclass of lowmem_grpo.recipes.options.RecipeOptions, and run(options). "
          "`lowmem-grpo new NAME` writes one")


def is_recipe_file(name: str) -> bool:
    """Return whether the name means a file rather than a recipe of the package."""
    return name.endswith((".py", *KINDS)) or "/" in name or "\\" in name


def unknown_recipe(name: str) -> str:
    """Return why a name is not a recipe, with a suggestion; "" for a known recipe or a file."""
    if name in RECIPES or is_recipe_file(name):
        return ""
    if Path(f"{name}.py").is_file():
        return f"no recipe {name!r}; there is a file {name}.py here: write ./{name}.py"
    return f"no recipe {name!r}{suggestion(name, RECIPES)}"


def find_recipe(name: str) -> Any:
    """Return the module of a recipe of the package, or of a recipe file. Raises ValueError if there is none."""
    if problem := unknown_recipe(name):
        raise ValueError(problem)
    return load_recipe(name) if is_recipe_file(name) else import_module(f"lowmem_grpo.recipes.{name}")


def recipe_path(name: str) -> Path:
    """Return the path of a recipe file. Raises ValueError if it is no Python file, or does not exist."""
    path = Path(name).expanduser()
    if path.suffix in KINDS:
        raise ValueError(f"{name} is data, and no recipe: `lowmem-grpo new NAME --data {quote(name)}` writes a recipe "
                         "for it, and `lowmem-grpo run ./NAME.py` trains on it")
    if path.suffix != ".py" or not path.is_file():
        missing = " (no such file)" if not path.exists() else ""
        raise ValueError(f"{name} is not a recipe{missing}: give a Python file, or the name of a recipe")
    return path


def load_recipe(name: str) -> Any:
    """Import a recipe file. It can import modules from its folder, which do not shadow installed ones."""
    path = recipe_path(name)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)

    with own_traceback(path):
        return load_file(path)


def run_module(module: Any, arguments: list[str], name: str) -> None:
    """Run a recipe with options from the command line. Raises ValueError for a module without OPTIONS or run()."""
    from lowmem_grpo.recipes.options import RecipeOptions, fill

    options, run = getattr(module, "OPTIONS", None), getattr(module, "run", None)
    if not (isinstance(options, type) and issubclass(options, RecipeOptions)) or not callable(run):
        lacks = "run(options)" if not callable(run) else "OPTIONS"
        raise ValueError(f"{name} is not a recipe: it has no {lacks}. {NEEDED}")
    filled = resumed(module, fill(options, arguments), arguments, name)
    with own_traceback(Path(name).expanduser()):
        run(filled)


def summary_of(folder: Path, recipe: str) -> dict[str, Any]:
    """Return summary.json of the run in a folder, if it was a run of this recipe; else an empty dict."""
    summary = read_summary(folder)
    return summary if summary.get("recipe") == (Path(recipe).stem if is_recipe_file(recipe) else recipe) else {}


def resumed(module: Any, options: Any, arguments: list[str], name: str) -> Any:
    """Return the options of a run. If it is resumed, those that only the recipe has are as the run recorded them,
    unless `arguments` give them; a line names what the run changes."""
    from lowmem_grpo.recipes.options import parse, usable

    folder = options.config.get("output_dir") or getattr(module, "DEFAULTS", {}).get("output_dir")
    recorded = summary_of(Path(folder), name).get("options") if options.resume and folder else None
    asked, now = parse(arguments), options.of_recipe
    before = {option: value for option, value in usable(type(options), recorded or {}).items()
              if option not in asked and value != now.get(option)}
    if not before:
        return options
    echo(f"as the run was started: {', '.join(f'{option}={value}' for option, value in before.items())}", err=True)
    return replace(options, **before)


def start(run: Callable[[Any], None], options: type) -> None:
    """Make `python FILE.py key=value` work like `lowmem-grpo run ./FILE.py key=value`."""
    from lowmem_grpo.recipes.options import fill

    try:
        quiet()
        with plain_errors(), own_traceback(Path(sys.argv[0])):
            take_card()
            run(resumed(sys.modules["__main__"], fill(options, sys.argv[1:]), sys.argv[1:], sys.argv[0]))
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from error


@contextmanager
def own_traceback(path: Path) -> Iterator[None]:
    """Print an error in the user's file, or in code it called, without this package's frames above that file."""
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
            show(cause, trace)  # from a reward function; the error itself says what it means for the run
        raise


def show(error: BaseException, trace: Any) -> None:
    echo("".join(traceback.TracebackException(type(error), error, trace).format()).rstrip(), err=True)


def first_frame(trace: Any, path: Path) -> Any:
    """Return the part of a traceback that begins in this file; None if the file is not in it."""
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).resolve() != path.resolve():
        trace = trace.tb_next
    return trace
