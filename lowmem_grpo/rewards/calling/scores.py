"""The results of all reward functions on a batch, put together from their calls in the order of the batch."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowmem_grpo.rewards.calling.calls import Call
from lowmem_grpo.rewards.calling.contract import as_rewards, foreign_types, is_invalid

DIGITS = 12  # of a mean over several calls: how a batch was cut into calls depends on time, but the log must not


@dataclass
class Scores:
    """The results of the functions on N completions."""

    rewards: dict[str, list[float | None]]  # (N,) for each function; None if it does not apply or was not finite
    invalid: dict[str, int]  # how many NaN and infinite values of each function became None
    extras: dict[str, list[Any]]  # (N,) for each column passed to log_extra
    metrics: dict[str, float]  # means of what log_metric got
    returned: dict[str, list[float | None]] = field(default_factory=dict)  # as `rewards`, but with NaN and infinity
    converted: dict[str, list[str]] = field(default_factory=dict)  # what each function returned beside numbers


@dataclass
class Part:
    """A finished call, the places of its completions in the batch, and what it returned for them."""

    call: Call
    places: list[int]
    rewards: list[float | None]

    @classmethod
    def of(cls, call: Call, spans: Sequence[range] | Mapping[int, range] | None) -> "Part":
        """`spans` has the places of each group; None if the call was of the whole batch. Raises RewardError for a
        result that is not a list of rewards."""
        count = len(call.completions)
        places = list(range(count)) if spans is None else [place for group in call.groups for place in spans[group]]
        return cls(call, places, as_rewards(call.name, call.future.result(), count))


def put_together(
    whole: list[Call], early: list[Call], names: list[str], spans: Sequence[range] | Mapping[int, range], count: int
) -> Scores:
    """Scores of a batch of `count` completions, whose groups are at the places `spans`, from calls of all of it and of
    some of its groups.

    Raises RewardError for a result that is not a list of rewards.
    """
    parts: dict[str, list[Part]] = {name: [] for name in names}
    for calls, cut in ((early, spans), (whole, None)):
        for call in calls:
            parts[call.name].append(Part.of(call, cut))
    returned = {name: in_order(parts[name], count) for name in names}
    return Scores(
        rewards={name: [None if is_invalid(v) else v for v in values] for name, values in returned.items()},
        invalid={name: sum(map(is_invalid, values)) for name, values in returned.items()},
        extras=extras_of([part for name in names for part in parts[name]], count),
        metrics=means_of(list(parts.values())), returned=returned,
        converted={name: sorted(kinds) for name in names if (kinds := kinds_of(parts[name]))},
    )


def in_order(parts: list[Part], count: int) -> list[float | None]:
    """The rewards of one function at their places."""
    values: list[float | None] = [None] * count
    for part in parts:
        for place, reward in zip(part.places, part.rewards, strict=True):
            values[place] = reward
    return values


def extras_of(parts: list[Part], count: int) -> dict[str, list[Any]]:
    """The columns passed to log_extra; a later function replaces a column of an earlier one."""
    extras: dict[str, list[Any]] = {}
    for part in parts:
        for column, given in part.call.recorder.extras.items():
            values = extras.setdefault(column, [None] * count)
            for place, value in zip(part.places, given, strict=True):
                values[place] = value
    return extras


def means_of(functions: list[list[Part]]) -> dict[str, float]:
    """Means of the values passed to log_metric. The values of a function's calls are weighted so that together they
    give what a single call on the whole batch would."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    cut = set()
    for parts in functions:
        for name, value, weight in weighed(parts):
            found[name].append((value, weight))
            if len(parts) > 1:
                cut.add(name)
    means = {name: sum(v * w for v, w in values) / sum(w for _, w in values) for name, values in found.items()}
    return {name: float(f"{mean:.{DIGITS}g}") if name in cut else mean for name, mean in means.items()}


def weighed(parts: list[Part]) -> Iterator[tuple[str, float, float]]:
    """(metric, value, weight) of all that one function logged. Each value of a single call counts as one, as in TRL;
    the values of several calls count as one together."""
    recorders = [part.call.recorder for part in parts]
    for name in dict.fromkeys(name for recorder in recorders for name in recorder.values):
        logged = [pair for recorder in recorders if name in recorder.values for pair in recorder.weighted(name)]
        total = sum(weight for _, weight in logged)
        for value, weight in logged:
            yield name, value, weight / total if len(parts) > 1 else 1.0


def kinds_of(parts: list[Part]) -> set[str]:
    """The types other than numbers that a function returned."""
    return {kind for part in parts for kind in foreign_types(part.call.future.result())}
