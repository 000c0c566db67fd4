"""What a command line asks for, checked before a heavy library is imported: recipes, models and files. The options of a
recipe are read from its file, which is not run."""

import ast
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any

from lowmem_grpo import recipes
from lowmem_grpo.config.engine import EngineSettings
from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.loading import form_of_weights
from lowmem_grpo.data.kinds import KINDS, refuse_missing
from lowmem_grpo.hub import REPO, find_dataset
from lowmem_grpo.models.named import find
from lowmem_grpo.recipes.recipe_file import is_recipe_file, recipe_path
from lowmem_grpo.rules import check_value

WIDTH, QUOTE = 100, "'"
PRESET = ("model", "max_seq_length", "lora_rank", "lora_alpha", "settings")  # arguments of a Preset
FOOT = "Every field of GRPOConfig can be set too: learning_rate=1e-5, max_steps=50, num_generations=16, ..."
Option = tuple[str, str, str, str]  # name, type, default, what it is
PLAIN = {kind.__name__: kind for kind in (bool, int, float, str)}
TYPES = PLAIN | {f"{name} | None": kind | None for name, kind in PLAIN.items()}


def check_recipe(name: str, arguments: Sequence[str]) -> None:
    """Refuse what `fill` and the recipe would refuse, as the recipe's file says it: the file is read, and not run.

    Raises ValueError, OSError or click.UsageError. What the file does not say in so many words is left to the recipe.
    """
    from lowmem_grpo.recipes.options import RecipeOptions, fill  # which bring pydantic
    from lowmem_grpo.recipes.presets import size_of

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


# The options and presets of a recipe, from its file


def file_of(recipe: str) -> Path:
    """The file of a recipe of the package."""
    return Path(recipes.__path__[0], f"{recipe}.py")


def recipe_help(path: Path) -> str:
    """A recipe's docstring, options and presets as text. ValueError for a file that cannot be read."""
    tree, common = parsed(path), parsed(file_of("options"))
    own = list(options_of(tree, named(tree, "OPTIONS")))
    names = {option[0] for option in own}
    shared = [option for option in options_of(common, "RecipeOptions") if option[0] not in {*names, "config"}]
    parts = [ast.get_docstring(tree) or "", listed("Options of this recipe:", own),
             listed("Options of every recipe:", shared),
             presets_of(tree), FOOT]
    return "\n\n".join(part for part in parts if part)


def parsed(path: Path) -> ast.Module:
    """The file's syntax tree. ValueError for a file that cannot be read."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a recipe: {error}") from error


def named(tree: ast.Module, name: str) -> str:
    """The source of what a file assigns to `name` at its top level; empty if it assigns nothing."""
    values = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]
    return ast.unparse(values[-1]) if values else ""


def options_of(tree: ast.Module, owner: str) -> Iterator[Option]:
    """The fields of a dataclass, each with the text below it. Fields of its base classes come first."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and owner != "RecipeOptions":
            yield from imported(node, owner)
        if isinstance(node, ast.ClassDef) and node.name == owner:
            mine = {ast.unparse(field.target) for field in node.body if isinstance(field, ast.AnnAssign)}
            for base in node.bases:
                yield from (option for option in options_of(tree, ast.unparse(base)) if option[0] not in mine)
            for field, below in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and field.value is not None:
                    written = ast.unparse(field.value)
                    default = (named(tree, written) or written).strip(QUOTE)
                    yield ast.unparse(field.target), ast.unparse(field.annotation), default, text_of(below)


def imported(node: ast.ImportFrom, owner: str) -> Iterator[Option]:
    """The fields of a class that a `from ... import` takes from a file of the package."""
    inside = (node.module or "").split(".")
    path = Path(recipes.__path__[0]).parents[1].joinpath(*inside).with_suffix(".py")
    for name in node.names:
        if (name.asname or name.name) == owner and inside[0] == "lowmem_grpo" and path.is_file():
            yield from options_of(parsed(path), name.name)


def text_of(node: ast.stmt | None) -> str:
    """The text of a statement that is only a string; empty for any other statement."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def listed(title: str, options: list[Option]) -> str:
    """A title, and a paragraph for each option; empty if there are no options."""
    paragraphs = [
        textwrap.fill(f"{name}={default}" + (f"  {text}" if text else f"  ({kind})"), WIDTH,
                      initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False)
        for name, kind, default, text in options
    ]
    return "\n".join([title, *paragraphs]) if paragraphs else ""


def presets_of(tree: ast.Module) -> str:
    """A line for each preset that the file defines."""
    for node in tree.body:
        value = node.value if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "PRESETS" else None
        if isinstance(value, ast.Dict):
            pairs = zip(value.keys, value.values, strict=True)
            return "\n".join(["Presets, by the card's size in GiB (gpu=SIZE):", *(
                preset_line(str(key.value), made) for key, made in pairs
                if isinstance(key, ast.Constant) and isinstance(made, ast.Call)
            )])
    return ""


def sizes_of(tree: ast.Module) -> list[str]:
    """The sizes of the presets that the file writes out; empty where it takes them from elsewhere."""
    values = [node.value for node in tree.body if isinstance(node, ast.AnnAssign)
              and ast.unparse(node.target) == "PRESETS" and isinstance(node.value, ast.Dict)]
    return [str(key.value) for value in values for key in value.keys if isinstance(key, ast.Constant)]


def preset_line(size: str, made: ast.Call) -> str:
    """A preset's size, model, context and LoRA, and the settings that it changes."""
    given = dict(zip(PRESET, made.args, strict=False)) | {word.arg or "": word.value for word in made.keywords}
    settings = given.pop("settings", None)
    if isinstance(settings, ast.Dict):
        pairs = zip(settings.keys, settings.values, strict=True)
        given |= {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
    words = ", ".join(f"{name}={ast.unparse(value).strip(QUOTE)}" for name, value in given.items())
    return textwrap.fill(f"{size:<4}{words}", WIDTH, initial_indent="  ", subsequent_indent=" " * 6,
                         break_on_hyphens=False)
