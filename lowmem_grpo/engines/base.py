"""What the trainer asks of a rollout engine."""

from collections.abc import Callable
from typing import Protocol

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.types import Rollout

OnGroup = Callable[[int, list[Rollout]], None]  # (index of a prompt, all its rollouts)


class Engine(Protocol):
    """Samples completions with the trainer's own weights. The trainer takes one and imports none."""

    name: str

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        """`params.n` rollouts of each prompt's token ids, by the current policy; ids are never re-tokenised. An engine
        that sleeps wakes itself: what runs out of memory in waking is then met as in sampling.

        `on_group` is called in this thread, once for each prompt, as soon as all its rollouts are finished, with the
        very objects that are returned in the end; what it raises ends the call. Without it the outcome is the same.
        """
        ...

    def on_policy_update(self, policy_version: int) -> None:
        """The weights changed in place: forget what was computed with the old ones."""
        ...

    def sleep(self) -> None:
        """Free everything but the weights, before training."""
        ...

    def wake(self) -> None:
        """Be ready to generate before the next call of `generate`, which would see to it as well."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of key-value cache: held now, or at the peak of the last generation."""
        ...

    def close(self) -> None:
        """Free everything that the engine owns."""
        ...
