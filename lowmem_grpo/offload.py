"""Gradient checkpointing: keep only each layer's input, on the device or on the host, and recompute the rest."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd.graph import save_on_cpu

MODES = (True, False, "offload")
ALIASES = {"unsloth": "offload"}


def checkpointing_mode(value: bool | str) -> bool | str:
    """True, False or "offload" for what the user wrote; ValueError names what is allowed."""
    mode = ALIASES.get(value, value) if isinstance(value, str) else value
    if mode not in MODES:
        raise ValueError(
            f'use_gradient_checkpointing is {value!r}; allowed are True, False, "offload" and its alias "unsloth"'
        )
    return mode


def offload_activations(device: torch.device, enabled: bool) -> AbstractContextManager:
    """Around a forward pass: tensors saved for backward go to pinned host memory where `device` is a card.

    With gradient checkpointing those are the layers' inputs. On the CPU there is nowhere else to go, and nothing
    changes. The copies run on the compute stream.
    """
    if not enabled or device.type == "cpu":
        return nullcontext()
    return save_on_cpu(pin_memory=True, device_type=device.type)
