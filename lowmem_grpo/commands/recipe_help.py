"""`lowmem-grpo run RECIPE --help`: options and presets, read from the recipe's file. The file is not run."""

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

from lowmem_grpo import recipes

WIDTH, QUOTE = 100, "'"
PRESET = ("model", "max_seq_length", "lora_rank", "lora_alpha", "settings")  # arguments of a Preset
FOOT = "Every field of GRPOConfig can be set too: learning_rate=1e-5, max_steps=50, num_generations=16, ..."
Option = tuple[str, str, str, str]  # name, type, default, what it is


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
