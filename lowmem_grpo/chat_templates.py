"""Unsloth's module of the same name, with the same function names."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_grpo.data.chat_template import get_chat_template, standardize_data_formats, standardize_sharegpt
    from lowmem_grpo.trainer.responses import train_on_responses_only

__all__ = ["get_chat_template", "standardize_data_formats", "standardize_sharegpt", "train_on_responses_only"]

HOMES = {
    **dict.fromkeys(("get_chat_template", "standardize_data_formats", "standardize_sharegpt"), "data.chat_template"),
    "train_on_responses_only": "trainer.responses",
}


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(import_module(f"lowmem_grpo.{HOMES[name]}"), name)
    import_module("lowmem_grpo.integrations.unsloth_names").refuse_name(name)
    raise AttributeError(f"module 'lowmem_grpo.chat_templates' has no attribute {name!r}; it has {', '.join(__all__)}")
