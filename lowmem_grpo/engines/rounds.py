"""Turns of episodes decoded in rounds: all that are ready together, then all that follow from them."""

from dataclasses import replace
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Conversation, Request
from lowmem_grpo.types import Rollout


def in_rounds(engine: Any, conversation: Conversation, params: SamplingParams) -> None:
    """`Engine.converse` by calls of `generate`. What a round samples depends on its requests only."""
    while requests := conversation.take(busy=False):
        most = max(request.max_tokens for request in requests)
        one = replace(params, n=1, max_tokens=most, seed=requests[0].seed)

        def give(index: int, rollouts: list[Rollout], requests: list[Request] = requests) -> None:
            request = requests[index]
            conversation.give(request.key, within(engine, rollouts[0], request.max_tokens))

        engine.generate([request.ids for request in requests], one, give)


def within(engine: Any, rollout: Rollout, most: int) -> Rollout:
    """The rollout, cut to so many tokens."""
    if len(rollout.completion_ids) <= most:
        return rollout
    ids = rollout.completion_ids[:most]
    return replace(rollout, completion_ids=ids, rollout_logprobs=rollout.rollout_logprobs[:most],
                   finish_reason="length", text=engine.tokenizer.decode(ids, skip_special_tokens=True))
