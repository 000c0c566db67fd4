"""What a tool returned, as the text that the policy reads."""

import json
from typing import Any


class ToolError(Exception):
    """A call that failed. Its text is what the policy reads."""

    def __init__(self, words: str) -> None:
        super().__init__(f"error: {words}")
        self.words = words


class ToolOutage(RuntimeError):  # noqa: N818, says what happened
    """A tool that does not work whatever it is asked, such as one whose server is gone. It is not the policy's failure,
    so no text for the policy is made of it."""


class FinalResult(str):
    """A text that a tool returns to end the episode, such as that of a tool which hands in an answer. The policy is not
    asked again; calls beside it in the same turn are run. Elsewhere, as in TRL, it is a text like any other."""


def text_of(result: Any) -> str:
    """Text as it is, and plain data as JSON. ToolError for anything else."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError(f"the tool returned what is no text and no JSON ({type(result).__name__}: {error})") from error


def described(error: BaseException) -> str:
    """An exception in one line; one that has no text, or raises in telling it, by its type."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001, a class of the user's
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
