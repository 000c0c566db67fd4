"""The model that `lowmem-grpo generate` samples from, and its adapter."""

from pathlib import Path
from typing import Any

from lowmem_grpo.loader import FastLanguageModel
from lowmem_grpo.models.pretrained import tokenizer_beside
from lowmem_grpo.runs.saved_adapter import base_of_adapter, find_adapter

CONTEXT = 2048  # tokens of prompt and answer


def base_of(adapter: Path | None) -> str | None:
    """The model that an adapter was trained on; None where that is not known."""
    if adapter is None:
        return None
    return base_of_adapter(find_adapter(adapter, unfinished=True).folder).model


def load(model: str, adapter: Path | None, form: dict[str, Any], context: int) -> tuple[Any, Any]:
    """The model, and what makes it answer with its adapter (None without one). `form` has load_in_4bit and
    load_in_fp8."""
    folder = None if adapter is None else find_adapter(adapter, unfinished=True).folder
    tokenizer = None if folder is None else tokenizer_beside(folder)
    loaded: Any = None
    loaded, _ = FastLanguageModel.from_pretrained(model, max_seq_length=context, **form)
    if folder is None:
        return loaded, None
    loaded = FastLanguageModel.get_peft_model(loaded, use_gradient_checkpointing=False)
    loaded.take_up(folder, tokenizer)
    return loaded, loaded.load_lora(folder)
