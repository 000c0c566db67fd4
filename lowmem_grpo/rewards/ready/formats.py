"""Rewards for the form of a completion: its tags, its length, and repetition."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from lowmem_grpo.rewards.reward import Reward, TextReward, TextVerifier, TokenReward, VerifiedReward
from lowmem_grpo.types import repeated_share
from lowmem_grpo.utils import at_least, number, one_of, require

THOUGHT = ("<think>", "</think>")
REASONING_TAGS = ("<start_working_out>", "<end_working_out>", "<SOLUTION>", "</SOLUTION>")


def format_match(tags: tuple[str, ...] = REASONING_TAGS, opened: bool = False) -> TextVerifier:
    """Return a verifier: each tag occurs once, in order, with text inside each pair and only white space at the end.

    `tags` are pairs: opening, closing, opening, closing, ... If `tags` is ("<think>", "</think>"), any text may follow,
    and the thought may be empty, as in TRL's `think_format_reward`. With `opened`, the prompt ends with the first tag,
    so the completion does not have it. ValueError for an odd number of tags, or if a tag is part of another.
    """
    return TextVerifier("format_match", keeps_format, tags=checked(tags), opened=opened)


def format_kept(
    right: float = 3.0, wrong: float = 0.0, tags: tuple[str, ...] = REASONING_TAGS, opened: bool = False
) -> VerifiedReward:
    """Return the reward of `format_match`: `right` if the completion has the whole format, else `wrong`."""
    return format_match(tags, opened).reward(right, wrong, "format_kept")


def tags_counted(
    once: float = 0.5, otherwise: float = -1.0, tags: tuple[str, ...] = REASONING_TAGS, opened: bool = False
) -> TextReward:
    """Return a reward that is a sum over the tags: `once` for a tag that occurs exactly once, else `otherwise`."""
    return TextReward("tags_counted", pay_tags, tags=checked(tags), opened=opened, once=once, otherwise=otherwise)


def pay_tags(text: str, tags: tuple[str, ...], opened: bool, once: float, otherwise: float) -> float:
    return float(sum(once if text.count(tag) == 1 else otherwise for tag in tags[opened:]))


def keeps_format(text: str, tags: tuple[str, ...], opened: bool) -> bool:
    """Return whether a text has the format, in linear time."""
    complete = tags[0] + text if opened else text
    if tags == THOUGHT:
        return complete.startswith(tags[0]) and complete.count(tags[0]) == 1 and tags[1] in complete
    if any(complete.count(tag) != 1 for tag in tags):
        return False
    parts: list[str] = []
    for tag in tags:
        before, mark, complete = complete.partition(tag)
        if not mark:
            return False
        parts.append(before)
    return not complete.strip() and all(part.strip() for part in parts[1::2])


def checked(tags: tuple[str, ...]) -> tuple[str, ...]:
    """Return the tags; ValueError unless they are pairs of strings, none of which is part of another."""
    if not isinstance(tags, list | tuple) or not tags or len(tags) % 2 or not all(
            isinstance(tag, str) and tag for tag in tags):
        raise ValueError(f"tags is {tags!r}; give an even number of strings: opening, closing, opening, closing, ...")
    overlapping = [(a, b) for i, a in enumerate(tags) for j, b in enumerate(tags) if i != j and a in b]
    if overlapping:
        raise ValueError(f"tags are counted, and {overlapping[0][0]!r} is part of {overlapping[0][1]!r}; use others")
    return tuple(tags)


UNITS: dict[str, Callable[[Any], int]] = {
    "tokens": len, "words": lambda text: len(text.split()), "characters": len}


def length_near(target: int, spread: int, unit: str = "tokens") -> Reward:
    """Return a reward that is 1 at the length `target` and falls linearly to 0 at a distance of `spread` units."""
    require("target", target, at_least(0, int))
    require("spread", spread, at_least(1, int))
    return measured("length_near", pay_near, unit, target=target, spread=spread)


def pay_near(completion: Any, unit: str, target: int, spread: int) -> float:
    return max(0.0, 1.0 - abs(UNITS[unit](completion) - target) / spread)


def too_long(longest: int, unit: str = "tokens", pay: float = -1.0) -> Reward:
    """Return a reward that pays `pay` for a completion of more than `longest` units, else 0."""
    require("longest", longest, at_least(0, int))
    return measured("too_long", pay_excess, unit, longest=longest, pay=pay)


def pay_excess(completion: Any, unit: str, longest: int, pay: float) -> float:
    return pay if UNITS[unit](completion) > longest else 0.0


def measured(name: str, rule: Callable[..., float], unit: str, **settings: Any) -> Reward:
    """Return a reward that applies `rule` to the length of completions in `unit`. ValueError for an unknown unit."""
    require("unit", unit, one_of(*UNITS))
    return (TokenReward if unit == "tokens" else TextReward)(name, rule, unit=unit, **settings)


def soft_overlong_penalty(max_completion_length: int, cache_length: int) -> Callable[..., list[float]]:
    """Return a reward function that penalises only length (DAPO, arXiv 2503.14476, equation 13). For C tokens:

        0                                    C <= max_completion_length - cache_length
        (max - cache - C) / cache            up to max_completion_length: from 0 down to -1
        -1                                   above

    With the run's own `max_completion_length`, a truncated completion gets -1. ValueError unless 1 <= cache_length <=
    max_completion_length.
    """
    require("max_completion_length", max_completion_length, at_least(1, int))
    require("cache_length", cache_length, at_least(1, int))
    if cache_length > max_completion_length:
        raise ValueError(f"cache_length is {cache_length}; it must be at most max_completion_length "
                         f"({max_completion_length}), a fifth of it is usual")
    free = max_completion_length - cache_length

    def soft_overlong_reward_func(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        over = [min(max(len(ids) - free, 0), cache_length) for ids in completion_ids]
        return [-tokens / cache_length if tokens else 0.0 for tokens in over]

    return soft_overlong_reward_func


def repetition_penalty(ngram: int = 4, worst: float = -1.0) -> TokenReward:
    """Return a reward: `worst` times the share of a completion's token n-grams that repeat an earlier one (arXiv
    2502.03373), 0 with fewer than `ngram` tokens. ValueError for a positive `worst`."""
    require("ngram", ngram, at_least(1, int))
    require("worst", worst, number("finite, and 0 or below", lambda value: -math.inf < value <= 0))
    return TokenReward("repetition_penalty", pay_repetition, ngram=ngram, worst=worst)


def pay_repetition(ids: list[int], ngram: int, worst: float) -> float:
    return worst * share if (share := repeated_share(ids, ngram)) else 0.0
