"""From prompts to groups of rollouts, by the run's engine."""

import logging
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import Prompt, as_group
from lowmem_grpo.engines.base import Engine, Meanwhile, OnGroup
from lowmem_grpo.engines.pace import Pace
from lowmem_grpo.engines.rounds import takes
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.memory.bounds import RunMemory
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.runs.clock import Clock
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import Rollout, RolloutGroup

logger = logging.getLogger(__name__)


class Player(Protocol):
    """What plays episodes with an engine: `Episodes`, or a caller's own function."""

    waited: float  # seconds of the last batch in which there was nothing to decode

    def play(
        self, engine: Engine, prompts: list[Prompt], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        """`params.n` rollouts of each prompt. The prompts get the ids that the policy got."""
        ...


class Sampler:
    """Samples with the caller's engine, or with the model's own, which it asks for again before each call."""

    def __init__(
        self, model: FastPeftModel, policy: Policy, tokenizer: PreTrainedTokenizerBase, memory: RunMemory,
        state: TrainerState, clock: Clock, engine: Engine, given: bool,
    ) -> None:
        """`engine` is the first one to use; `given` says that it is the caller's own, which stays."""
        self.model, self.policy, self.tokenizer = model, policy, tokenizer
        self.memory, self.state, self.clock = memory, state, clock
        self.engine, self.given = engine, given
        self.said = False  # that the engine reports no finished groups
        self.said_padding = False  # that ids without a text were sampled
        self.player: Player | None = None  # where a prompt is answered in several turns

    def renew(self) -> None:
        """Ask for the model's engine again: a process has only one of vLLM, and another model may have used it."""
        if self.given or self.engine.name != "vllm":
            return
        engine = self.model.engine(self.policy, self.tokenizer)
        if engine is not self.engine:
            self.engine = engine
            self.memory.watch(engine)
            engine.on_policy_update(self.state.policy_version)

    def sample(
        self, prompts: list[Prompt], params: SamplingParams, on_group: OnGroup | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[RolloutGroup]:
        """`params.n` rollouts of each prompt by the current policy, without rewards; `on_group` gets those of each
        prompt while others are sampled, and `meanwhile` is called between two steps of decoding."""
        with self.clock.phase("generate"):
            self.renew()
            self.pace()  # not what was sampled in between, as for an evaluation
            told: dict[str, Any] = {"on_group": on_group} if on_group is not None and self.tells() else {}
            told |= {} if meanwhile is None else {"meanwhile": meanwhile}
            if self.player is not None:
                completions = self.player.play(self.engine, prompts, params, on_group)
                self.clock.tools = (self.clock.tools or 0.0) + self.player.waited
            else:
                completions = self.engine.generate([prompt.ids for prompt in prompts], params, **told)
            self.engine.sleep()
        self.say_padding([rollout.completion_ids for each in completions for rollout in each])
        return [as_group(prompt, rollouts) for prompt, rollouts in zip(prompts, completions, strict=True)]

    def say_padding(self, completions: list[list[int]]) -> None:
        """Warn once of sampled ids for which the tokenizer has no token: those of rows that pad the model's vocabulary.
        Leaving them out in the sampler alone would make its distribution another than the trained one."""
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
        """Where the engine's time went since this was asked last; nothing of an engine that does not measure it."""
        pace: Pace | None = getattr(self.engine, "pace", None)
        return Pace() if pace is None else pace.take()

    def tells(self) -> bool:
        """Whether the engine can report finished groups; if it cannot, one warning says so."""
        if not self.given or takes(self.engine.generate, "on_group"):
            return True
        if not self.said:
            logger.warning(
                "the engine %s does not report finished groups (its generate takes no on_group), so all "
                "rewards are computed after sampling; score_while_sampling=False does so without this warning",
                self.engine.name,
            )
            self.said = True
        return False

