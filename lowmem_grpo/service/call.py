"""What the owner of an engine is asked for: one completion."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lowmem_grpo.config.sampling import SamplingParams

LIVE = "live"  # the adapter in the model, as it is when the completion is drawn


@dataclass(frozen=True)
class Call:
    """One completion that is asked for. Calls of one `flavour` are decoded together."""

    ids: list[int]  # (P,) of the prompt
    params: SamplingParams  # n is 1; max_tokens and seed are its own
    adapter: Path | str | None = LIVE  # the folder of a saved adapter, LIVE, or None for the base model
    key: int | None = None  # the conversation's: what was computed for its last call need not be computed again
    version: int | None = None  # the policy's, where `adapter` is a saved one

    @cached_property
    def flavour(self) -> tuple[object, ...]:
        """The settings that all calls of one conversation share."""
        params = self.params
        return (self.adapter, params.temperature, params.top_p, params.top_k, params.min_p,
                tuple(params.stop_strings), tuple(params.stop_token_ids or ()), params.ignore_eos)
