"""Checks before a run: mistakes that would stop it or make it learn nothing, each with its fix.

Names load when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_grpo.preflight.before_run import PreflightError, before_training, preflight
    from lowmem_grpo.preflight.checks import CHECKS
    from lowmem_grpo.preflight.first_steps import FirstSteps
    from lowmem_grpo.runs.findings import Finding

__all__ = ["CHECKS", "Finding", "FirstSteps", "PreflightError", "before_training", "preflight"]

HOMES = {
    "CHECKS": "preflight.checks", "Finding": "runs.findings", "FirstSteps": "preflight.first_steps",
    "PreflightError": "preflight.before_run", "before_training": "preflight.before_run",
    "preflight": "preflight.before_run",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'lowmem_grpo.preflight' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"lowmem_grpo.{HOMES[name]}"), name)
