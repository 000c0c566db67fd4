"""In place of weave: nothing is traced."""

from typing import Any


def op(function: Any = None, **options: Any) -> Any:
    """The function as it is, with brackets or without."""
    return (lambda inner: inner) if function is None else function


def init(*args: Any, **options: Any) -> None:
    return None
