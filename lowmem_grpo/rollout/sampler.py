"""From prompts to groups of rollouts, by the run's engine."""

import logging
from contextlib import AbstractContextManager
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import Prompt, as_group
from lowmem_grpo.engines.base import ON_GROUP, Engine, OnGroup, capabilities_of
from lowmem_grpo.engines.progress import Pace
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.memory.oom import RunMemory
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rewards.calling.reward_batch import RewardBatch
from lowmem_grpo.runs.clock import Clock
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import Rollout, RolloutGroup

logger = logging.getLogger(__name__)


class Player(Protocol):
    """A player of episodes with an engine: `Episodes`, or a caller's own function."""

    waited: float  # seconds of the last batch in which there was nothing to decode

    def play(
        self, engine: Engine, prompts: list[Prompt], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        """`params.n` rollouts of each prompt. The prompts get the ids that the policy got."""
        ...


class Overlap(Protocol):
    """Work on prompts that are complete, while others are sampled."""

    def start_step(self, prompts: list[Prompt], calls: RewardBatch) -> None: ...  # `calls` score the groups

    def on_group(self, index: int, rollouts: list[Rollout]) -> None: ...  # all those of a prompt

    def meanwhile(self, running: int) -> None: ...  # between two steps of decoding, while so many sequences run

    def beside(self) -> AbstractContextManager[None]: ...  # inside the engine samples; behind it nothing runs beside


class Sampler:
    """Samples with the caller's engine, or with the model's own, which it asks for again before each call."""

    def __init__(
        self, model: FastPeftModel, policy: Policy, tokenizer: PreTrainedTokenizerBase, memory: RunMemory,
        state: TrainerState, clock: Clock, engine: Engine, is_callers: bool, player: Player | None = None,
    ) -> None:
        """`engine` is the first one to use; `is_callers`: it is the caller's own, and stays. `player` plays turns."""
        self.model, self.policy, self.tokenizer, self.memory = model, policy, tokenizer, memory
        self.state, self.clock, self.engine, self.is_callers, self.player = state, clock, engine, is_callers, player
        self.said = False  # that the engine reports no finished groups
        self.said_padding = False  # that ids without a text were sampled

    def renew(self) -> None:
        """Ask for the model's engine again: a process has only one of vLLM, and another model may have used it."""
        if self.is_callers or self.engine.name != "vllm":
            return
        engine = self.model.engine(self.policy, self.tokenizer)
        if engine is not self.engine:
            self.engine = engine
            self.memory.watch(engine)
            engine.on_policy_update(self.state.policy_version)

    def sample(
        self, prompts: list[Prompt], params: SamplingParams, on_group: OnGroup | None = None,
        overlap: Overlap | None = None,
    ) -> list[RolloutGroup]:
        """Return `params.n` unscored rollouts of each prompt; `on_group`, or `overlap`, gets each prompt's early."""
        with self.clock.phase("generate"):
            self.renew()
            self.pace()  # not what was sampled in between, as for an evaluation
            ids = [prompt.ids for prompt in prompts]
            if self.player is not None:
                completions = self.player.play(self.engine, prompts, params, on_group)
                self.clock.tools = (self.clock.tools or 0.0) + self.player.waited
            elif overlap is not None:
                with overlap.beside():
                    completions = self.engine.generate(ids, params, overlap.on_group, overlap.meanwhile)
            elif on_group is not None and self.tells():
                completions = self.engine.generate(ids, params, on_group)
            else:
                completions = self.engine.generate(ids, params)
            self.engine.sleep()
        self.say_padding([rollout.completion_ids for each in completions for rollout in each])
        return [as_group(prompt, rollouts) for prompt, rollouts in zip(prompts, completions, strict=True)]

    def say_padding(self, completions: list[list[int]]) -> None:
        """Warn once of sampled ids without a token, which pad the vocabulary; leaving them out would be off-policy."""
        known = len(self.tokenizer)
        if self.said_padding or all(max(ids, default=0) < known for ids in completions):
            return
        beyond = [token for ids in completions for token in ids
                  if token >= known and self.tokenizer.convert_ids_to_tokens(token) is None]
        if beyond:
            self.said_padding = True
            logger.warning(
                "%d sampled tokens are ids without a text, %d among them: they pad the model's vocabulary, and the "
                "tokenizer has none of them. They stand in no completion's text, no reward sees them, and they are "
                "trained as all others. A trained model nearly never draws them: lower the temperature, or take "
                "another model", len(beyond), beyond[0])

    def pace(self) -> Pace:
        """Return where the engine's time went since this was asked last, if the engine measures it."""
        pace: Pace | None = getattr(self.engine, "pace", None)
        return Pace() if pace is None else pace.pop_measured()

    def tells(self) -> bool:
        """Return whether the engine can report finished groups; if it cannot, one warning says so."""
        if ON_GROUP in capabilities_of(self.engine):
            return True
        if not self.said:
            logger.warning(
                "the engine %s does not report finished groups (its capabilities lack on_group), so all "
                "rewards are computed after sampling; score_while_sampling=False does so without this warning",
                self.engine.name,
            )
            self.said = True
        return False

