"""Adapters with random weights, saved or in a model, and what exports of them leave behind."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from small_models import scatter

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.cli import main
from lowmem_grpo.fast_model import FastPeftModel


def adapted(four_bit: bool, name: str = "tiny", spread: float = 0.05) -> FastPeftModel:
    """A model under an adapter whose factors are both random."""
    bare, _ = FastLanguageModel.from_pretrained(name, max_seq_length=128, load_in_4bit=four_bit)
    return scatter(FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False), spread)


def export_command(*words: Any) -> Result:
    """`lowmem-grpo export` with these words."""
    return CliRunner().invoke(main, ["export", *(str(word) for word in words)])


def names_beside(folder: Path) -> list[str]:
    """What an export has left behind, hidden files and all."""
    return sorted(path.name for path in folder.iterdir())


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_record(folder: Path, **changes: Any) -> None:
    record = folder / "base_model.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | changes))


def spoil(folder: Path, value: float) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    next(tensor for name, tensor in tensors.items() if "layers.3.mlp.up_proj.lora_B" in name)[0, 0] = value
    save_file(tensors, folder / "adapter_model.safetensors")
