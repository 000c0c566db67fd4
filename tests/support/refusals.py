"""Tables of what is refused, held in one test: what was said instead, of every row that is wrong."""

from collections.abc import Callable, Iterable
from typing import Any


def not_refused(
    call: Callable[[Any], Any], rows: Iterable[tuple[Any, str | tuple[str, ...]]], error: type[Exception] = ValueError
) -> list[tuple[Any, str | tuple[str, ...], str]]:
    """Return of (given, words) each row whose `call(given)` does not raise `error` with these words (all of several),
    and what it said instead."""
    answers = [(given, words, answer(call, given, error)) for given, words in rows]
    return [(given, words, said) for given, words, said in answers
            if not all(part in said for part in ([words] if isinstance(words, str) else words))]


def answer(call: Callable[[Any], Any], given: Any, error: type[Exception]) -> str:
    """Return what the refusal says."""
    try:
        call(given)
    except error as refusal:
        return str(refusal)
    return "<accepted>"
