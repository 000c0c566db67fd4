"""Presets of all recipes: settings that are valid, a context that holds the completion, memory that the card has."""

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.memory.cards import device
from lowmem_grpo.memory.families import family_of
from lowmem_grpo.memory.named_configs import named_config
from lowmem_grpo.memory.plan import RunSettings
from lowmem_grpo.memory.planner import plan
from lowmem_grpo.recipes import RECIPES
from lowmem_grpo.recipes.arithmetic import ArithmeticOptions
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import OTHER_MODELS, SIZES, Preset, Presets, Setup, prepare
from lowmem_grpo.utils import GIB

MODULES: dict[str, ModuleType] = {name: import_module(f"lowmem_grpo.recipes.{name}") for name in RECIPES}
EVERY = [(name, size) for name, module in MODULES.items() for size in module.PRESETS]
ON_A_CARD = [(name, size) for name, size in EVERY if size != "cpu"]


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def setup_of(name: str, size: str) -> Setup:
    module = MODULES[name]
    return prepare(module.OPTIONS(gpu=size, engine="transformers"), module.DEFAULTS, module.PRESETS)


def test_every_preset_has_valid_settings_that_fit_its_context() -> None:
    for name, size in EVERY:
        setup = setup_of(name, size)
        assert setup.config.rounding() is None, (name, size)
        assert setup.config.max_completion_length + 256 <= setup.max_seq_length or setup.is_tiny, (name, size)
        assert 1 <= setup.lora_rank <= 64 and 1 <= setup.lora_alpha / setup.lora_rank <= 2, (name, size)
        assert setup.is_tiny == (size == "cpu") and setup.load_in_4bit == (not setup.is_tiny), (name, size)


def test_every_preset_fits_the_card_that_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # without one its optimizer is another one

    def fits(name: str, size: str) -> bool:
        setup = setup_of(name, size)
        config = setup.config
        shape = setup.model.partition("/")[2].replace("-Coder", "")  # the same layers under another name
        run = RunSettings(
            setup.max_seq_length, config.num_generations, setup.lora_rank, optim=config.optim,
            completions_per_step=config.completions_per_step,
        )
        return plan(named_config(shape), run, device(f"{size}GB")).fits

    assert [case for case in ON_A_CARD if not fits(*case)] == []


def test_newer_models_fit_the_presets_with_the_engine_that_samples_them() -> None:
    def fits(name: str, size: str, model: str) -> bool:
        preset, fields, row = MODULES[name].PRESETS[size], named_config(model), family_of(named_config(model))
        config = GRPOConfig(**(MODULES[name].DEFAULTS | preset.settings))
        assert row is not None, model
        run = RunSettings(
            preset.max_seq_length, config.num_generations, preset.lora_rank, optim=config.optim,
            completions_per_step=config.completions_per_step, engine="vllm" if row.vllm else "transformers",
        )
        return plan(fields, run, device(f"{size}GB")).fits

    presets = [*(("gsm8k", size) for size in SIZES), ("code", "16"), ("inbox", "16")]
    assert [(*one, model) for one in presets for model in OTHER_MODELS if not fits(*one, model)] == []


def test_every_size_of_card_has_a_preset() -> None:
    others = [name for name, module in MODULES.items() if list(module.PRESETS) != ["cpu", *SIZES]]
    assert others == ["arithmetic"]


# which preset, and what changes it

PRESETS: Presets = {
    "cpu": Preset("tiny", 64, 4, 8, {"max_steps": 1}), "16": Preset("some/small", 512, 8, 16, {"max_steps": 2}),
    "80": Preset("some/large", 1024, 16, 16, {"max_steps": 3}),
}
DEFAULTS: dict[str, Any] = {"learning_rate": 1e-3, "max_steps": 9}


def prepared(**options: Any) -> Setup:
    return prepare(RecipeOptions(engine="transformers", **options), DEFAULTS, PRESETS)


def test_a_size_is_read_however_it_is_written() -> None:
    for gpu in ("16", "16GB", "16 GiB", "16gb"):
        setup = prepared(gpu=gpu)
        found = setup.model, setup.max_seq_length, setup.lora_rank, setup.lora_alpha
        assert found == ("some/small", 512, 8, 16), gpu
        assert (setup.config.max_steps, setup.config.learning_rate) == (2, 1e-3), gpu


def test_what_was_asked_by_name_wins() -> None:
    setup = prepared(
        gpu="80", model="another", max_seq_length=99, lora_rank=32, load_in_4bit=False, resume=True,
        config={"max_steps": 7, "learning_rate": 0.5},
    )
    assert (setup.model, setup.max_seq_length, setup.lora_rank, setup.load_in_4bit) == ("another", 99, 32, False)
    assert setup.lora_alpha == 32  # in the preset's proportion to the rank
    assert (setup.config.max_steps, setup.config.learning_rate, setup.resume) == (7, 0.5, True)


def test_weights_are_in_fp8_in_place_of_4_bits_and_not_in_both() -> None:
    setup = prepared(gpu="16", load_in_fp8=True)
    assert (setup.load_in_4bit, setup.load_in_fp8, setup.weights) == (False, True, "FP8")
    assert prepared(gpu="16").weights == "4-bit" and prepared(gpu="16", load_in_4bit=False).weights == "16-bit"
    with pytest.raises(ValueError, match="contradict each other"):
        prepared(gpu="16", load_in_fp8=True, load_in_4bit=True)


def test_the_form_of_the_cache_is_the_models_unless_it_is_asked_for() -> None:
    assert prepared(gpu="16").kv_cache_dtype == "auto"
    assert prepared(gpu="16", kv_cache_dtype="fp8").kv_cache_dtype == "fp8"


@pytest.mark.parametrize(("option", "value"), [("max_seq_length", 0), ("lora_rank", 0), ("lora_alpha", 0)])
def test_a_zero_is_taken_as_asked(option: str, value: int) -> None:
    assert getattr(prepared(gpu="16", **{option: value}), option) == value


def test_another_model_on_a_cpu_gets_the_preset_of_a_card() -> None:
    setup = prepared(gpu="cpu", model="some/hub-name")
    assert (setup.max_seq_length, setup.config.max_steps, setup.load_in_4bit) == (512, 2, True)
    assert prepared(gpu="cpu", model="tiny").max_seq_length == 64


PAGED: Presets = {"cpu": PRESETS["cpu"], "16": Preset("some/small", 512, 8, 16, {"optim": "paged_adamw_8bit"})}


@pytest.mark.usefixtures("no_card")
@pytest.mark.parametrize(("options", "model"), [
    ({"gpu": "16"}, "some/small"), ({"model": "a/model"}, "a/model"), ({"gpu": "cpu", "model": "a/model"}, "a/model"),
])
def test_a_cards_preset_on_a_cpu_is_said_with_what_changes(
    options: dict[str, Any], model: str, caplog: pytest.LogCaptureFixture
) -> None:
    setup = prepare(RecipeOptions(engine="transformers", **options), {}, PAGED)
    assert (setup.model, setup.config.optim, setup.load_in_4bit) == (model, "adamw_8bit", True)
    (said,) = caplog.messages
    assert said == (
        f"There is no card here: the CPU uses the preset of a card (for some/small), with {model}, 4-bit weights "
        "and optim=adamw_8bit instead of paged_adamw_8bit. This can be slow."
    )


@pytest.mark.usefixtures("no_card")
def test_an_optimizer_that_was_asked_for_stays(caplog: pytest.LogCaptureFixture) -> None:
    options = RecipeOptions(engine="transformers", gpu="16", config={"optim": "paged_adamw_8bit"})
    assert prepare(options, {}, PAGED).config.optim == "paged_adamw_8bit"
    assert "no card here" in caplog.text and "instead of" not in caplog.text


def test_nothing_is_said_of_a_preset_that_fits_the_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    prepare(RecipeOptions(engine="transformers"), {}, PAGED)
    prepare(RecipeOptions(engine="transformers", model="a/model"), {}, {"cpu": PRESETS["cpu"]})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert prepare(RecipeOptions(engine="transformers", gpu="16"), {}, PAGED).config.optim == "paged_adamw_8bit"
    assert caplog.messages == []


@pytest.mark.parametrize(("gib", "size"), [(14.7, "some/small"), (22.0, "some/small"), (79.2, "some/large")])
def test_a_card_gets_the_largest_preset_that_fits(
    gib: float, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=gib * GIB))
    assert prepared().model == size


def test_a_card_that_is_too_small_or_a_size_without_a_preset_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="gpu is '24'; allowed are auto, cpu, 16, 80"):
        prepared(gpu="24")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=8 * GIB))
    with pytest.raises(ValueError, match=r"this card has 8\.0 GiB; the smallest preset is for 16"):
        prepared()
    alone = {"cpu": PRESETS["cpu"]}  # of a recipe for every machine
    assert prepare(ArithmeticOptions(engine="transformers"), DEFAULTS, alone).model == "tiny"


# what the list of recipes says


def test_the_list_of_recipes_is_the_files_that_are_recipes() -> None:
    folder = Path(next(iter(MODULES.values())).__file__ or "").parent
    runnable = {path.stem for path in folder.glob("*.py") if re.search(r"^OPTIONS = ", path.read_text(), re.MULTILINE)}
    assert runnable == set(RECIPES)


def test_every_recipe_shows_its_command() -> None:
    for name, module in MODULES.items():
        docstring = module.__doc__ or ""
        assert docstring.startswith(f"Recipe `{name}`: ") and f"\n    lowmem-grpo run {name}" in docstring, name
