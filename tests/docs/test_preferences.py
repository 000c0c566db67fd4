"""The page on preferences: its code runs, and its table has every loss and setting."""

import re
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo.config.critic import CriticSettings
from lowmem_grpo.losses.preference_losses import PAIR_LOSSES, PreferenceSettings
from lowmem_grpo.recipes.arithmetic import correct_answer, make_dataset

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "preferences.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SMALL = {  # what makes the code small enough for a test
    "Qwen/Qwen2.5-1.5B-Instruct": "tiny", "load_in_4bit=True": "load_in_4bit=False", "critic_warmup_steps=10": "",
    'GRPOConfig(output_dir="outputs/grpo"': 'GRPOConfig(output_dir="outputs/grpo", max_completion_length=8',
    "num_generations=1": "num_generations=1, max_completion_length=8",
}
OFTEN = re.compile(r'output_dir="outputs/(\w+)"')
ONE_STEP = r'output_dir="outputs/\1", max_steps=1, per_device_train_batch_size=8, disable_tqdm=True'


def test_the_code_on_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"dataset": make_dataset("train", 8), "right": correct_answer}
    methods = []
    for block in BLOCKS:
        for old, new in SMALL.items():
            block = block.replace(old, new)
        (tmp_path / "block.py").write_text(OFTEN.sub(ONE_STEP, block), encoding="utf-8")
        left = runpy.run_path(str(tmp_path / "block.py"), init_globals=names)
        names = {key: value for key, value in left.items() if not key.startswith("__")}
        methods.append(names["trainer"].method)
    names["trainer"].train()
    assert names["trainer"].state.global_step == 1 and len(methods) == 3
    assert [*(tmp_path / "outputs" / "reward").rglob("adapter_model.safetensors")]


def test_the_page_has_every_loss_and_every_setting_of_both_tables() -> None:
    rows = " ".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| "))
    assert [name for name in PAIR_LOSSES if f'`"{name}"`' not in rows] == []
    assert [field.name for field in fields(CriticSettings) if f"`{field.name}`" not in rows] == []
    assert [field.name for field in fields(PreferenceSettings) if f"`{field.name}`" not in PAGE] == []
