"""Judges learning runs: every run must learn, and settings that must agree must do so within the noise of seeds."""

from statistics import fmean
from typing import Any

from bench.learning.settings import BY_NAME

Rows = list[dict[str, Any]]
FIRST, LAST = 2, 5  # steps whose means are the beginning and the end of a run
LEAST_GAIN = 0.15  # in the share of right answers, of every run
ERRORS = 2.5  # standard errors that two settings may differ by


def beginning(row: dict[str, Any]) -> float:
    """Share of right answers in the first steps."""
    return fmean(row["right"][:FIRST])


def end(row: dict[str, Any]) -> float:
    """Share of right answers in the last steps."""
    return fmean(row["right"][-LAST:])


def by_setting(rows: Rows) -> dict[str, Rows]:
    """The finished runs of each setting, in the order of the settings."""
    found: dict[str, Rows] = {name: [] for name in BY_NAME}
    for row in rows:
        if "missing" not in row and row["setting"] in found:
            found[row["setting"]].append(row)
    return {name: kept for name, kept in found.items() if kept}


def seed_deviation(rows: Rows) -> float:
    """Standard deviation of `end` over seeds, pooled over the settings."""
    squares, freedom = 0.0, 0
    for kept in by_setting(rows).values():
        mean = fmean(map(end, kept))
        squares += sum((end(row) - mean) ** 2 for row in kept)
        freedom += len(kept) - 1
    return (squares / max(freedom, 1)) ** 0.5


def distance(rows: Rows, name: str) -> tuple[float, float] | None:
    """(difference of the ends, what is allowed) between a setting and the one it must agree with."""
    found, like = by_setting(rows), BY_NAME[name].like
    if like is None or name not in found or like not in found:
        return None
    error = seed_deviation(rows) * (1 / len(found[name]) + 1 / len(found[like])) ** 0.5
    return fmean(map(end, found[name])) - fmean(map(end, found[like])), ERRORS * error


def failures(rows: Rows) -> list[str]:
    """A line for each run that is missing or did not learn, and each pair that does not agree."""
    lines = [f"{row['setting']}, seed {row['seed']}: {row['missing']}" for row in rows if "missing" in row]
    for name, kept in by_setting(rows).items():
        for row in kept:
            if end(row) - beginning(row) < LEAST_GAIN:
                lines.append(f"{name}, seed {row['seed']}: {beginning(row):.1%} -> {end(row):.1%}, so it did not learn")
        apart = distance(rows, name)
        if apart is not None and abs(apart[0]) > apart[1]:
            lines.append(f"{name}: {apart[0]:+.1%} from {BY_NAME[name].like}, allowed are {apart[1]:.1%}")
    return lines
