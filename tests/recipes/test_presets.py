"""Presets of all recipes: settings that are valid, a context that holds the completion, and a plan, before the model is
loaded, that fits the card; a share of a card is a smaller card."""

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from card import gpu

from lowmem_grpo.config.loading import TRANSFORMERS, VLLM
from lowmem_grpo.engines.vllm.settings import default_kv_bytes
from lowmem_grpo.memory.cards import Device, device
from lowmem_grpo.memory.families import family_of
from lowmem_grpo.memory.model_shape import named_config
from lowmem_grpo.memory.peaks import keep_to
from lowmem_grpo.recipes import RECIPES
from lowmem_grpo.recipes import presets as module
from lowmem_grpo.recipes.arithmetic import ArithmeticOptions
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import OTHER_MODELS, SIZES, Preset, Presets, Setup, planned, prepare
from lowmem_grpo.utils import GIB

MODULES: dict[str, ModuleType] = {name: import_module(f"lowmem_grpo.recipes.{name}") for name in RECIPES}
EVERY = [(name, size) for name, recipe in MODULES.items() for size in recipe.PRESETS]


def has_card(monkeypatch: pytest.MonkeyPatch, gib: float | None) -> None:
    """Let torch say that there is a card of this size, or none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gib is not None)
    memory = SimpleNamespace(total_memory=(gib or 0) * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: memory)


def setup_of(name: str, size: str, **options: Any) -> Setup:
    recipe = MODULES[name]
    return prepare(recipe.OPTIONS(gpu=size, **{"engine": "transformers"} | options), recipe.DEFAULTS, recipe.PRESETS)


def test_every_preset_has_valid_settings_that_fit_its_context() -> None:
    assert [name for name, recipe in MODULES.items() if list(recipe.PRESETS) != ["cpu", *SIZES]] == ["arithmetic"]
    for name, size in EVERY:
        setup = setup_of(name, size)
        assert name == "dpo" or setup.config.rounding() is None, (name, size)
        assert setup.config.max_completion_length + 256 <= setup.max_seq_length or setup.is_tiny, (name, size)
        assert 1 <= setup.lora_rank <= 64 and 1 <= setup.lora_alpha / setup.lora_rank <= 2, (name, size)
        assert setup.is_tiny == (size == "cpu" and name != "instructions"), (name, size)
        assert setup.load_in_4bit == (size != "cpu") and (setup.checkpointing == "auto") != setup.is_tiny, (name, size)


def test_every_preset_fits_its_card_and_so_do_newer_models_with_the_engine_that_samples_them(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    has_card(monkeypatch, 80)  # without one its optimizer is another one
    monkeypatch.setattr(module, "config_of", shape_of)

    def fits(name: str, size: str, model: str | None = None) -> bool:
        row = family_of(named_config(model)) if model else None
        engine = TRANSFORMERS if row and not row.vllm else VLLM
        return planned(setup_of(name, size, model=model, engine=engine), device(f"{size}GB")).fits

    assert [case for case in EVERY if case[1] != "cpu" and not fits(*case)] == []
    cases = [*(("gsm8k", size) for size in SIZES[1:]), ("code", "16"), ("inbox", "16"), ("twenty_questions", "16")]
    assert [(*case, model) for case in cases for model in OTHER_MODELS if not fits(*case, model)] == []


def shape_of(model: str) -> dict[str, Any]:
    """The shape of a model of a preset: coders and models of images have the layers of other models."""
    return named_config(model if model in OTHER_MODELS else re.sub("-Coder|-VL", "", model.partition("/")[2]))


def test_a_share_of_a_card_is_planned_as_a_smaller_card() -> None:
    setup = replace(setup_of("gsm8k", "16", engine="vllm"), model="tiny")
    whole, half = Device("a card", 32 * GIB, 32 * GIB), Device("half of a card", 32 * GIB, 16 * GIB)
    assert planned(setup, half).peak <= 16 * GIB < planned(setup, whole).device.budget
    assert planned(setup_of("arithmetic", "cpu", model="tiny-games"), device("t4")).fits


def test_the_cache_of_a_run_with_a_share_counts_only_what_the_run_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    policy: Any = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10)
    for share, cache in ((1.0, 0), (0.4, 10)):  # 70 of 100 are in use; half of 40, less the 10 that this process holds
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device, share=share: share)
        assert default_kv_bytes(policy, 0.5) == cache


@gpu
def test_a_run_that_fills_its_share_is_told_so_on_the_card() -> None:
    before = torch.cuda.get_per_process_memory_fraction()
    keep_to(0.01)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(torch.cuda.get_device_properties(0).total_memory // 50, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(before)


# which preset, and what changes it

PRESETS: Presets = {
    "cpu": Preset("tiny", 64, 4, 8, {"max_steps": 1}), "16": Preset("some/small", 512, 8, 16, {"max_steps": 2}),
    "80": Preset("some/large", 1024, 16, 16, {"max_steps": 3}),
}
PAGED: Presets = {"cpu": PRESETS["cpu"], "16": Preset("some/small", 512, 8, 16, {"optim": "paged_adamw_8bit"})}
DEFAULTS: dict[str, Any] = {"learning_rate": 1e-3, "max_steps": 9}


def prepared(presets: Presets = PRESETS, **options: Any) -> Setup:
    return prepare(RecipeOptions(engine="transformers", **options), DEFAULTS, presets)


def test_a_size_is_read_however_it_is_written() -> None:
    for size in ("16", "16GB", "16 GiB", "16gb"):
        setup = prepared(gpu=size)
        found = setup.model, setup.max_seq_length, setup.lora_rank, setup.lora_alpha, setup.kv_cache_dtype
        assert found == ("some/small", 512, 8, 16, "auto"), size
        assert (setup.config.max_steps, setup.config.learning_rate) == (2, 1e-3), size


def test_what_was_asked_by_name_wins_a_zero_too() -> None:
    setup = prepared(
        gpu="80", model="another", max_seq_length=99, lora_rank=32, load_in_4bit=False, resume=True,
        kv_cache_dtype="fp8", config={"max_steps": 7, "learning_rate": 0.5},
    )
    assert (setup.model, setup.max_seq_length, setup.lora_rank, setup.load_in_4bit) == ("another", 99, 32, False)
    assert setup.lora_alpha == 32  # in the preset's proportion to the rank
    assert (setup.config.max_steps, setup.config.learning_rate, setup.resume) == (7, 0.5, True)
    assert setup.kv_cache_dtype == "fp8"
    for option in ("max_seq_length", "lora_rank", "lora_alpha"):
        assert getattr(prepared(gpu="16", **{option: 0}), option) == 0


def test_a_rate_of_an_embedding_is_refused_before_loading_by_recipes_that_train_none() -> None:
    options = ArithmeticOptions(config={"embedding_learning_rate": 1e-5})
    with pytest.raises(ValueError, match="embedding_learning_rate is 1e-05, and this recipe trains LoRA alone"):
        module.check_setup(options, MODULES["arithmetic"].DEFAULTS, MODULES["arithmetic"].PRESETS)
    module.check_setup(options, MODULES["new_tokens"].DEFAULTS, MODULES["new_tokens"].PRESETS)


def test_weights_are_in_fp8_in_place_of_4_bits_and_not_in_both() -> None:
    setup = prepared(gpu="16", load_in_fp8=True)
    assert (setup.load_in_4bit, setup.load_in_fp8, setup.weights) == (False, True, "FP8")
    plain = "16-bit" if torch.cuda.is_available() else "32-bit"
    assert prepared(gpu="16").weights == "4-bit" and prepared(gpu="16", load_in_4bit=False).weights == plain
    with pytest.raises(ValueError, match="contradict each other"):
        prepared(gpu="16", load_in_fp8=True, load_in_4bit=True)


def test_another_model_on_a_cpu_gets_the_preset_of_a_card() -> None:
    setup = prepared(gpu="cpu", model="some/hub-name")
    assert (setup.max_seq_length, setup.config.max_steps, setup.load_in_4bit) == (512, 2, True)
    assert prepared(gpu="cpu", model="tiny").max_seq_length == 64


@pytest.mark.parametrize(("options", "model", "changed"), [
    ({"gpu": "16"}, "some/small", True), ({"model": "a/model"}, "a/model", True),
    ({"gpu": "cpu", "model": "a/model"}, "a/model", True),
    ({"gpu": "16", "config": {"optim": "paged_adamw_8bit"}}, "some/small", False),
])
def test_a_cards_preset_on_a_cpu_is_said_with_what_changes(
    options: dict[str, Any], model: str, changed: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    has_card(monkeypatch, None)
    setup = prepared(PAGED, **options)
    assert (setup.model, setup.load_in_4bit) == (model, True)
    assert setup.config.optim == ("adamw_8bit" if changed else "paged_adamw_8bit")
    instead = " and optim=adamw_8bit instead of paged_adamw_8bit" if changed else ""
    assert caplog.messages == [f"There is no card here: the CPU uses the preset of a card (for some/small), with "
                               f"{model}, 4-bit weights{instead}. This can be slow."]


def test_nothing_is_said_of_a_preset_that_fits_the_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_card(monkeypatch, None)
    prepared(PAGED)
    prepared({"cpu": PRESETS["cpu"]}, model="a/model")
    has_card(monkeypatch, 16)
    assert prepared(PAGED, gpu="16").config.optim == "paged_adamw_8bit"
    assert caplog.messages == []


def test_a_card_gets_the_largest_preset_that_fits_and_one_that_is_too_small_is_refused(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    for gib, model in ((14.7, "some/small"), (22.0, "some/small"), (79.2, "some/large")):
        has_card(monkeypatch, gib)
        assert prepared().model == model
    has_card(monkeypatch, 8)
    with pytest.raises(ValueError, match=r"this card has 8\.0 GiB; the smallest preset is for 16"):
        prepared()
    with pytest.raises(ValueError, match="gpu is '24'; allowed are auto, cpu, 16, 80"):
        prepared(gpu="24")
    alone = {"cpu": PRESETS["cpu"]}  # of a recipe for every machine
    assert prepare(ArithmeticOptions(engine="transformers"), DEFAULTS, alone).model == "tiny"


def test_the_list_of_recipes_is_the_files_that_are_recipes_and_each_shows_its_command() -> None:
    files = Path(str(module.__file__)).parent.glob("*.py")
    assert {path.stem for path in files if re.search(r"^OPTIONS = ", path.read_text(), re.MULTILINE)} == set(RECIPES)
    for name, recipe in MODULES.items():
        docstring = recipe.__doc__ or ""
        assert docstring.startswith(f"Recipe `{name}`: ") and f"\n    lowmem-grpo run {name}" in docstring, name
