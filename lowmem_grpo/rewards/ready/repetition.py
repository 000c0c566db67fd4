"""A penalty on repetition."""

import functools

from lowmem_grpo.rewards.ready.lengths import whole_number
from lowmem_grpo.rewards.reward import TokenReward


def repetition_penalty(ngram: int = 4, worst: float = -1.0) -> TokenReward:
    """`worst` times the share of the completion's n-grams of tokens that occurred in it before (arXiv 2502.03373).

    0 where each occurs once, and where there are fewer than `ngram` tokens. Raises ValueError for a positive `worst`.
    """
    whole_number("ngram", ngram, 1)
    if not worst <= 0:
        raise ValueError(f"worst is {worst!r}; a penalty is 0 or below")
    return TokenReward("repetition_penalty", functools.partial(pay_repetition, ngram=ngram, worst=worst))


def pay_repetition(ids: list[int], ngram: int, worst: float) -> float:
    count = len(ids) - ngram + 1
    if count < 1:
        return 0.0
    different = len(set(zip(*(ids[start : start + count] for start in range(ngram)), strict=True)))
    return worst * (1 - different / count) if different < count else 0.0
