"""The soft overlong penalty: completions that come near the limit are told so before they are cut off."""

from collections.abc import Callable, Sequence
from typing import Any


def soft_overlong_penalty(max_completion_length: int, cache_length: int) -> Callable[..., list[float]]:
    """A reward function that penalises length alone (DAPO, arXiv 2503.14476, equation 13), for C tokens

        0                                    C <= max_completion_length - cache_length
        (max - cache - C) / cache            up to max_completion_length: from 0 down to -1
        -1                                   above

    Give it among `reward_funcs`, with the run's own `max_completion_length`: a truncated completion then gets -1. It
    adds to the other rewards; `reward_weights` sets by how much. Raises ValueError unless
    1 <= cache_length <= max_completion_length.
    """
    for name, value in (("max_completion_length", max_completion_length), ("cache_length", cache_length)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of tokens, at least 1")
    if cache_length > max_completion_length:
        raise ValueError(
            f"cache_length is {cache_length}; it must be at most max_completion_length ({max_completion_length}), "
            "a fifth of it is usual"
        )
    free = max_completion_length - cache_length

    def soft_overlong_reward_func(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        over = [min(max(len(ids) - free, 0), cache_length) for ids in completion_ids]
        return [-tokens / cache_length if tokens else 0.0 for tokens in over]

    return soft_overlong_reward_func
