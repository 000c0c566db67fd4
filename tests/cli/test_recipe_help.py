"""`lowmem-grpo run RECIPE --help`: a recipe's own options and presets, as its code has them, without running it."""

from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
from recipe_runs import invoke_well
from tables import every_row

from lowmem_grpo.cli.options import assigned, file_of, literal, recipe_help, recipe_tree
from lowmem_grpo.recipes import RECIPES

OWN = '''"""My recipe."""
from dataclasses import dataclass
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import Preset

raise RuntimeError("a file whose help is asked for is not run")
PRESETS: dict = {"24": Preset(model="my/model", max_seq_length=512, lora_rank=8, lora_alpha=16, settings={"beta": 0.1})}


@dataclass
class MyOptions(RecipeOptions):
    engine: str = "vllm"
    """Mine."""
    rows: int = 3


OPTIONS = MyOptions
'''


@every_row("name", RECIPES)
def test_help_shows_every_option_and_preset_of_a_recipe(name: str) -> None:
    module, text = import_module(f"lowmem_grpo.recipes.{name}"), recipe_help(file_of(name))
    options = module.OPTIONS()
    for field in fields(options):
        if field.name != "config":
            assert text.count(f"\n  {field.name}={getattr(options, field.name)}  ") == 1, field.name
    told = " ".join(text.partition("Presets, by")[2].split())
    for size, preset in module.PRESETS.items():
        words = f"{size} model={preset.model}, max_seq_length={preset.max_seq_length}, lora_rank={preset.lora_rank}, "
        assert f"{words}lora_alpha={preset.lora_alpha}" in told
        assert all(f"{setting}=" in told for setting in preset.settings)
    assert text.startswith((module.__doc__ or "").strip().partition("\n")[0]) and "RANGES" not in text
    assert literal(assigned(recipe_tree(name), "DEFAULTS")) == module.DEFAULTS


def test_help_of_a_recipe_file_does_not_run_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    text = recipe_help(tmp_path / "mine.py")
    own, _, shared = text.partition("Options of every recipe:")
    assert "engine=vllm  Mine." in own and "rows=3  (int)" in own and "engine=" not in shared
    assert "24  model=my/model, max_seq_length=512, lora_rank=8, lora_alpha=16, beta=0.1" in text


@pytest.mark.parametrize("options", ["OwnOptions", "Mine"])
def test_options_inherited_from_the_package_are_listed(options: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from lowmem_grpo.recipes.own_data import OwnData, OwnOptions\n"
        "class Mine(OwnOptions):\n    eval_problems: int = 7\n    rows: int = 3\n"
        f"OPTIONS = {options}\n"
    )
    own, _, shared = recipe_help(tmp_path / "mine.py").partition("Options of every recipe:")
    assert own.count("\n  check=False  Show what the rewards pay for a few samples, and do not train.") == 1
    assert own.count("eval_problems=") == 1 and f"eval_problems={7 if options == 'Mine' else 128}  " in own
    assert ("rows=3" in own) == (options == "Mine") and "  model=" in shared and "  model=" not in own


@every_row("words", [["email", "--help"], ["--help", "email"], ["email", "seed=1", "-h"]])
def test_help_of_a_recipe_is_not_the_help_of_the_command(words: list[str]) -> None:
    result = invoke_well("run", *words)
    assert "longest_words=40" in result.output and "Usage:" not in result.output
