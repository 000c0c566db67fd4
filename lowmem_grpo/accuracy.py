"""How sure a measured accuracy is: Wilson intervals, pass@k, and the difference of two models on the same prompts.

P prompts with n answers each. Answers to one prompt are alike: a hundred answers to one prompt say little about the
next prompt, so an interval counts prompts, and answers only as far as they differ from each other within a prompt.
"""

import math
from collections.abc import Sequence

Z_95 = 1.959964  # the normal distribution's 97.5% quantile


def wilson_interval(accuracy: float, problems: float) -> tuple[float, float]:
    """The 95% Wilson score interval of a share seen on so many problems (Wilson, 1927); 0 to 1 below one of them."""
    if problems < 1:
        return 0.0, 1.0
    spread = Z_95**2 / problems
    center = (accuracy + spread / 2) / (1 + spread)
    half = Z_95 / (1 + spread) * math.sqrt(accuracy * (1 - accuracy) / problems + spread / (4 * problems))
    return max(0.0, center - half), min(1.0, center + half)


def accuracy_interval(right: Sequence[int], samples: int) -> tuple[float, tuple[float, float]]:
    """Share of right answers and its 95% interval; `right` (P,) counts those of each prompt, out of `samples`."""
    shares = [count / samples for count in right]
    mean = sum(shares) / len(shares)
    return mean, wilson_interval(mean, independent_answers(shares, samples))


def independent_answers(shares: Sequence[float], samples: int) -> float:
    """How many independent answers tell as much as these (Kish's effective size): from P, where all answers to a prompt
    agree, to P * samples, where they differ as much as answers to other prompts."""
    prompts = len(shares)
    mean = sum(shares) / prompts
    if samples == 1 or prompts == 1:
        return prompts
    variance = sum((share - mean) ** 2 for share in shares) / (prompts - 1) / prompts
    size = mean * (1 - mean) / variance if variance > 0 else prompts
    return min(max(size, prompts), prompts * samples)


def pass_at_k(right: Sequence[int], samples: int, k: int) -> float:
    """Chance that one of k answers to a prompt is right, without bias: the mean over prompts of
    1 - C(n - c, k) / C(n, k) for c right answers of n (Chen et al. 2021, arXiv 2107.03374)."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs k from 1 to the {samples} answers of a prompt; take more of them")
    ways = math.comb(samples, k)
    return sum(1 - math.comb(samples - count, k) / ways for count in right) / len(right)


def paired_difference(
    before: Sequence[int], after: Sequence[int], samples: int
) -> tuple[float, tuple[float, float]]:
    """Difference of the accuracies on the same prompts, and its 95% interval.

    Two prompts' worth is added as half a success either way and one without a difference (Agresti and Min, 2005), so
    that the interval keeps a width where all prompts agree.
    """
    differences = [(new - old) / samples for old, new in zip(before, after, strict=True)]
    count = len(differences) + 2
    center = sum(differences) / count
    variance = (sum(d * d for d in differences) + 1) / count - center**2
    half = Z_95 * math.sqrt(variance / count)
    return sum(differences) / len(differences), (max(-1.0, center - half), min(1.0, center + half))


def powers_of_two(samples: int) -> list[int]:
    """1, 2, 4 ... up to `samples`, which is the last."""
    found = [2**power for power in range(samples.bit_length()) if 2**power < samples]
    return [*found, samples]
