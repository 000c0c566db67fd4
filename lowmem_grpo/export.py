"""Exporting an adapter as a PEFT folder, a merged model or a GGUF file."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_grpo.models.export.formats import (
        ADAPTER_FILES,
        COMPUTED,
        FORMATS,
        ExportSettings,
        check_choices,
        export,
        export_adapter,
        export_gguf,
        export_merged,
        generation_of,
        matrix_elements,
        settled,
    )

__all__ = [
    "ADAPTER_FILES", "COMPUTED", "FORMATS", "ExportSettings", "check_choices", "export", "export_adapter",
    "export_gguf", "export_merged", "generation_of", "matrix_elements", "settled",
]

HOMES = dict.fromkeys(__all__, "models.export.formats")


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'lowmem_grpo.export' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"lowmem_grpo.{HOMES[name]}"), name)
