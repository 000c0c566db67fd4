"""Checks of command line options before a heavy library is imported; recipes are parsed, not run."""

import ast
import textwrap
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any

import click

from lowmem_grpo import recipes, utils
from lowmem_grpo.config import distillation, preferences
from lowmem_grpo.config.grpo import GRPOConfig, check_weights
from lowmem_grpo.config.loading import VLLM, EngineSettings, form_of_weights
from lowmem_grpo.config.sampling import LATE, MEND
from lowmem_grpo.config.unsupported import suggestion
from lowmem_grpo.data.files import check_columns, columns_of, is_file_name, refuse_unreadable
from lowmem_grpo.engines.vllm.installed import refuse_absent
from lowmem_grpo.models.hub import REPO, find_dataset
from lowmem_grpo.models.stored_model import find, find_teacher
from lowmem_grpo.recipes.recipe_file import NO_EXAM, is_recipe_file, own_traceback, recipe_path, unknown_recipe
from lowmem_grpo.runs.listeners import refuse_absent_sinks
from lowmem_grpo.runs.saved_adapter import adapter_settings, base_of_adapter, find_adapter
from lowmem_grpo.runs.views.terminal import columns
from lowmem_grpo.utils import MIB, Rule, bytes_of, check_value

WIDTH, QUOTE = 100, "'"
PRESET = ("model", "max_seq_length", "lora_rank", "lora_alpha", "settings", "load_in_4bit")  # of Preset, in order
OWN_PROBLEMS = "the recipe {!r} makes its own problems; leave --dataset out, or --recipe"
NO_EPISODES = ("the recipe {!r} has no episodes: one completion is the whole answer. Ask a question with lowmem-grpo "
               "generate \"...\", or measure with lowmem-grpo eval")
OPTIONS_OF_EXAM = 5  # with this many positional arguments, `takes_source` and `play` may be among them
FOOT = "Every field of {} can be set too: learning_rate=1e-5, max_steps=50, ..."
SHARED = "RecipeOptions"  # the class of the options of every recipe
Option = tuple[str, str, str, str]  # name, type, default, description
PLAIN = {kind.__name__: kind for kind in (bool, int, float, str)}
TYPES = PLAIN | {f"{name} | None": kind | None for name, kind in PLAIN.items()}


def check_recipe(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a run of this recipe; ValueError, OSError or click.UsageError for arguments that the run
    would refuse. The recipe's file is parsed, not run, so only its literals are known here."""
    from lowmem_grpo.recipes.options import fill  # imports pydantic
    from lowmem_grpo.recipes.presets import check_setup, size_of

    tree = recipe_tree(name)
    written = own_options(tree)
    if not written and named(tree, "OPTIONS") != SHARED:
        return {}
    config_class = (vars(distillation) | vars(preferences)).get(named(tree, "SETTINGS"), GRPOConfig)
    asked: Any = fill(class_of(tree, written, config_class), list(arguments))
    for option, value in asked.config.items():
        check_value(config_class, option, value)
    check_teacher(asked.config.get("teacher"), config_class is distillation.DistillationConfig)
    presets, defaults = written_presets(tree), literal(assigned(tree, "DEFAULTS")) or {}
    if presets and asked.gpu != "auto" and size_of(asked.gpu) not in presets:
        raise ValueError(f"gpu is {asked.gpu!r}; allowed are auto, {', '.join(presets)}")
    if asked.engine != "auto":
        asked.fast_inference  # noqa: B018  (raises for an unknown engine)
    asked.checkpointing  # noqa: B018  (raises for an unknown mode)
    form_of_weights(asked.load_in_4bit, False, asked.load_in_fp8)  # raises if both are set
    EngineSettings(kv_cache_dtype=asked.kv_cache_dtype).check_for(asked.engine)
    if asked.engine == VLLM:
        refuse_absent()
    check_model(asked.model)
    if not is_recipe_file(name):
        refuse_empty(asked, written)
    source = getattr(asked, "dataset", None) or written.get("dataset", ("", None))[1]
    if not is_recipe_file(name) or REPO.fullmatch((source or "").partition(":")[0]):
        check_data(source, literal(assigned(tree, "COLUMNS")) or ())
    check_setup(asked, defaults, presets)
    settings = defaults | asked.config
    check_rewards(rewards_of(tree), {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, settings)
    refuse_absent_sinks(settings.get("report_to") or [])
    return settings | {"resume": asked.resume}


def own_options(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Return type and default, as they are written, of the options that a recipe alone has."""
    from lowmem_grpo.recipes.options import RecipeOptions

    shared = {setting.name for setting in fields(RecipeOptions)}
    return {option: (kind, default) for option, kind, default, _ in options_of(tree, named(tree, "OPTIONS")).values()
            if option not in shared}


def class_of(tree: ast.Module, written: dict[str, tuple[str, str]], config_class: type = GRPOConfig) -> Any:
    """Return a class with the options of every recipe and these, as `own_options` returns them, and with their rules
    that are written with rules of utils.py and literals."""
    from lowmem_grpo.recipes.options import RecipeOptions

    own = {option: TYPES.get(kind, Any) for option, (kind, _) in written.items()}
    return make_dataclass("Asked", [(option, kind, field(default=None)) for option, kind in own.items()],
                          bases=(RecipeOptions,), namespace={
                              "settings": config_class, "RANGES": RecipeOptions.RANGES | ranges_of(tree)})


def ranges_of(tree: ast.Module) -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    for home, owner in classes_of(tree, named(tree, "OPTIONS")):
        for node in owner.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RANGES":
                for table in (each for each in ast.walk(node.value) if isinstance(each, ast.Dict)):
                    pairs = zip(table.keys, table.values, strict=True)
                    found |= {literal(key): rule for key, value in pairs if (rule := rule_of(home, value))}
    return found


def rule_of(home: ast.Module, node: ast.expr) -> Rule | None:
    """Return a rule that is a name of utils.py, or a call of such a name with literals; None for others."""
    ours = {name.name: vars(utils).get(name.name) for each in home.body
            if isinstance(each, ast.ImportFrom) and each.module == utils.__name__ for name in each.names}
    rule: Any = ours.get(ast.unparse(node.func if isinstance(node, ast.Call) else node))
    if rule is None or not isinstance(node, ast.Call):
        return rule
    values = [value for each in node.args for value in values_of(home, each)]
    try:
        return None if None in values else rule(*values)
    except TypeError:  # the file calls it wrongly, and says so when it is run
        return None


def values_of(home: ast.Module, node: ast.expr) -> list[Any]:
    """Return the values of an argument: one, or those of a starred name or its keys. None stands for no literal."""
    inner = node.value if isinstance(node, ast.Starred) else node
    written = assigned(home, inner.id) if isinstance(inner, ast.Name) else inner
    if not isinstance(node, ast.Starred):
        return [literal(written)]
    return [literal(key) for key in written.keys] if isinstance(written, ast.Dict) else literal(written) or [None]


def refuse_empty(asked: Any, written: dict[str, tuple[str, str]]) -> None:
    """Raise ValueError for an option that is an empty text."""
    for option, (_, default) in written.items():
        value = getattr(asked, option)
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"{option} is empty; give a value, or leave it out for {default}")


def check_rows(recipe: str, source: str | None, words: Sequence[str], run: dict[str, Any]) -> None:
    """Raise as `check_data` for the rows of an exam: `source`, or the option `dataset` in `words`, in a run's summary
    or by default."""
    from lowmem_grpo.recipes.options import parse

    tree = recipe_tree(recipe)
    recorded = run.get("options") if run.get("recipe") == recipe else None
    usual = {"dataset": own_options(tree).get("dataset", ("", None))[1]} if not is_recipe_file(recipe) else {}
    check_data(source or (usual | (recorded or {}) | parse([*words])).get("dataset"),
               literal(assigned(tree, "COLUMNS")) or ())


def check_words(recipe: str, words: Sequence[str]) -> None:
    """Raise click.UsageError for words that are not key=value with an option that the recipe alone has."""
    from lowmem_grpo.recipes.options import fill, parse

    own = own_options(tree := recipe_tree(recipe))
    for name in parse([*words]):
        if name not in own:
            allowed = f"its options are {', '.join(own)}" if own else "it has no options of its own"
            raise click.UsageError(f"{name} is no option of the problems of {recipe}{suggestion(name, own)}; {allowed}")
    asked = fill(class_of(tree, own), [*words])
    if not is_recipe_file(recipe):
        refuse_empty(asked, own)


def check_rewards(names: list[str], plain: set[str], settings: dict[str, Any]) -> None:
    """Raise ValueError if reward_weights do not match the reward functions `names`, or if train_while_sampling needs
    scores of the functions `plain`, which are called only after sampling unless score_while_sampling=True."""
    if names:
        check_weights(settings.get("reward_weights"), names)
    mode, late = settings.get("train_while_sampling"), [name for name in names if name in plain]
    if mode and late and settings.get("score_while_sampling") is not True:
        raise ValueError(f"train_while_sampling={mode!r}: {LATE.format(', '.join(late))}; {MEND}")


def check_model(name: str | None) -> None:
    """Raise OSError for a path without a model, or a name that the hub does not provide."""
    if name is not None:
        find(name)


def check_data(source: str | None, columns: Sequence[str] = ()) -> None:
    """Raise OSError for a missing, empty or broken data file, or if the hub refuses or does not answer; ValueError for
    a name that the hub does not know, or a file without these columns."""
    if source is None:
        return
    if is_file_name(source):
        refuse_unreadable(Path(source))
        check_columns(source, columns_of(Path(source)), columns)
    else:
        find_dataset(source.partition(":")[0])


def check_adapter(path: Path | None, unfinished: bool = True) -> None:
    """Raise RunError, CheckpointError or AdapterError for a path without a LoRA adapter."""
    if path is not None:
        adapter_settings(folder := find_adapter(path, unfinished).folder)
        base_of_adapter(folder)


def check_teacher(name: str | None, needed: bool) -> None:
    """Raise ValueError for a folder that is no teacher, or if a teacher is `needed` and there is none."""
    if name is not None:
        find_teacher(name)
    elif needed:
        raise ValueError("there is no teacher. Train one, and give the folder of its run:\n"
                         "    lowmem-grpo run arithmetic\n    lowmem-grpo run distill teacher=runs/arithmetic\n"
                         "or give the name of a model with the same tokens, or the URL of a server")


def check_exam(name: str, source: str | None = None, plays: bool = False) -> None:
    """Raise ValueError for a recipe without EXAM; if `source` is set, for an exam that takes no other problems; if
    `plays` is set, for an exam without episodes."""
    tree = recipe_tree(name)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.asname or node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    if names.isdisjoint({"EXAM", "*"}):
        raise ValueError(NO_EXAM.format(name))
    exam = assigned(tree, "EXAM")
    if isinstance(exam, ast.Call) and ast.unparse(exam.func) == "Exam" and len(exam.args) < OPTIONS_OF_EXAM:
        words = {word.arg for word in exam.keywords}
        if source and not words & {"takes_source", None}:
            raise ValueError(OWN_PROBLEMS.format(name))
        if plays and not words & {"play", None}:
            raise ValueError(NO_EPISODES.format(name))


# The options and presets of a recipe, parsed from its file


def file_of(recipe: str) -> Path:
    return Path(recipes.__path__[0], f"{recipe}.py")


def recipe_tree(name: str) -> ast.Module:
    """Return the syntax tree of a recipe's file. ValueError for an unknown recipe, SyntaxError for a faulty file."""
    if problem := unknown_recipe(name):
        raise ValueError(problem)
    path = recipe_path(name) if is_recipe_file(name) else file_of(name)
    try:
        return parsed(path)
    except ValueError as error:
        if isinstance(error.__cause__, SyntaxError):
            with own_traceback(path):
                raise error.__cause__ from None
        raise


def recipe_help(path: Path) -> str:
    """Return a recipe's docstring, options and presets as text. ValueError for a file that cannot be read."""
    tree, common = parsed(path), parsed(file_of("options"))
    own = options_of(tree, named(tree, "OPTIONS"))
    shared = [option for name, option in options_of(common, SHARED).items() if name not in {*own, "config"}]
    presets = [preset_line(size, arguments) for size, arguments in preset_calls(tree).items()]
    parts = [ast.get_docstring(tree) or "", listed("Options of this recipe:", own.values()),
             listed("Options of every recipe:", shared),
             "\n".join(["Presets, by the card's size in GiB (gpu=SIZE):", *presets]) if presets else "",
             FOOT.format(named(tree, "SETTINGS") or "GRPOConfig")]
    return "\n\n".join(filter(None, parts))


def parsed(path: Path) -> ast.Module:
    """Return a file's syntax tree. ValueError if it cannot be read or parsed."""
    try:
        return ast.parse(bytes_of(path, MIB).decode(), str(path))
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError) as error:  # of memory for deep nesting too
        raise ValueError(f"{path} cannot be read as a recipe: {error or 'it is nested too deeply'}") from error


def named(tree: ast.Module, name: str) -> str:
    value = assigned(tree, name)
    return "" if value is None else ast.unparse(value)


def assigned(tree: ast.Module, name: str) -> ast.expr | None:
    """Return the last value assigned to `name` at the top level, with or without annotation; None if there is none."""
    values = [node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)
              and ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) == name]
    return values[-1] if values else None


def literal(node: ast.expr | None) -> Any:
    """Return the value of a literal expression, or of `USUAL | literal` (USUAL of recipes/presets.py); else None."""
    if isinstance(node, ast.BinOp) and ast.unparse(node.left) == "USUAL":
        from lowmem_grpo.recipes.presets import USUAL

        own = literal(node.right)
        return USUAL | own if isinstance(own, dict) else None
    try:
        return None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def options_of(tree: ast.Module, owner: str) -> dict[str, Option]:
    """Return the fields of a dataclass by name, with their attribute docstrings; fields of base classes come first."""
    options: dict[str, Option] = {}
    for home, node in classes_of(tree, owner):
        for entry, below in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(entry, ast.AnnAssign) and entry.value is not None:
                name, kind, written = (ast.unparse(part) for part in (entry.target, entry.annotation, entry.value))
                if not kind.startswith("ClassVar"):
                    default = (named(home, written) or written).strip(QUOTE)
                    options[name] = name, kind, default, text_of(below) or options.get(name, ("",) * 4)[3]
    return options


def classes_of(tree: ast.Module, owner: str) -> list[tuple[ast.Module, ast.ClassDef]]:
    """Return the class `owner` and before it those of its bases that files of our package have, each with its file."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and owner != SHARED:
            found += imported(node, owner)
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for base in map(ast.unparse, node.bases):
                found += classes_of(tree, base) if base != SHARED else []
            found.append((tree, node))
    return found


def imported(node: ast.ImportFrom, owner: str) -> list[tuple[ast.Module, ast.ClassDef]]:
    """Return `classes_of` if this import statement takes the class `owner` from a file of our package."""
    inside = (node.module or "").split(".")
    path = Path(recipes.__path__[0]).parents[1].joinpath(*inside).with_suffix(".py")
    names = [name.name for name in node.names if (name.asname or name.name) == owner]
    return classes_of(parsed(path), names[0]) if names and inside[0] == "lowmem_grpo" and path.is_file() else []


def text_of(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def listed(title: str, options: Iterable[Option]) -> str:
    """Return a title and a paragraph for each option; empty if there are no options."""
    paragraphs = [
        textwrap.fill(f"{name}={default}" + (f"  {text}" if text else f"  ({kind})"), columns(WIDTH),
                      initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False)
        for name, kind, default, text in options
    ]
    return "\n".join([title, *paragraphs]) if paragraphs else ""


def preset_calls(tree: ast.Module) -> dict[str, dict[str, ast.expr]]:
    """Return the arguments of each preset that is a literal call in PRESETS, by card size."""
    return {str(key.value): dict(zip(PRESET, made.args, strict=False)) | {word.arg or "": word.value
                                                                         for word in made.keywords}
            for key, made in preset_pairs(assigned(tree, "PRESETS"))
            if isinstance(key, ast.Constant) and isinstance(made, ast.Call)}


def preset_pairs(value: ast.expr | None) -> list[tuple[ast.expr | None, ast.expr]]:
    """Return the keys and values of a literal dict, of `on_cards(CONTEXT)`, or of several of these joined by |."""
    if isinstance(value, ast.BinOp):
        return preset_pairs(value.left) + preset_pairs(value.right)
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "on_cards" and value.args:
        usual: Any = next(node for node in parsed(file_of("presets")).body if getattr(node, "name", "") == "on_cards")
        table: Any = deepcopy(usual.body[-1].value)  # the dict that it returns
        for preset in table.values:
            preset.args = [value.args[0] if getattr(arg, "id", "") == "context" else arg for arg in preset.args]
        value = table
    return list(zip(value.keys, value.values, strict=True)) if isinstance(value, ast.Dict) else []


def written_presets(tree: ast.Module) -> dict[str, Any]:
    """Return the presets by card size if all their arguments are literals; else an empty dict."""
    from lowmem_grpo.recipes.presets import Preset

    read = {size: {name: literal(value) for name, value in values.items()}
            for size, values in preset_calls(tree).items()}
    whole = all(None not in values.values() and {*PRESET[:4]} <= {*values} <= {*PRESET} for values in read.values())
    return {size: Preset(**values) for size, values in read.items()} if whole else {}


def rewards_of(tree: ast.Module) -> list[str]:
    """Return the names of the reward functions if the file calls `Lesson` once, with a literal list; else []."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Lesson"]
    values = [value for call in calls for value in (*call.args[2:3], *(word.value for word in call.keywords
                                                                       if word.arg == "rewards"))]
    value = values[0] if len(calls) == len(values) == 1 else None
    value = assigned(tree, value.id) if isinstance(value, ast.Name) else value
    if not isinstance(value, ast.List) or any(isinstance(each, ast.Starred) for each in value.elts):
        return []
    return [ast.unparse(each) for each in value.elts]


def preset_line(size: str, arguments: dict[str, ast.expr]) -> str:
    shown = dict(arguments)
    settings = shown.pop("settings", None)
    if isinstance(settings, ast.Dict):
        pairs = zip(settings.keys, settings.values, strict=True)
        shown |= {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
    words = ", ".join(f"{name}={ast.unparse(value).strip(QUOTE)}" for name, value in shown.items())
    return textwrap.fill(f"{size:<4}{words}", columns(WIDTH), initial_indent="  ", subsequent_indent=" " * 6,
                         break_on_hyphens=False)
