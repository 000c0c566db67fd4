"""What reward functions return, as floats: numbers, booleans, tensors and arrays; anything else is refused."""

import math
from typing import Any

from lowmem_grpo.rewards.calling.failures import RewardError


def as_rewards(name: str, result: Any, expected: int) -> list[float | None]:
    """A function's result as `expected` floats and Nones. Raises RewardError for anything else."""
    try:
        rewards = [as_number(value) for value in as_list(result)]
    except Exception as error:  # conversions of foreign types raise as they like
        raise RewardError(f"reward function {name} returned a wrong result: {error}") from error
    if len(rewards) != expected:
        raise RewardError(f"reward function {name} returned {len(rewards)} rewards, expected {expected}")
    return rewards


def foreign_types(result: Any) -> set[str]:
    """Names of the types in a function's result that are no float, int or None, but could be made into floats."""
    kinds = set() if isinstance(result, (list, tuple)) else {type(result).__name__}
    values = as_list(result)
    return kinds | {
        type(v).__name__ for v in values if isinstance(v, bool) or not isinstance(v, (int, float, type(None)))
    }


def as_list(values: Any) -> list[Any]:
    """A list, a tuple, or anything with `tolist()`, as a list. Raises TypeError naming any other type."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(listed, (list, tuple)):
        raise TypeError(f"a list with one value per completion is needed, not {type(values).__name__}")
    return list(listed)


def as_number(value: Any) -> float | None:
    """A number, a bool or anything with `item()` as a float; None as None. Raises TypeError naming any other type."""
    item = value.item() if hasattr(value, "item") else value
    if item is None:
        return None
    if not isinstance(item, (int, float)):
        raise TypeError(f"a number or None is needed, not {type(value).__name__}")
    return float(item)


def is_invalid(value: float | None) -> bool:
    """Whether a reward is NaN or infinite."""
    return value is not None and not math.isfinite(value)
