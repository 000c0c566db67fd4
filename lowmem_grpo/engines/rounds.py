"""Turns of episodes by a caller's engine that only has `generate`: all that are ready, then all that follow."""

import logging
from dataclasses import replace
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import CONVERSE, ON_GROUP, Conversation, Request, capabilities_of
from lowmem_grpo.engines.decoding import cut_at_stop
from lowmem_grpo.types import Rollout

logger = logging.getLogger(__name__)


def converse(engine: Any, conversation: Conversation, params: SamplingParams,
             tokenizer: PreTrainedTokenizerBase) -> None:
    """Call `engine.converse`; an engine without it decodes the turns in rounds, and a warning says so once."""
    if CONVERSE in capabilities_of(engine):
        engine.converse(conversation, params)
        return
    say(str(getattr(engine, "name", type(engine).__name__)))
    in_rounds(engine, conversation, params, tokenizer)


def in_rounds(engine: Any, conversation: Conversation, params: SamplingParams,
              tokenizer: PreTrainedTokenizerBase) -> None:
    while requests := conversation.next_requests(busy=False):
        decode(engine, requests, conversation, params, tokenizer)


@cache
def say(name: str) -> None:
    logger.warning("the engine %s has no converse(conversation, params) among its capabilities, so generate decodes "
                   "its turns in rounds: the slowest of a round holds up the others, and each turn computes its whole "
                   "history again. See lowmem_grpo/engines/base.py for what converse does", name)


def decode(engine: Any, requests: list[Request], conversation: Conversation, params: SamplingParams,
           tokenizer: PreTrainedTokenizerBase) -> None:
    """Decode one round. What it samples depends on its requests only: they share the seed of the first. `generate` has
    one limit of tokens for all, so longer completions than a turn may have are cut."""
    most = max(request.max_tokens for request in requests)
    shared = replace(params, n=1, max_tokens=most, seed=requests[0].seed, part=None)

    def give(index: int, rollouts: list[Rollout]) -> None:
        request = requests[index]
        conversation.add_rollout(request.key, within(rollouts[0], request.max_tokens, params, tokenizer))

    prompts = [request.ids for request in requests]
    if ON_GROUP in capabilities_of(engine):
        engine.generate(prompts, shared, give)
    else:
        for index, rollouts in enumerate(engine.generate(prompts, shared)):
            give(index, rollouts)


def within(rollout: Rollout, most: int, params: SamplingParams, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    if len(rollout.completion_ids) <= most:
        return rollout
    ids = rollout.completion_ids[:most]
    text = str(tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens))
    surplus = len(rollout.completion_ids) - most
    routes = None if rollout.routes is None else rollout.routes.cut(0, len(rollout.routes) - surplus)
    return replace(rollout, completion_ids=ids, rollout_logprobs=rollout.rollout_logprobs[:most],
                   finish_reason="length", text=cut_at_stop(text, params), routes=routes)
