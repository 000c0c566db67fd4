"""What a command line asks for, checked before a heavy library is imported: recipes, options, models and files."""

from collections.abc import Sequence
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any

from lowmem_grpo.commands.recipe_help import file_of, named, options_of, parsed, sizes_of
from lowmem_grpo.config.engine import EngineSettings
from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.loading import form_of_weights
from lowmem_grpo.data.kinds import KINDS, refuse_missing
from lowmem_grpo.hub import REPO, find_dataset
from lowmem_grpo.models.named import find
from lowmem_grpo.recipes.options import RecipeOptions, fill
from lowmem_grpo.recipes.presets import size_of
from lowmem_grpo.recipes.recipe_file import is_recipe_file, recipe_path
from lowmem_grpo.rules import check_value

PLAIN = {kind.__name__: kind for kind in (bool, int, float, str)}
TYPES = PLAIN | {f"{name} | None": kind | None for name, kind in PLAIN.items()}


def check_recipe(name: str, arguments: Sequence[str]) -> None:
    """Refuse what `fill` and the recipe would refuse, as the recipe's file says it: the file is read, and not run.

    Raises ValueError, OSError or click.UsageError. What the file does not say in so many words is left to the recipe.
    """
    try:
        tree = parsed(recipe_path(name) if is_recipe_file(name) else file_of(name))
    except ValueError as error:
        if isinstance(error.__cause__, SyntaxError):
            return  # Python shows the line, when the file is loaded
        raise
    owner = named(tree, "OPTIONS")
    shared = {one.name for one in fields(RecipeOptions)}
    written = {option: (kind, default) for option, kind, default, _ in options_of(tree, owner) if option not in shared}
    own = {option: TYPES.get(kind, Any) for option, (kind, _) in written.items()}
    if not own and owner != "RecipeOptions":
        return
    made = make_dataclass("Asked", [(option, kind, field(default=None)) for option, kind in own.items()],
                          bases=(RecipeOptions,))
    asked: Any = fill(made, list(arguments))
    for option, value in asked.config.items():
        check_value(GRPOConfig, option, value)
    sizes = sizes_of(tree)
    if sizes and asked.gpu != "auto" and size_of(asked.gpu) not in sizes:
        raise ValueError(f"gpu is {asked.gpu!r}; allowed are auto, {', '.join(sizes)}")
    if asked.engine != "auto":
        asked.fast_inference  # noqa: B018  (refuses an unknown engine)
    asked.checkpointing  # noqa: B018  (refuses an unknown mode)
    if not 0 < asked.card_share <= 1:
        raise ValueError(f"card_share is {asked.card_share}; it must be above 0 and at most 1")
    form_of_weights(asked.load_in_4bit, False, asked.load_in_fp8)  # refuses both
    EngineSettings(kv_cache_dtype=asked.kv_cache_dtype).check_for(asked.engine)
    check_model(asked.model)
    source = getattr(asked, "dataset", None) or written.get("dataset", ("", None))[1]
    if not is_recipe_file(name) or REPO.fullmatch((source or "").partition(":")[0]):
        check_data(source)


def check_model(name: str | None) -> None:
    """OSError for a path that leads to no model, and for a name that the hub does not give."""
    if name is not None:
        find(name)


def check_data(source: str | None) -> None:
    """OSError for a data file that is not there, and for a name that the hub does not give (ValueError where it says
    that there is none)."""
    if source is None:
        return
    if Path(source).suffix.lower() in KINDS:
        refuse_missing(Path(source))
    elif not Path(source).exists():
        find_dataset(source.partition(":")[0])


def check_folder(path: Path | None) -> None:
    """OSError for a folder that is not there."""
    if path is not None and not path.is_dir():
        raise OSError(f"{path} is not a folder")
