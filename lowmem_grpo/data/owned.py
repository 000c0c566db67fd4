"""Copies of the arguments of user code, which the code may change: a row is shared by all completions of its prompt
and by all steps that read it again."""

import copy
from dataclasses import is_dataclass
from typing import Any

UNCHANGING = frozenset({type(None), bool, int, float, str, bytes})


def owned(value: Any) -> Any:
    """Return a copy that shares no list, dict, array or dataclass (such as `types.Turn`) with `value`. All other
    objects in it are shared: an environment, a client, a function, the routes of a turn."""
    if type(value) in UNCHANGING:
        return value
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update((name, owned(part)) for name, part in value.items())
        return made
    if isinstance(value, list):
        listed = copy.copy(value)
        listed[:] = [part if type(part) in UNCHANGING else owned(part) for part in value]
        return listed
    if type(value) in (tuple, set):
        return type(value)(map(owned, value))
    if is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for name, part in getattr(value, "__dict__", {}).items():
            if isinstance(part, (list, dict)):  # other fields may refer back to `value`, or be as large as routes
                object.__setattr__(twin, name, owned(part))  # works for frozen dataclasses too
        return twin
    return copy.deepcopy(value) if hasattr(value, "dtype") else value
