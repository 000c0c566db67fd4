"""The contract of reward functions: names, arguments, results and errors. Every failure becomes a RewardError."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

from lowmem_grpo.rewards.reward import Verifier

RewardFunction = Callable[..., Any]

RESERVED = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")  # no column may have these names
OF_EPISODES = ("environments", "turns")  # reserved too, if completions are episodes
NOT_PASSED = ("prompt", "completion", "completion_ids")  # columns not passed, as in TRL: other arguments hold them


class RewardError(RuntimeError):
    """A reward function raised an error, took too long, lacked an argument or did not return a list of rewards."""


class MissingColumnError(RewardError):
    """A reward function requires an argument that no dataset column provides."""


class TooLateError(RewardError):
    """A reward function did not return within its time limit."""


def check_function(func: Any) -> None:
    """Raise TypeError for a verifier, or any other value that cannot be called."""
    if isinstance(func, Verifier):
        raise TypeError(f"reward_funcs holds the verifier {func.name}, which says right or wrong and pays nothing; "
                        "make a reward function from it with .reward(right=1.0, wrong=0.0)")
    if not callable(func):
        raise TypeError(f"reward_funcs holds a {type(func).__name__}, which cannot be called; give a function")


def unwrap(func: Any) -> Any:
    while isinstance(func, functools.partial):
        func = func.func
    return func


def names_of(functions: list[RewardFunction]) -> list[str]:
    """Return the functions' names; a repeated name gets the first free suffix of _2, _3, ..."""
    unique: list[str] = []
    for func in map(unwrap, functions):
        name = getattr(func, "__name__", type(func).__name__)
        candidates = [name, *(f"{name}_{number}" for number in range(2, len(functions) + 1))]
        unique.append(next(candidate for candidate in candidates if candidate not in unique))
    return unique


def is_async(func: RewardFunction) -> bool:
    """Return whether a call returns a coroutine; for a callable object, its `__call__` decides."""
    func = unwrap(func)
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__)


def may_be_early(func: RewardFunction, chosen: bool | None) -> bool:
    """Return whether a function may be called during sampling; `chosen` is GRPOConfig.score_while_sampling."""
    func = unwrap(func)
    if getattr(func, "after_sampling", False) or chosen is False:
        return False
    return bool(getattr(func, "by_group", chosen))


def own_limit(func: RewardFunction) -> float | None:
    """Return the function's `time_limit` attribute, in seconds; None if it has none."""
    return getattr(unwrap(func), "time_limit", None)


def passed_columns(columns: dict[str, list[Any]], episodes: bool = False) -> dict[str, list[Any]]:
    """Return the columns that functions get. RewardError for a column with the name of another argument."""
    clashes = [name for name in columns if name in (*RESERVED, *(OF_EPISODES if episodes else ()))]
    if clashes:
        raise RewardError(f"dataset columns {clashes} have names of reward function arguments; rename them (the keys "
                          "that a rollout_func returns are columns too)")
    return {name: values for name, values in columns.items() if name not in NOT_PASSED}


def check_lengths(lists: dict[str, list[Any]], expected: int) -> None:
    """Raise RewardError for a list that does not have one entry per completion."""
    wrong = {name: len(values) for name, values in lists.items() if len(values) != expected}
    if wrong:
        raise RewardError(f"{expected} completions need lists of that length; these have another: {wrong}")


def bind(name: str, func: RewardFunction, available: dict[str, Any]) -> functools.partial[Any]:
    """Return `func` bound to the `available` arguments that it takes. MissingColumnError if one is missing."""
    parameters = inspect.signature(func).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in available]
    if missing:
        episodes = "; these are there only with tools or an environment_factory" if {*missing} & {*OF_EPISODES} else ""
        raise MissingColumnError(f"reward function {name} requires {', '.join(missing)}, which no dataset column "
                                 f"provides{episodes}; available are {', '.join(available)}")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return functools.partial(func, **available)
    return functools.partial(func, **{p.name: available[p.name] for p in named if p.name in available})


def as_rewards(name: str, result: Any, expected: int) -> list[float | None]:
    """Return a function's result as `expected` floats or Nones. RewardError for any other result."""
    try:
        rewards = [as_number(value) for value in as_list(result)]
    except Exception as error:  # conversions of other libraries' types may raise anything
        raise RewardError(f"reward function {name} returned a wrong result: {error}") from error
    if len(rewards) != expected:
        raise RewardError(f"reward function {name} returned {len(rewards)} rewards, expected {expected}")
    return rewards


def foreign_types(result: Any) -> set[str]:
    """Return the names of the types in a function's result that are converted to floats, or to a list."""
    kinds = set() if isinstance(result, (list, tuple)) else {type(result).__name__}
    return kinds | {type(value).__name__ for value in as_list(result)
                    if isinstance(value, bool) or not isinstance(value, (int, float, type(None)))}


def as_list(values: Any) -> list[Any]:
    """Return a list, a tuple, or anything with `tolist()`, as a list. TypeError for any other type."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(listed, (list, tuple)):
        raise TypeError(f"a list with one value per completion is needed, not {type(values).__name__}")
    return list(listed)


def as_number(value: Any) -> float | None:
    """Return a number, a bool or anything with `item()` as a float; None stays None. TypeError for any other type."""
    item = value.item() if hasattr(value, "item") else value
    if item is None:
        return None
    if not isinstance(item, (int, float)):
        raise TypeError(f"a number or None is needed, not {type(value).__name__}")
    return float(item)


def is_invalid(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)
