"""The model that `lowmem-grpo eval` and `generate` sample from, and its adapter."""

from pathlib import Path
from typing import Any

from lowmem_grpo.loader import FastLanguageModel
from lowmem_grpo.models.pretrained import tokenizer_beside
from lowmem_grpo.runs.adapter_file import layers_of, read_adapter
from lowmem_grpo.runs.saved_adapter import base_of_adapter, find_adapter

CONTEXT = 2048  # tokens of prompt and answer


def adapter_and_base(adapter: Path | None) -> tuple[Path | None, str | None]:
    """Return the folder of an adapter, given as that of a run or a checkpoint too, and the model it was trained on."""
    folder = None if adapter is None else find_adapter(adapter, unfinished=True).folder
    return folder, None if folder is None else base_of_adapter(folder).model


def load(model: str, adapter: Path | None, context: int, **options: Any) -> tuple[Any, Any]:
    """Return the model, and what makes it answer with an adapter (None without one), which is checked before anything
    is loaded. `options` are those of FastLanguageModel.from_pretrained."""
    layers, tokenizer = (None, None) if adapter is None else (layers_of(read_adapter(adapter)[1]),
                                                              tokenizer_beside(adapter))
    bare, _ = FastLanguageModel.from_pretrained(model, max_seq_length=context, **options)
    if adapter is None or layers is None:
        return bare, None
    modules = sorted({name.rpartition(".")[2] for name in layers})
    wrapped = FastLanguageModel.get_peft_model(bare, target_modules=modules, use_gradient_checkpointing=False)
    wrapped.take_up(adapter, tokenizer)
    return wrapped, wrapped.load_lora(adapter)
