"""The maths of a step: loss types, advantages, KL, entropy, corrections. Needs only torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_grpo.losses.divergence import generalized_divergence, sampled_token_loss, top_k_divergence
    from lowmem_grpo.losses.loss_metrics import Report
    from lowmem_grpo.losses.policy_loss import (
        at_level,
        factors,
        given,
        grpo_loss,
        kl_term,
        loss_tokens,
        mean_entropy,
        needed,
        settings_of,
    )

__all__ = [
    "Report", "at_level", "factors", "generalized_divergence", "given", "grpo_loss", "kl_term", "loss_tokens",
    "mean_entropy", "needed", "sampled_token_loss", "settings_of", "top_k_divergence",
]

HOMES = {**dict.fromkeys(__all__, "losses.policy_loss"), "Report": "losses.loss_metrics", **dict.fromkeys(
    ("generalized_divergence", "sampled_token_loss", "top_k_divergence"), "losses.divergence")}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'lowmem_grpo.losses' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"lowmem_grpo.{HOMES[name]}"), name)
