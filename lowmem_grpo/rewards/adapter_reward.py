"""`from_adapter`: a reward model that is an adapter with a score head on the policy's base, as RewardTrainer makes it.

It scores in the model that is trained, with the adapters exchanged, so that no second model is loaded. Prompt and
completion are rendered and tokenised as RewardTrainer does it, with the end token, also if a completion was cut off.
"""

import logging
import math
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from lowmem_grpo.data.pairs import ScoredPairEncoder
from lowmem_grpo.data.prompts import is_chat
from lowmem_grpo.models.policy import evaluating
from lowmem_grpo.models.pretrained import tokenizer_beside
from lowmem_grpo.models.score_head import AdapterSlot, group_to_score, read_reward_model, score_of_hidden
from lowmem_grpo.rewards.reward import Reward
from lowmem_grpo.runs.saved_adapter import AdapterError, find_adapter
from lowmem_grpo.types import RolloutGroup, TokenField

logger = logging.getLogger(__name__)


def from_adapter(folder: str | Path, name: str | None = None, any_base: bool = False) -> "AdapterReward":
    """A reward model in the folder of a run, a checkpoint or an adapter, for the base model that is trained."""
    return AdapterReward(folder, name, any_base)


class AdapterReward(Reward):
    """A reward function that returns the scores of an adapter on the policy's base model, once a trainer has called
    `join`. Scores that are not finite become None, with a warning."""

    after_sampling = True  # it exchanges the adapters of the model that samples
    time_limit = math.inf
    on_policys_base = True  # a trainer calls `join`, and sets `learner`
    weight_bytes = scoring_bytes = 0  # of a second model
    learner: Any = None  # the trainer's, whose micro-batches the texts are packed into

    def __init__(self, folder: str | Path, name: str | None = None, any_base: bool = False) -> None:
        """`any_base` skips the comparison of the base models' names. RunError, CheckpointError or AdapterError for a
        folder without a reward model."""
        self.folder, self.any_base = find_adapter(Path(folder).expanduser()).folder.absolute(), any_base
        read_reward_model(self.folder)  # before a model is loaded
        own = self.folder.parent.name if self.folder.name == "adapter" else self.folder.name
        super().__init__(own if name is None else name)
        self.field = TokenField("score", value=self.scored)

    def join(self, trained: Any, number: int, template_kwargs: dict[str, Any] | None = None) -> None:
        """Put the adapter on the model of a trainer, as its reward model `number`. AdapterError for another base, other
        layers, or other tokens."""
        tokenizer = tokenizer_beside(self.folder) or trained.tokenizer
        own: dict[str, int] = trained.tokenizer.get_vocab()
        if other := next((token for token, at in tokenizer.get_vocab().items() if own.get(token, at) != at), None):
            raise AdapterError(f"the reward model in {self.folder} has another tokenizer than the policy: {other!r} is "
                               f"its token {tokenizer.get_vocab()[other]}, and the policy's {own[other]}. Train it "
                               "with the policy's tokenizer")
        self.slot = AdapterSlot.of_folder(trained.policy, f"reward{number}", self.folder, any_base=self.any_base)
        ends = trained.policy.eos_token_ids(tokenizer)
        self.encoder = ScoredPairEncoder(tokenizer, trained.context, ends, template_kwargs)

    def fault_of_row(self, row: dict[str, Any]) -> str | None:
        if self.learner is None or not is_chat(row.get("prompt")) or self.encoder.tokenizer.chat_template:
            return None
        return (f"the prompt is a chat, and the tokenizer in {self.folder} has no chat template: take its files away, "
                "for the policy's tokenizer")

    def read(self, completions: list[Any]) -> list[Any]:
        return completions

    def pay(self, texts: list[Any], columns: dict[str, list[Any]], call: dict[str, Any]) -> list[float | None]:
        if self.learner is None or (prompts := call.get("prompts")) is None:
            raise TypeError(f"{self.__name__} scores in a trainer's model, and reads prompts: give it to GRPOTrainer "
                            "in reward_funcs")
        tools = call.get("tools") or [None] * len(texts)
        ids = [self.ids(prompt, *rest) for prompt, *rest in zip(prompts, texts, tools, strict=True)]
        groups = [group_to_score([ids[place] for place in same])
                  for _, same in groupby(range(len(ids)), key=lambda place: prompts[place])]
        scores = self.scores(groups)
        if wrong := sum(not math.isfinite(score) for score in scores):
            logger.warning("%s gives %d of %d completions a score that is not finite, and no reward: its adapter, or "
                           "the model's precision, overflows", self.__name__, wrong, len(scores))
        return [score if math.isfinite(score) else None for score in scores]

    def ids(self, prompt: Any, completion: Any, tools: Any = None) -> list[int]:
        """Return the tokens of a prompt with its completion."""
        parts = {"prompt": prompt, "completion": completion, "tools": tools}
        return self.encoder.tokens(parts, self.encoder.text(parts, "completion"))

    @property
    def adapter_bytes(self) -> int:
        return self.slot.nbytes

    def scored(self, outputs: Any) -> Tensor:
        return score_of_hidden(self.slot.head, outputs.hidden)

    def scores(self, groups: list[RolloutGroup]) -> list[float]:
        """Return the score of each text of the groups; micro-batches shrink if memory runs out."""
        learner = self.learner
        with self.slot.active() as policy, evaluating(policy.model):
            work = partial(learner.recompute, fields=[self.field], policy=policy)
            computed = learner.packer.run(f"scoring by {self.__name__}", groups, learner.limits, work)
        found = {id(rollout): float(values[-1]) for rollout, values in computed}
        return [found[id(rollout)] for group in groups for rollout in group.rollouts]
