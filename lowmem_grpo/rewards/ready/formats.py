"""Tag formats: a verifier of the whole format, and a reward for each tag."""

import functools

from lowmem_grpo.rewards.reward import TextReward
from lowmem_grpo.rewards.verifier import TextVerifier, VerifiedReward

THOUGHT = ("<think>", "</think>")
REASONING_TAGS = ("<start_working_out>", "<end_working_out>", "<SOLUTION>", "</SOLUTION>")


def format_match(tags: tuple[str, ...] = REASONING_TAGS, opened: bool = False) -> TextVerifier:
    """Return a verifier: each tag occurs once and in this order, with text inside each pair and only white space after
    the last tag.

    `tags` are pairs: opening, closing, opening, closing, ... After ("<think>", "</think>") alone any text may follow,
    and the thought may be empty, as in TRL's `think_format_reward`. With `opened` the prompt ends with the first tag,
    as in chat templates for reasoning, and the completion continues after it. ValueError for an odd number of tags, or
    tags that are equal or part of each other.
    """
    return TextVerifier("format_match", functools.partial(keeps_format, tags=checked(tags), opened=opened))


def format_kept(
    right: float = 3.0, wrong: float = 0.0, tags: tuple[str, ...] = REASONING_TAGS, opened: bool = False
) -> VerifiedReward:
    """Return the reward of `format_match`: `right` if the completion has the whole format, else `wrong`."""
    return format_match(tags, opened).reward(right, wrong, "format_kept")


def tags_counted(
    once: float = 0.5, otherwise: float = -1.0, tags: tuple[str, ...] = REASONING_TAGS, opened: bool = False
) -> TextReward:
    """Return a reward: for each tag `once` if it occurs exactly once, else `otherwise`; a step towards the format."""
    counted = checked(tags)[1 if opened else 0 :]
    return TextReward("tags_counted", functools.partial(pay_tags, tags=counted, amounts=(once, otherwise)))


def pay_tags(text: str, tags: tuple[str, ...], amounts: tuple[float, float]) -> float:
    return float(sum(amounts[0] if text.count(tag) == 1 else amounts[1] for tag in tags))


def keeps_format(text: str, tags: tuple[str, ...], opened: bool) -> bool:
    """Return whether a text has the format, in linear time: each tag is counted, then the text is split at each."""
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
    if isinstance(tags, str) or not tags or len(tags) % 2 or not all(isinstance(tag, str) and tag for tag in tags):
        raise ValueError(f"tags is {tags!r}; give an even number of strings: opening, closing, opening, closing, ...")
    overlapping = [(a, b) for i, a in enumerate(tags) for j, b in enumerate(tags) if i != j and a in b]
    if overlapping:
        raise ValueError(f"tags are counted, and {overlapping[0][0]!r} is part of {overlapping[0][1]!r}; use others")
    return tuple(tags)
