"""Which prompts of a call are finished, and were told of."""

from collections.abc import Iterator
from contextlib import contextmanager

from lowmem_grpo.engines.base import OnGroup
from lowmem_grpo.types import Rollout


class Told:
    """The rollouts of finished prompts: each prompt is told of once, also where a call is begun again."""

    def __init__(self, prompts: int, on_group: OnGroup | None) -> None:
        self.prompts, self.on_group = prompts, on_group
        self.rollouts: dict[int, list[Rollout]] = {}
        self.failed = False  # in what is ours, not in sampling

    def tell(self, prompt: int, rollouts: list[Rollout]) -> None:
        """All rollouts of a prompt are finished."""
        assert prompt not in self.rollouts, prompt
        self.rollouts[prompt] = rollouts
        if self.on_group is not None:
            self.on_group(prompt, rollouts)

    @contextmanager
    def ours(self) -> Iterator[None]:
        """What is raised inside is no failure of the engine, and would come again from a new one."""
        try:
            yield
        except Exception:
            self.failed = True
            raise

    @property
    def missing(self) -> list[int]:
        """The prompts that are not finished."""
        return [prompt for prompt in range(self.prompts) if prompt not in self.rollouts]

    def result(self) -> list[list[Rollout]]:
        """The rollouts of all prompts, in their order."""
        return [self.rollouts[prompt] for prompt in range(self.prompts)]
