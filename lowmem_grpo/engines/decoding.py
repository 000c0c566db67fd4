"""Sampling the next token, with separate random numbers for each row, and ending completions. Also sampling of several
turns with a user-supplied engine that only has `generate`: each round decodes all turns that are ready."""

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import CONVERSE, ON_GROUP, Conversation, Request, capabilities_of
from lowmem_grpo.kernels.draw_tokens import draw_tokens
from lowmem_grpo.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

STEPS = 256  # positions per block of random numbers
HELD = 4  # blocks (R, STEPS) held; a dropped block is regenerated with the same numbers

Uniforms = Callable[[Tensor, Tensor], Tensor]  # (rows (B,), positions (B, S)) -> (B, S) fp64 from [0, 1)


def budget_of(prompt: list[int], most: int, max_seq_length: int) -> int:
    """Return the most tokens a completion of this prompt may have, given a limit of `most`. ValueError if `most` is
    below 1, or the prompt is empty or fills the context."""
    room = max_seq_length - len(prompt)
    if most < 1:
        raise ValueError(f"a completion of at most {most} tokens is asked for; ask for at least one")
    if not prompt:
        raise ValueError("a prompt has no tokens; give it at least one, for example a start token")
    if room < 1:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens leaves no room in a context of {max_seq_length}; "
            "load with a larger max_seq_length or shorten the prompt"
        )
    return min(most, room)


def first_stop(text: str, params: SamplingParams) -> tuple[int, str] | None:
    """Return the index and the text of the first stop string; None if there is none."""
    return min(((text.index(stop), stop) for stop in params.stop_strings if stop in text), default=None)


def cut_at_stop(text: str, params: SamplingParams) -> str:
    """Return the text before the first stop string; with `include_stop_str_in_output`, the stop string is included."""
    start, stop = first_stop(text, params) or (len(text), "")
    return text[: start + len(stop)] if params.include_stop_str_in_output else text[:start]


class StopCriteria:
    """The end tokens and stop strings of a call."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", params: SamplingParams, eos_ids: list[int],
                 device: torch.device) -> None:
        self.tokenizer, self.texts = tokenizer, params.stop_strings
        ids = [*(params.stop_token_ids or []), *([] if params.ignore_eos else eos_ids)]
        self.ids = torch.tensor(ids, dtype=torch.long, device=device)
        self.reach = max((len(text.encode()) for text in self.texts), default=0) + 4  # tokens; one may be a single byte

    def ends(self, tokens: Tensor, last_tokens: Callable[[int], list[list[int]]]) -> Tensor:
        """Return a mask (B, k), True for tokens (B, k) that end their completion. Stop strings are searched for in the
        last tokens of each row, which `last_tokens(count)` returns."""
        ended = (tokens[..., None] == self.ids).any(-1)  # `isin` may sort, which synchronizes with the device
        if not self.texts:
            return ended
        texts = self.tokenizer.batch_decode(last_tokens(self.reach))
        matches = [any(stop in text for stop in self.texts) for text in texts]
        return ended | torch.tensor(matches, device=ended.device)[:, None]


def shared_numbers(seed: int, count: int, device: torch.device, part: tuple[int, int] | None = None) -> Uniforms:
    """Return a function from rows (B,) and positions (B, A) to random numbers (B, A), for a call of `count` rows. A
    number depends only on the seed, the row and the position, so a completion does not depend on how its row was
    batched or interrupted. If the call is a part of a larger call of N rows, `part` = (F, N) gives its row 0 the
    numbers of row F of the larger call, and so on."""
    first, whole = part or (0, count)

    @lru_cache(HELD)
    def block(index: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(random.Random(f"{seed}-{index}").getrandbits(62))
        made = torch.rand(whole, STEPS, dtype=torch.float64, device=device, generator=generator)
        return made[first : first + count]

    def numbers(rows: Tensor, places: Tensor) -> Tensor:
        drawn = torch.zeros(places.shape, dtype=torch.float64, device=device)
        for index in (places // STEPS).unique().tolist():
            here = block(index)[rows[:, None], places % STEPS]
            drawn = torch.where(places // STEPS == index, here, drawn)
        return drawn

    return numbers


def own_numbers(seeds: list[int], width: int, device: torch.device) -> Uniforms:
    """Return a function as `shared_numbers` does, for rows of `width` positions that each have their own seed."""
    table = torch.zeros(len(seeds), width, dtype=torch.float64)
    for row, seed in enumerate(seeds):
        table[row].uniform_(generator=torch.Generator().manual_seed(seed))
    table = table.to(device)
    return lambda rows, places: table[rows[:, None], places]


def request_numbers(seeds: list[int], width: int, device: torch.device) -> Uniforms:
    """Return a function as `shared_numbers` does, for prompts of which each has n rows with these n seeds."""
    numbers = own_numbers(seeds, width, device)
    return lambda rows, places: numbers(rows % len(seeds), places)


def draw(logits: Tensor, params: SamplingParams, uniform: Tensor,
         never: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw tokens (B,) from logits (B, V) fp32; returns them and their log-probabilities (B,).

    Inverse-CDF sampling uses one number per row from [0, 1), `uniform` (B, 1) fp64, and never draws a token of
    probability 0. Log-probabilities include temperature and truncation. Greedy decoding (temperature 0) reports those
    at temperature 1. Tokens in `never` (n,) are not drawn, but counted: log-probabilities are the policy's own.
    """
    if never is not None:
        tokens, logprobs = draw(logits.index_fill(1, never, -torch.inf), params, uniform)
        whole = (logits / (params.temperature or 1.0)).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        return tokens, logprobs if params.truncates else whole
    if params.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    if not (params.top_k > 0 or params.top_p < 1 or params.min_p):
        drawn: tuple[Tensor, Tensor] = draw_tokens(logits, uniform, params.temperature)
        return drawn
    drawn = draw_tokens(truncate(logits / params.temperature, params), uniform, 1.0)
    return drawn


def truncate(logits: Tensor, params: SamplingParams) -> Tensor:
    """Set the logits that top_k, then top_p, then min_p exclude to -inf (transformers' order)."""
    if params.top_k > 0:
        kth = logits.topk(min(params.top_k, logits.shape[-1]), -1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= params.top_p  # the most likely token always stays
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    if params.min_p:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits


def converse(engine: Any, conversation: Conversation, params: SamplingParams,
             tokenizer: "PreTrainedTokenizerBase") -> None:
    """Call `engine.converse`; if the engine lacks it, decode the turns in rounds with `generate`, and warn once."""
    if CONVERSE in capabilities_of(engine):
        engine.converse(conversation, params)
        return
    warn_of_rounds(str(getattr(engine, "name", type(engine).__name__)))
    in_rounds(engine, conversation, params, tokenizer)


def in_rounds(engine: Any, conversation: Conversation, params: SamplingParams,
              tokenizer: "PreTrainedTokenizerBase") -> None:
    """Decode turns with `generate`, one call for each round of all turns that are ready. A round uses the seed of its
    first turn, so the result depends only on the requests. It uses the largest `max_tokens` of its turns, and longer
    completions are cut to each turn's own limit."""
    requests: list[Request]

    def give(index: int, rollouts: list[Rollout]) -> None:
        request = requests[index]
        conversation.add_rollout(request.key, cut_rollout(rollouts[0], request.max_tokens, params, tokenizer))

    while requests := conversation.next_requests(busy=False):
        most = max(request.max_tokens for request in requests)
        shared = replace(params, n=1, max_tokens=most, seed=requests[0].seed, part=(0, len(requests)))
        tells = ON_GROUP in capabilities_of(engine)
        groups = engine.generate([request.ids for request in requests], shared, *([give] if tells else []))
        for index, rollouts in enumerate([] if tells else groups):
            give(index, rollouts)


@cache
def warn_of_rounds(name: str) -> None:
    logger.warning("the engine %s has no converse(conversation, params) among its capabilities, so generate decodes "
                   "its turns in rounds: the slowest of a round holds up the others, and each turn computes its whole "
                   "history again. See lowmem_grpo/engines/base.py for what converse does", name)


def cut_rollout(rollout: Rollout, most: int, params: SamplingParams, tokenizer: "PreTrainedTokenizerBase") -> Rollout:
    if len(rollout.completion_ids) <= most:
        return rollout
    ids = rollout.completion_ids[:most]
    text = str(tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens))
    surplus = len(rollout.completion_ids) - most
    routes = None if rollout.routes is None else rollout.routes.cut(0, len(rollout.routes) - surplus)
    return replace(rollout, completion_ids=ids, rollout_logprobs=rollout.rollout_logprobs[:most],
                   finish_reason="length", text=cut_at_stop(text, params), routes=routes)
