"""Names that people's own code imports stay where they were. Recipes, notebooks and pages of docs rely on them."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from tables import not_refused

import lowmem_grpo.agents
import lowmem_grpo.kernels
import lowmem_grpo.rewards
from lowmem_grpo.integrations.unsloth_names import REFUSED
from lowmem_grpo.utils import UnsupportedError

NAMES = {  # module -> names; a folder's name that was a module's offers what that module defined
    "lowmem_grpo": "DPOConfig DPOTrainer FastLanguageModel FastModel FastVisionModel FastQwen2Model GRPOConfig "
                   "GRPOTrainer KTOConfig KTOTrainer ORPOConfig ORPOTrainer PatchDPOTrainer PatchFastRL "
                   "PatchKTOTrainer SFTConfig SFTTrainer SamplingParams UnslothTrainer UnslothTrainingArguments "
                   "is_bf16_supported "
                   "generate_rollout_completions is_bfloat16_supported unsloth_train vLLMSamplingParams "
                   "add_new_tokens pictures rewards kernels __version__",
    "lowmem_grpo.kernels": " ".join(lowmem_grpo.kernels.__all__),
    "lowmem_grpo.rewards": " ".join(lowmem_grpo.rewards.__all__),
    "lowmem_grpo.agents": " ".join([*lowmem_grpo.agents.__all__, *lowmem_grpo.agents.MODULES]),
    "lowmem_grpo.losses": "Report at_level factors given grpo_loss kl_term loss_tokens mean_entropy needed "
                          "settings_of",
    "lowmem_grpo.offload": "ALIASES MIN_BYTES MODES ActivationOffload Kept checkpointed_layers checkpointing_mode "
                           "device_of drops enable_checkpointing offload_activations storage_id storage_ids",
    "lowmem_grpo.chat_templates": "get_chat_template standardize_data_formats standardize_sharegpt "
                                  "train_on_responses_only",
    "lowmem_grpo.data": "SHOWN DataError Prompt PromptEncoder PromptSource check_dataset is_chat longest_prompt",
    "lowmem_grpo.environments": "Anew AskBase FinalResult OpenEnv OpenEnvError ToolError ToolOutage Toolbox mcp_tools "
                                "python_tool",
    "lowmem_grpo.export": "ADAPTER_FILES COMPUTED FORMATS ExportSettings check_choices export export_adapter "
                          "export_gguf export_merged generation_of matrix_elements settled",
    "lowmem_grpo.planning": "RunSettings Workload device max_context named_config plan plan_time",
    "lowmem_grpo.loader": "FastLanguageModel",
    "lowmem_grpo.types": "LossOutput MicroBatch Rollout RolloutGroup",
    "lowmem_grpo.integrations.trl": "use_lowmem_kernels",
    "lowmem_grpo.rewards.texts": "completion_texts",
    "lowmem_grpo.recipes.lesson": "Lesson teach try_rewards",
    "lowmem_grpo.recipes.own_data": "OwnData OwnOptions",
    "lowmem_grpo.recipes.presets": "Preset Presets prepare",
    "lowmem_grpo.recipes.recipe_file": "start",
}

DOORS = [module for name in NAMES if hasattr(module := import_module(name), "HOMES")]


def is_there(module: str, name: str) -> bool:
    if getattr(import_module(module), name, None) is not None:
        return True
    try:
        return bool(import_module(f"{module}.{name}"))
    except ImportError:
        return False


def test_the_names_that_people_import_are_where_they_were() -> None:
    asked = [(module, name) for module, names in NAMES.items() for name in names.split()]
    assert [one for one in asked if not is_there(*one)] == [], "name it in HOMES of the module's __init__.py"


def test_a_door_names_the_same_things_in_each_of_its_three_lists() -> None:
    for door in DOORS:
        tree = ast.parse(Path(str(door.__file__)).read_text(encoding="utf-8"))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                   and str(node.module).startswith("lowmem_grpo.")]
        named = {alias.name for node in imports for alias in node.names}
        assert named == {*door.HOMES} == {*door.__all__}, f"{door.__file__}: one of import, HOMES and __all__ lacks it"


def test_an_unknown_name_of_a_door_raises_an_error_that_lists_the_known_ones() -> None:
    doors = ["", ".agents", ".chat_templates", ".rewards", ".losses", ".offload", ".data", ".environments",
             ".export", ".planning"]
    rows = [(f"lowmem_grpo{name}", "it has ") for name in doors]
    assert not_refused(lambda door: import_module(door).no_such_name, rows, AttributeError) == []


def test_a_name_of_unsloth_that_is_not_here_is_refused_with_what_to_do() -> None:
    rows = [(name, f"lowmem_grpo has no {name}. ") for name in sorted(REFUSED)]
    assert not_refused(lambda name: getattr(lowmem_grpo, name)(model=None), rows, UnsupportedError) == []


def test_a_trainer_that_is_not_here_can_be_imported_and_refuses_to_be_made_or_subclassed() -> None:
    from lowmem_grpo import CPOConfig, CPOTrainer  # type: ignore[attr-defined]

    for use in (CPOTrainer, lambda: CPOConfig(output_dir="out"), lambda: type("Mine", (CPOTrainer,), {})):
        with pytest.raises(UnsupportedError, match="Take DPOTrainer"):
            use()


def test_the_calls_of_unsloth_that_change_other_trainers_do_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert lowmem_grpo.PatchFastRL("GRPO", lowmem_grpo.FastLanguageModel) is None
        assert lowmem_grpo.PatchDPOTrainer() is None
    assert "needs no patch" in caplog.text and "need no patch" in caplog.text
    assert lowmem_grpo.unsloth_train(SimpleNamespace(train=lambda **options: options), resume_from_checkpoint=True) == {
        "resume_from_checkpoint": True}


def test_a_door_loads_no_file_until_a_name_of_it_is_used() -> None:
    doors = [name for name in NAMES if hasattr(import_module(name), "HOMES")]
    code = f"import sys, {', '.join(doors)}; print([name for name in sys.modules if name.startswith('lowmem_grpo')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(ast.literal_eval(done.stdout)) == {"lowmem_grpo", *doors}


@pytest.mark.slow
def test_a_run_whose_teacher_computes_here_would_need_the_package_of_served_teachers() -> None:
    code = "import sys; sys.modules['openai'] = None; import lowmem_grpo.trainer.teaching"
    subprocess.run([sys.executable, "-c", code], check=True)
