"""The package's structure: layers import downwards only, heavy libraries stay in their few files, nothing is hidden."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lowmem_grpo
import lowmem_grpo.rewards

ROOT = Path(lowmem_grpo.__file__).parent
LAYERS: list[set[str]] = [  # a module belongs to the layer that names it, or a package that holds it
    {"kernels"},
    {"types", "config", "unsupported", "losses", "loss_types", "loss_settings", "loss_metrics", "kl", "entropy",
     "sequences", "objective", "strategies", "difficulty", "replay", "advantages", "off_policy", "batching", "cutting",
     "metrics",
     "rewards", "sandbox", "sampling", "sampling_like", "fused_weights", "host_embedding", "host_memory", "callbacks",
     "offload", "host_room", "host_store", "pinned_pool", "out_of_memory", "memory_advice", "packer", "rewind",
     "accuracy", "gguf", "planner", "memory_plan", "plan_rows", "step_memory", "model_shape", "cards", "alarms",
     "sft_config", "sandbox_check", "live_bytes", "token_rows", "packed_attention", "card_speeds", "time_costs",
     "workload", "sampling_time", "training_time", "time_plan"},
    {"attention", "lora_layers", "lean_modules", "lean_attention", "policy", "parity", "step", "optim", "model",
     "loader", "pretrained", "engines", "checkpoint", "checkpoint_state", "planned", "planned_time", "saver", "scoring",
     "sampler", "collector", "evaluation",
     "early_scoring", "data", "records", "journal", "report", "charts", "live", "sinks", "export", "export_check",
     "export_folder", "merge", "merged_folder", "lora_pairs", "base_weights", "base_record", "run_adapter", "hub",
     "assessment", "reward_names", "data_files", "doctor", "sft_data", "nonfinite", "judge", "pace", "preflight",
     "pictures",
     "rewards.checking", "rewards.json_answer", "rewards.math_worker", "rewards.pay_table", "rewards.trials"},
    {"trainer", "sft"},
    {"cli", "commands", "plan_table", "eval_table", "__main__", "recipes", "integrations", "new_recipe"},
]
LAZY = {"lowmem_grpo": lowmem_grpo.HOMES, "lowmem_grpo.rewards": lowmem_grpo.rewards.HOMES}  # names and their homes
FREE = ("torch", *sys.stdlib_module_names)  # what layers 0 and 1 may import
HEAVY = {  # everything else, and the files that may import it
    "transformers": {"attention", "base_weights", "cli", "commands.terminal", "data", "engines.choice",
                     "engines.kv_cache", "engines.stopping", "engines.transformers_engine", "engines.vllm_engine",
                     "engines.vllm_settings", "export", "export_check", "integrations.trl", "lean_attention", "loader",
                     "model", "optim",
                     "policy", "pretrained", "recipes.from_scratch", "sampler", "sft_data"},
    "peft": {"checkpoint", "checkpoint_state", "export", "export_check", "integrations.trl", "loader", "lora_layers",
             "model", "policy", "saver"},
    "trl": {"integrations.trl"},
    "packaging": {"doctor", "engines.vllm_pool", "integrations.trl"},
    "bitsandbytes": {"base_weights", "export_check", "optim"},
    "datasets": {"data_files", "recipes.arithmetic", "recipes.code", "recipes.countdown", "recipes.email",
                 "recipes.gsm8k", "recipes.held_out", "recipes.judge", "recipes.lesson", "recipes.own_data",
                 "recipes.proximity", "recipes.warm_up"},
    "plotly": {"pictures", "report"},
    "rich": {"eval_table", "live", "plan_table", "recipes.lesson", "recipes.warm_up", "rewards.checking",
             "rewards.pay_table"},
    "jsonschema": {"rewards.json_answer"},
    "math_verify": {"rewards.math_worker"},
    "openai": {"judge.chat_api"},
    "huggingface_hub": {"hub"},
    "wandb": {"sinks"},
    "numpy": {"checkpoint_state", "engines.process_state"},
    "safetensors": {"base_weights", "checkpoint", "checkpoint_state", "export", "lora_pairs", "merge", "model"},
    "tokenizers": {"recipes.from_scratch"},
    "triton": {"kernels.triton_import"},
    "click": {"cli", "commands.doctor", "commands.eval", "commands.export", "commands.new", "commands.terminal",
              "recipes.from_scratch", "recipes.options", "recipes.recipe_file", "recipes.tiny_model"},
    "pydantic": {"recipes.options"},
}


def module_name(path: Path) -> str:
    """`engines.base` for lowmem_grpo/engines/base.py, `engines` for its __init__, empty for the package's own."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
MODULES = sorted(name for name in TREES if name)


def imports(name: str) -> set[str]:
    """Every module that a module imports by its full name, also inside functions; names of ours are resolved.

    What a package with lazy names imports for the type checker alone is what it offers, not what it needs.
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
    return found


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
    """The other packages that a module imports, the standard library and torch left out."""
    return {found.partition(".")[0] for found in imports(name)} - {"lowmem_grpo", *FREE}


def layer(name: str) -> int:
    """Of the module itself, where the table names it, or of the package that holds it; the highest where none does."""
    while name and not any(name in names for names in LAYERS):
        name = name.rpartition(".")[0]
    return next((number for number, names in enumerate(LAYERS) if name in names), len(LAYERS))


def test_every_module_has_a_layer() -> None:
    placed = set().union(*LAYERS)
    assert [name for name in MODULES if name.partition(".")[0] not in placed] == []


@pytest.mark.parametrize("name", MODULES)
def test_a_lower_layer_never_imports_a_higher_one(name: str) -> None:
    assert sorted(other for other in ours(name) if layer(other) > layer(name)) == []


@pytest.mark.parametrize("name", [name for name in MODULES if layer(name) <= 1])
def test_the_lowest_layers_need_torch_and_the_standard_library_alone(name: str) -> None:
    assert foreign(name) - ({"triton"} if layer(name) == 0 else set()) == set()


def test_each_other_library_is_imported_in_its_named_files_alone() -> None:
    used: dict[str, set[str]] = {}
    for name in MODULES:
        for library in foreign(name):
            used.setdefault(library, set()).add(name)
    assert all(name.startswith("engines.") for name in used.pop("vllm", set()))
    assert used == HEAVY


def test_the_trainer_imports_no_engine_but_their_common_face() -> None:
    assert {name for name in ours("trainer") if name.startswith("engines")} == {"engines.base"}


def test_the_common_face_of_engines_imports_no_engine() -> None:
    assert not {name for name in ours("engines.base") if name.startswith("engines")}


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        order = list(TopologicalSorter({name: ours(name) - {name} for name in MODULES}).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")
    assert set(MODULES) <= set(order)


@pytest.mark.parametrize("name", TREES)
def test_nothing_is_run_read_or_caught_in_secret(name: str) -> None:
    for node in ast.walk(TREES[name]):
        place = f"line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("exec", "eval", "compile", "__import__"), f"{place}: {node.func.id}("
        if isinstance(node, ast.Attribute | ast.Name):
            word = node.attr if isinstance(node, ast.Attribute) else node.id
            allowed = {"environ"} if name == "engines.vllm_import" else set()  # vLLM has settings that are nowhere else
            assert word not in {"getsource", "environ", "getenv", "putenv"} - allowed, f"{place}: {word}"
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{place}: a bare except"
    assert "TODO" not in SOURCES[name]
    assert "FIXME" not in SOURCES[name]


@pytest.mark.parametrize("name", TREES)
def test_every_module_says_what_it_is_for(name: str) -> None:
    assert ast.get_docstring(TREES[name]) or not SOURCES[name].strip()
