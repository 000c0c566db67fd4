"""Offloading of layer inputs and the embedding to host memory. Needs only torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_grpo.memory.offload.activations import (
        ALIASES,
        MIN_BYTES,
        MODES,
        ActivationOffload,
        Kept,
        checkpointed_layers,
        checkpointing_mode,
        device_of,
        drops,
        enable_checkpointing,
        offload_activations,
        storage_id,
        storage_ids,
    )

__all__ = [
    "ALIASES", "MIN_BYTES", "MODES", "ActivationOffload", "Kept", "checkpointed_layers", "checkpointing_mode",
    "device_of", "drops", "enable_checkpointing", "offload_activations", "storage_id", "storage_ids",
]

HOMES = dict.fromkeys(__all__, "memory.offload.activations")


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'lowmem_grpo.offload' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"lowmem_grpo.{HOMES[name]}"), name)
