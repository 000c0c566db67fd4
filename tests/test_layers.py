"""The floors: a folder imports only what is listed before it, heavy libraries stay in their folders, and no code hides
what it does."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tables import every_row

import lowmem_grpo
import lowmem_grpo.agents
import lowmem_grpo.chat_templates
import lowmem_grpo.data
import lowmem_grpo.environments
import lowmem_grpo.export
import lowmem_grpo.losses
import lowmem_grpo.offload
import lowmem_grpo.planning
import lowmem_grpo.rewards

ROOT = Path(lowmem_grpo.__file__).parent
ARCHITECTURE = Path(__file__).resolve().parents[1] / "ARCHITECTURE.md"
FLOORS = [  # from below; ARCHITECTURE.md says what each folder is for. Files at the top of the package count as folders
    ("kernels", "utils", "types"),
    ("losses", "memory", "offload", "planning"),
    ("config", "runs"),
    ("models", "export"),
    ("engines", "data"),
    ("fast_model", "loader", "rewards", "environments"),
    ("rollout", "trainer", "chat_templates"),
    ("recipes", "server", "agents", "integrations", "cli", "__main__"),
]
LIBRARIES = {  # what each folder may import beside torch and the standard library
    "kernels": {"triton"},
    "runs": {"IPython", "click", "numpy", "peft", "rich", "safetensors", "trackio", "transformers", "wandb"},
    "models": {"bitsandbytes", "gguf", "huggingface_hub", "jinja2", "llama_cpp", "numpy", "peft", "safetensors",
               "transformers"},
    "engines": {"numpy", "openai", "transformers", "vllm"},
    "data": {"PIL", "datasets", "pandas", "pyarrow", "transformers"},
    "fast_model": {"peft", "transformers"},
    "loader": {"peft", "transformers"},
    "environments": {"mcp", "transformers"},
    "rewards": {"jsonschema", "latex2sympy2_extended", "math_verify", "openai", "py3langid", "pydantic", "referencing",
                "rich", "sympy", "transformers"},
    "rollout": {"transformers"},
    "trainer": {"bitsandbytes", "packaging", "peft", "transformers"},
    "server": {"anyio", "fastapi", "google", "jinja2", "peft", "pydantic", "safetensors", "starlette",
               "transformers", "uvicorn", "zstandard"},
    "agents": {"openai", "pydantic", "tenacity", "tqdm"},
    "recipes": {"PIL", "click", "datasets", "jinja2", "pydantic", "rich"},
    "cli": {"click"}, "__main__": {"click"},
    "integrations": {"packaging", "peft", "transformers", "trl"},
}
LAZY = {  # packages with doors: their names, and the homes of these
    "lowmem_grpo": lowmem_grpo.HOMES, "lowmem_grpo.agents": lowmem_grpo.agents.HOMES,
    "lowmem_grpo.chat_templates": lowmem_grpo.chat_templates.HOMES,
    "lowmem_grpo.data": lowmem_grpo.data.HOMES, "lowmem_grpo.environments": lowmem_grpo.environments.HOMES,
    "lowmem_grpo.export": lowmem_grpo.export.HOMES,
    "lowmem_grpo.losses": lowmem_grpo.losses.HOMES, "lowmem_grpo.offload": lowmem_grpo.offload.HOMES,
    "lowmem_grpo.planning": lowmem_grpo.planning.HOMES,
    "lowmem_grpo.rewards": lowmem_grpo.rewards.HOMES,
}
FREE = ("torch", *sys.stdlib_module_names)
MADE_AT_RUN_TIME = ("exec", "eval", "compile", "__import__")
# They read variables of vLLM, datasets and torchrun, and CC, which is Triton's.
OTHERS_SETTINGS = ("engines.vllm.installed", "models.hub", "config.launcher", "models.card_check")
READ_IN_SECRET = {"getsource", "environ", "getenv", "putenv"}


def module_name(path: Path) -> str:
    """`engines.base` for lowmem_grpo/engines/base.py, `engines` for its __init__, empty for the package's own."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
MODULES = sorted(name for name in TREES if name)
ORDER = [folder for floor in FLOORS for folder in floor]


@cache
def imports(name: str) -> frozenset[str]:
    """Every module that a module imports by its full name, also inside functions. Names of ours are resolved.

    What a package with lazy names imports for the type checker is what it offers, not what it needs; it is left out.
    """
    found: set[str] = set()
    tree = TREES[name]
    if f"lowmem_grpo.{name}" in LAZY:
        tree = ast.Module([node for node in tree.body if not isinstance(node, ast.If)], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {resolve(node.module or "", alias.name) for alias in node.names}
    return frozenset(found)


def resolve(module: str, name: str) -> str:
    """What `from module import name` loads: a module of ours where `name` is one, or where it is a lazy name's home."""
    if name in LAZY.get(module, {}):
        return f"lowmem_grpo.{LAZY[module][name]}"
    inner = f"{module}.{name}".removeprefix("lowmem_grpo.")
    return f"lowmem_grpo.{inner}" if module.startswith("lowmem_grpo") and inner in TREES else module


def ours(name: str) -> set[str]:
    """The modules of this package that a module imports."""
    return {found.removeprefix("lowmem_grpo.") for found in imports(name) if found.startswith("lowmem_grpo.")}


def foreign(name: str) -> set[str]:
    """The other packages that a module imports, without the standard library and torch."""
    return {found.partition(".")[0] for found in imports(name)} - {"lowmem_grpo", *FREE}


def folder_of(name: str) -> str:
    """The folder of the package in which a module lies, or the file itself if it lies in none."""
    return name.partition(".")[0]


def test_every_folder_has_a_floor_and_the_table_names_no_other() -> None:
    assert {folder_of(name) for name in MODULES} == set(ORDER), "FLOORS names each folder and each file at the top"


def test_the_picture_in_architecture_shows_these_floors_from_above() -> None:
    picture = ARCHITECTURE.read_text(encoding="utf-8").split("```\n")[1]
    floors = re.split(r"^floor \d.*\n", picture, flags=re.MULTILINE)[1:]
    drawn = [re.findall(r"^  (\w+)/ ", floor, re.MULTILINE) for floor in floors]
    assert drawn == [[name for name in reversed(floor) if (ROOT / name).is_dir()] for floor in reversed(FLOORS)]
    for folder, inner in re.findall(r"^  (\w+)/ +(.+)$", picture, re.MULTILINE):
        assert [name for name in re.findall(r"(\w+)/", inner) if not (ROOT / folder / name).is_dir()] == []


def test_no_import_goes_upwards() -> None:
    place = {name: ORDER.index(folder_of(name)) for name in MODULES}
    upwards = [f"{name} imports {other}" for name in MODULES for other in ours(name) if place[other] > place[name]]
    assert upwards == [], "move the shared code to a lower folder, or let the caller pass the object (see FLOORS)"


def test_only_recipes_import_names_from_a_door() -> None:
    assert [f"{name}: from {node.module} import {alias.name}" for name in MODULES if folder_of(name) != "recipes"
            for node in ast.walk(TREES[name]) if isinstance(node, ast.ImportFrom)
            for alias in node.names if alias.name in LAZY.get(node.module or "", {})] == []


@every_row("folder", ORDER)
def test_a_folder_imports_only_the_libraries_that_the_table_gives_it(folder: str) -> None:
    used = set().union(*(foreign(name) for name in MODULES if folder_of(name) == folder))
    assert used == LIBRARIES.get(folder, set())


def test_the_trainer_imports_only_the_protocol_of_engines() -> None:
    assert {name for name in ours("trainer.grpo") if name.startswith("engines")} == {"engines.base"}


def test_the_protocol_of_engines_imports_no_engine() -> None:
    assert not {name for name in ours("engines.base") if name.startswith("engines")}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle_in({name: ours(name) - {name} for name in MODULES}) == []


def test_no_folders_import_each_other_in_a_circle() -> None:
    """In each folder, a folder counts as one beside the files there."""
    for begin in ["", *(f"{name}." for name in MODULES if (ROOT / name.replace(".", "/")).is_dir())]:
        arrows = {(folder_of(name.removeprefix(begin)), folder_of(other.removeprefix(begin)))
                  for name in MODULES for other in ours(name) if name.startswith(begin) and other.startswith(begin)}
        assert circle_in({name: {to for start, to in arrows if start == name != to} for name, _ in arrows}) == []


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """Names that import each other in a circle; empty if none do."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_nothing_is_run_read_or_caught_in_secret() -> None:
    assert [f"{name}, line {line}: {what}" for name in TREES for line, what in secrets(name)] == []


def secrets(name: str) -> Iterator[tuple[int, str]]:
    """(line, what) of code that is made at run time, environment variables, source that is read, and bare excepts."""
    allowed = {"environ"} if name in OTHERS_SETTINGS else set()
    for node in ast.walk(TREES[name]):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MADE_AT_RUN_TIME:
            yield line, f"{node.func.id}("
        if isinstance(node, ast.Attribute | ast.Name):
            word = node.attr if isinstance(node, ast.Attribute) else node.id
            if word in READ_IN_SECRET - allowed:
                yield line, word
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield line, "a bare except"


def test_every_module_says_what_it_is_for() -> None:
    assert [name for name in TREES if SOURCES[name].strip() and not ast.get_docstring(TREES[name])] == []


def test_nothing_is_left_to_do() -> None:
    assert [name for name in SOURCES if "TODO" in SOURCES[name] or "FIXME" in SOURCES[name]] == []
