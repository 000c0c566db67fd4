"""Turn dataset rows into prompts and training examples, in a seeded order that a checkpoint can resume."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_grpo.config.sampling import longest_prompt
    from lowmem_grpo.data.prompts import (
        SHOWN,
        DataError,
        Prompt,
        PromptEncoder,
        PromptSource,
        check_dataset,
        is_chat,
    )

__all__ = [
    "SHOWN", "DataError", "Prompt", "PromptEncoder", "PromptSource", "check_dataset", "is_chat", "longest_prompt",
]

HOMES = dict.fromkeys(__all__, "data.prompts") | {"longest_prompt": "config.sampling"}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'lowmem_grpo.data' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"lowmem_grpo.{HOMES[name]}"), name)
