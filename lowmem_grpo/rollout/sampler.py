"""Sampling groups of rollouts for prompts with the run's engine."""

import logging
from contextlib import AbstractContextManager
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import Prompt, as_group
from lowmem_grpo.engines.base import ON_GROUP, Engine, Pace, capabilities_of
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.memory.oom import RunMemory
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rewards.calling.reward_batch import RewardBatch
from lowmem_grpo.runs.state import Clock, TrainerState
from lowmem_grpo.types import OnGroup, Rollout, RolloutGroup

logger = logging.getLogger(__name__)


class Player(Protocol):
    """The interface of objects that play episodes: `Episodes`, or `RolloutFunction` for a user's `rollout_func`."""

    waited: float  # seconds in the last batch in which the engine had nothing to decode

    def play(
        self, engine: Engine, prompts: list[Prompt], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        """Return `params.n` rollouts of each prompt, and set each prompt's ids to the tokens that the policy read."""
        ...


class Overlap(Protocol):
    """The interface of objects that train on complete groups while other groups are sampled."""

    def start_step(self, prompts: list[Prompt], calls: RewardBatch) -> None: ...  # `calls` score the groups

    def on_group(self, index: int, rollouts: list[Rollout]) -> None: ...  # gets all rollouts of prompt `index`

    def meanwhile(self, running: int) -> None: ...  # called between decode steps, with the unfinished sequences

    def beside(self) -> AbstractContextManager[None]: ...  # surrounds sampling; on exit the overlapped work has ended


class Sampler:
    """The sampler of a run."""

    def __init__(
        self, model: FastPeftModel, policy: Policy, tokenizer: PreTrainedTokenizerBase, memory: RunMemory,
        state: TrainerState, clock: Clock, engine: Engine, is_callers: bool, player: Player | None = None,
    ) -> None:
        """`is_callers` is True if the user supplied `engine`, which is then never replaced."""
        self.model, self.policy, self.tokenizer, self.memory = model, policy, tokenizer, memory
        self.state, self.clock, self.engine, self.is_callers, self.player = state, clock, engine, is_callers, player
        self.said = False  # True once the log says that the engine reports no finished groups
        self.said_padding = False  # True once the log says that ids without a text were sampled

    def renew(self) -> None:
        """Get the model's engine again: a process has only one vLLM engine, and another model may have closed it."""
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
        """Return `params.n` unscored rollouts of each prompt. `on_group` or `overlap` gets each prompt's rollouts as
        soon as they are finished."""
        with self.clock.phase("generate"):
            self.renew()
            self.pace()  # discard the timings of other calls, such as `fast_generate`, since the last sampling
            ids, of_all = [prompt.ids for prompt in prompts], params.of_call(len(prompts))
            if self.player is not None:
                completions = self.player.play(self.engine, prompts, params, on_group)
                self.clock.tools = (self.clock.tools or 0.0) + self.player.waited
            elif overlap is not None:
                with overlap.beside():
                    completions = self.engine.generate(ids, of_all, overlap.on_group, overlap.meanwhile)
            elif on_group is not None and self.tells():
                completions = self.engine.generate(ids, of_all, on_group)
            else:
                completions = self.engine.generate(ids, of_all)
            if not getattr(self.engine, "stays", False):
                self.engine.sleep()
        self.say_padding([rollout.completion_ids for each in completions for rollout in each])
        return [as_group(prompt, rollouts) for prompt, rollouts in zip(prompts, completions, strict=True)]

    def say_padding(self, completions: list[list[int]]) -> None:
        """Warn once of sampled ids that only pad the vocabulary; leaving them out of training would be off-policy."""
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
        """Return the engine's timings since the last call; empty if the engine does not measure them."""
        pace: Pace | None = getattr(self.engine, "pace", None)
        return Pace() if pace is None else pace.pop_measured()

    def tells(self) -> bool:
        """Return True if the engine can report finished groups; warn once if it cannot."""
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
