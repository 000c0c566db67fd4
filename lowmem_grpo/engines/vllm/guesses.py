"""Guesses by lookup in vLLM: its own method "ngram", and what cannot go with it.

vLLM looks in the sequence itself only, guesses in all steps and not only in the tail, and does not switch itself off.
"""

from importlib.util import find_spec
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.vllm.settings import has_states
from lowmem_grpo.models.policy import Policy

GUESSED = 4  # tokens that are guessed at once for a sequence
SHORTEST, LONGEST = 2, 8  # ends of a sequence that are looked up in it, in tokens
OTHER = 'Leave speculation out, or load the model with fast_inference="transformers"'


def options() -> dict[str, Any]:
    """What vLLM's `LLM` is told."""
    return {"speculative_config": {
        "method": "ngram", "num_speculative_tokens": GUESSED, "prompt_lookup_min": SHORTEST,
        "prompt_lookup_max": LONGEST,
    }}


def check(policy: Policy, params: SamplingParams) -> None:
    """Raise ValueError where vLLM cannot guess, or would draw from another distribution with guesses."""
    if why := why_not(policy, params):
        raise ValueError(f'speculation="lookup" is set, and {why}. {OTHER}')


def why_not(policy: Policy, params: SamplingParams) -> str | None:
    """Why vLLM cannot; None where it can, as far as is known."""
    if policy.device.type != "cuda":
        return ("vLLM's build for CPUs draws wrong tokens where it checks guesses at a temperature above 0 (0.32 told "
                "log-probabilities of the uniform distribution, and NaN)")
    if params.min_p:
        return f"vllm_sampling_params or min_p is {params.min_p}, which vLLM leaves out where it guesses"
    if has_states(policy):
        return "the states of gated delta nets cannot be taken back"
    if policy.routed_layers:
        return "vLLM's routes of experts were not tried together with guesses"
    if find_spec("numba") is None:
        return "vLLM looks up with numba, which is not installed"
    return None
