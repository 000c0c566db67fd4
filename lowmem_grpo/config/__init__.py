"""Every field of a run, and what is refused.

Names load when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_grpo.config.grpo import GRPO_DEFAULTS, MUST_AGREE, GRPOConfig
    from lowmem_grpo.config.shared import (
        OPTIMIZERS,
        SCHEDULERS,
        SINKS,
        STRATEGIES,
        CheckedCall,
        TrainSettings,
        field_names,
        refuse_unsupported,
    )
    from lowmem_grpo.rules import DECAY, POSITIVE, SHARE, ZERO_OR_MORE, Rule

__all__ = [
    "DECAY", "GRPO_DEFAULTS", "MUST_AGREE", "OPTIMIZERS", "POSITIVE", "SCHEDULERS", "SHARE", "SINKS", "STRATEGIES",
    "ZERO_OR_MORE", "CheckedCall", "GRPOConfig", "Rule", "TrainSettings", "field_names", "refuse_unsupported",
]

HOMES = (
    dict.fromkeys(__all__, "config.shared")
    | dict.fromkeys(("GRPO_DEFAULTS", "MUST_AGREE", "GRPOConfig"), "config.grpo")
    | dict.fromkeys(("DECAY", "POSITIVE", "SHARE", "ZERO_OR_MORE", "Rule"), "rules")
)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'lowmem_grpo.config' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"lowmem_grpo.{HOMES[name]}"), name)
