"""Confidence intervals of a measured accuracy: Wilson intervals, pass@k, and the paired difference of two models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Z_95 = 1.959964  # the normal distribution's 97.5% quantile
# (right before, right after) in the order in which examples are shown; None is unknown
KINDS = ((False, True), (True, False), (False, False), (True, True), (None, None))


def wilson_interval(accuracy: float, problems: float) -> tuple[float, float]:
    """Return the 95% Wilson score interval of an accuracy (Wilson, 1927); (0, 1) if `problems` is less than 1."""
    if problems < 1:
        return 0.0, 1.0
    spread = Z_95**2 / problems
    center = (accuracy + spread / 2) / (1 + spread)
    half = Z_95 / (1 + spread) * math.sqrt(accuracy * (1 - accuracy) / problems + spread / (4 * problems))
    return max(0.0, center - half), min(1.0, center + half)


def accuracy_interval(right: Sequence[int], samples: int) -> tuple[float, tuple[float, float]]:
    """Return the accuracy and its 95% interval; `right` (P,) counts each prompt's right answers out of `samples`."""
    shares = [count / samples for count in right]
    mean = sum(shares) / len(shares)
    return mean, wilson_interval(mean, independent_answers(shares, samples))


def independent_answers(shares: Sequence[float], samples: int) -> float:
    """Return the effective number of independent answers (Kish's effective sample size): P if the answers to each
    prompt agree, up to P * samples if they differ as much as answers to different prompts."""
    prompts = len(shares)
    mean = sum(shares) / prompts
    if samples == 1 or prompts == 1:
        return prompts
    variance = sum((share - mean) ** 2 for share in shares) / (prompts - 1) / prompts
    size = mean * (1 - mean) / variance if variance > 0 else prompts
    return min(max(size, prompts), prompts * samples)


def pass_at_k(right: Sequence[int], samples: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k answers to a prompt is right: the mean over prompts of
    1 - C(n - c, k) / C(n, k) for c right answers of n (Chen et al. 2021, arXiv 2107.03374)."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs k from 1 to the {samples} answers of a prompt; take more of them")
    ways = math.comb(samples, k)
    return sum(1 - math.comb(samples - count, k) / ways for count in right) / len(right)


def paired_difference(before: Sequence[int], after: Sequence[int], samples: int) -> tuple[float, tuple[float, float]]:
    """Return the difference of the accuracies on the same prompts, and its 95% interval, for which half a prompt is
    added to each of four outcomes: right both times, only before, only after, never (Agresti and Min, 2005)."""
    differences = [(new - old) / samples for old, new in zip(before, after, strict=True)]
    count = len(differences) + 2
    center = sum(differences) / count
    variance = (sum(d * d for d in differences) + 1) / count - center**2
    half = Z_95 * math.sqrt(variance / count)
    return sum(differences) / len(differences), (max(-1.0, center - half), min(1.0, center + half))


def interval_text(interval: Sequence[float]) -> str:
    low, high = interval
    return f"95% interval {100 * low:+.1f} to {100 * high:+.1f}"


def powers_of_two(samples: int) -> list[int]:
    powers = [2**power for power in range(samples.bit_length()) if 2**power < samples]
    return [*powers, samples]


@dataclass
class Answers:
    """The judged answers of one model: n to each of P prompts."""

    texts: list[list[str]]  # (P, n)
    right: list[list[bool]]  # (P, n)
    unjudged: int  # answers that could not be judged, counted as wrong
    tokens: int
    cut_off: int  # answers that ended at max_tokens
    metrics: dict[str, float]  # mean of each other reward function
    episodes: dict[str, float] = field(default_factory=dict)  # for agents: turns, endings by reason, tool calls

    @classmethod
    def joined(cls, parts: Sequence["Answers"]) -> "Answers":
        """Concatenate parts, each with the answers to some prompts. Means are weighted by the number of prompts."""
        sizes = [len(part.texts) for part in parts]

        def means(each: list[dict[str, float]]) -> dict[str, float]:
            return {name: sum(size * metrics[name] for size, metrics in zip(sizes, each, strict=True)) / sum(sizes)
                    for name in each[0]} if all(metrics.keys() == each[0].keys() for metrics in each) else {}

        return parts[0] if len(parts) == 1 else cls(
            [texts for part in parts for texts in part.texts], [right for part in parts for right in part.right],
            sum(part.unjudged for part in parts), sum(part.tokens for part in parts),
            sum(part.cut_off for part in parts), means([part.metrics for part in parts]),
            means([part.episodes for part in parts]),
        )

    @property
    def counts(self) -> list[int]:
        """The number of right answers to each prompt (P,)."""
        return [sum(row) for row in self.right]

    @property
    def accuracy(self) -> float:
        return sum(self.counts) / sum(map(len, self.right))


def described(answers: Answers, ks: list[int]) -> dict[str, Any]:
    """Return one model's results as plain values, such as accuracy with interval, pass@k for all `ks`, and tokens."""
    samples = len(answers.right[0])
    share, interval = accuracy_interval(answers.counts, samples)
    total = samples * len(answers.right)
    return {"accuracy": share, "interval": list(interval),
            "pass_at_k": {str(k): pass_at_k(answers.counts, samples, k) for k in ks},
            "mean_tokens": answers.tokens / total, "cut_off": answers.cut_off / total,
            "unjudged": answers.unjudged / total, **({"rewards": answers.metrics} if answers.metrics else {}),
            **({"episodes": answers.episodes} if answers.episodes else {})}


def compared(base: Answers, adapter: Answers) -> dict[str, Any]:
    """Return the change from base to adapter on the same prompts: accuracy, and prompts that got better or worse."""
    samples = len(base.right[0])
    change, interval = paired_difference(base.counts, adapter.counts, samples)
    pairs = list(zip(base.counts, adapter.counts, strict=True))
    return {"accuracy": change, "interval": list(interval), "better": sum(new > old for old, new in pairs),
            "worse": sum(new < old for old, new in pairs), "same": sum(new == old for old, new in pairs)}


def accuracy_by_kind(kinds: Sequence[str | Sequence[str]], before: Answers, after: Answers) -> dict[str, Any]:
    """Return the accuracies before and after on the prompts of each kind; a prompt may have several kinds."""
    places: dict[str, list[int]] = {}
    for place, each in enumerate(kinds):
        for kind in [each] if isinstance(each, str) else each:
            places.setdefault(kind, []).append(place)
    return {kind: {"problems": len(those), **{
        when: sum(sum(answers.right[place]) for place in those) / sum(len(answers.right[place]) for place in those)
        for when, answers in (("before", before), ("after", after))}} for kind, those in sorted(places.items())}


def answered_rows(rows: list[dict[str, Any]], by_model: dict[str, Answers]) -> list[dict[str, Any]]:
    """Return each row's plain values, with each model's answers under the model's name."""
    return [
        {name: value for name, value in row.items() if isinstance(value, str | int | float | list | bool | None)} | {
            model: [{"text": text, "right": right} for text, right in zip(
                answers.texts[index], answers.right[index], strict=True)]
            for model, answers in by_model.items()
        }
        for index, row in enumerate(rows)
    ]


def changed_first(pairs: Sequence[tuple[bool, bool]], shown: int) -> list[int]:
    """Return at most `shown` indices of pairs (right before, right after), in about equal numbers for each of KINDS."""
    kinds = [[place for place, pair in enumerate(pairs) if pair == kind] for kind in KINDS]
    some = [place for kind in kinds for place in kind[: max(1, shown // len(KINDS))]][:shown]
    rest = [place for kind in kinds for place in kind if place not in some][: shown - len(some)]
    return sorted([*some, *rest], key=lambda place: (KINDS.index(pairs[place]), place))
