"""How long answers are: all alike, or as reasoning answers to competition mathematics are.

The long-tailed law is fitted to what the data set 96kevinli29/SFT-Math-45k states of its 45,000 answers by DeepSeek-R1
(from open-r1/OpenR1-Math-220k), in characters: half of them have at most 12,980, nine tenths 32,888, 99 of 100 have
50,593, the longest 59,996, the mean is 16,254. A log-normal law through the first two, cut at the longest, has a mean
of 16,500 and 59,996 at 99 of 100. Only ratios are used here, so that characters stand for tokens.
"""

import random
from math import exp, log
from statistics import NormalDist, fmean

MEDIAN, NINE_TENTHS, LONGEST = 12_980, 32_888, 59_996
SPREAD = log(NINE_TENTHS / MEDIAN) / NormalDist().inv_cdf(0.9)


def characters(share: float) -> float:
    """So many at most have this share of the answers."""
    return min(LONGEST, MEDIAN * exp(SPREAD * NormalDist().inv_cdf(share)))


def long_tail(count: int, longest: int, seed: int = 0) -> list[int]:
    """Tokens of so many answers, the longest of which has `longest`: evenly spaced quantiles, in a random order."""
    found = [characters((number + 0.5) / count) for number in range(count)]
    scaled = [max(1, round(longest * one / found[-1])) for one in found]
    random.Random(seed).shuffle(scaled)
    return scaled


def even(count: int, longest: int) -> list[int]:
    """As many answers, all as long as those are on average."""
    return [round(fmean(long_tail(count, longest)))] * count
