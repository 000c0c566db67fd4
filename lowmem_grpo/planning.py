"""Planning of a run before it starts: settings with which it fits a card, and the duration of its steps."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_grpo.memory.cards import device
    from lowmem_grpo.memory.model_shape import named_config
    from lowmem_grpo.memory.plan import RunSettings, Workload
    from lowmem_grpo.memory.planner import max_context, plan
    from lowmem_grpo.memory.time_plan import plan_time

__all__ = ["RunSettings", "Workload", "device", "max_context", "named_config", "plan", "plan_time"]

HOMES = {"RunSettings": "memory.plan", "Workload": "memory.plan", "device": "memory.cards",
         "max_context": "memory.planner", "named_config": "memory.model_shape", "plan": "memory.planner",
         "plan_time": "memory.time_plan"}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'lowmem_grpo.planning' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"lowmem_grpo.{HOMES[name]}"), name)
