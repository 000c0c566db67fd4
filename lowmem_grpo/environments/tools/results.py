"""Tool results as text for the policy, cut to a number of tokens."""

import copy
import json
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.data.prompt_inputs import HALF
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.data.stream import IMAGE_PARTS

MOST_CHARACTERS = 64  # per token; a text beyond that is not encoded whole


class ToolError(Exception):
    """A tool call that failed; the policy reads the message."""

    def __init__(self, words: str) -> None:
        super().__init__(f"error: {words}")
        self.words = words


class ToolOutage(RuntimeError):  # noqa: N818, says what happened
    """A tool that fails whatever its arguments are, as when its server is gone. The policy gets no message about it."""


class FinalResult(str):
    """A text that a tool returns to end the episode. Other calls of the same turn are still run."""


def refuse_images(content: Any, source: str) -> None:
    """Raise DataError if a part of a message's content is an image; the error names `source`."""
    if any(part.get("type") in IMAGE_PARTS for part in content if isinstance(part, dict)):
        raise DataError(f"{source} gave an image, and images are not supported: only text is trained here. "
                        "Return what it shows as text")


def text_of(result: Any) -> str:
    """Return a string unchanged, text parts joined, other data as JSON. DataError for an image; ToolError for a value
    that is neither text nor JSON."""
    lone = isinstance(result, dict) and not {*result}.isdisjoint(IMAGE_PARTS)  # an image by itself
    parts = [result] if lone else result if isinstance(result, list | tuple) else []
    refuse_images(parts, "a tool")
    if parts and all(isinstance(part, dict) and {*part} == {"type", "text"} and part["type"] == "text"
                     for part in parts):
        return "".join(str(part["text"]) for part in parts)
    try:
        data = plain(result)
        return data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError("the tool returned a value that is neither text nor JSON "
                        f"({type(result).__name__}: {error})") from error


def plain(value: Any) -> Any:
    """Return data in JSON's types: arrays, sets (sorted) and ranges as lists, dataclasses and pydantic models as dicts,
    bytes and objects whose class defines `__str__` (Decimal, datetime, Path) as text. Return other values unchanged."""
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, bytes | bytearray | Enum):
        return plain(value.value) if isinstance(value, Enum) else value.decode()
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str | int | float | None) else str(plain(key)): plain(item)
                for key, item in value.items()}
    if isinstance(value, list | tuple | deque | range | Set):
        return [plain(item) for item in (sorted(value, key=str) if isinstance(value, Set) else value)]
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return str(value) if any("__str__" in vars(cls) for cls in type(value).__mro__[:-1]) else value


def described(error: BaseException) -> str:
    """Return an exception's type and message; only the type if the message is empty or cannot be formatted."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001, a class of the user's
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class TokenLimit:
    """A thread-safe cutter of texts to `most` tokens, with its own copy of the tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int) -> None:
        self.tokenizer, self.most, self.lock = copy.deepcopy(tokenizer), most, threading.Lock()

    def cut(self, text: str) -> str:
        """Return the text if it has at most `most` tokens, else its head and tail around a note of what was left out. A
        lone surrogate, which no tokenizer accepts, becomes a question mark."""
        text = HALF.sub("?", text)
        bound = min(MOST_CHARACTERS * self.most, len(text))
        with self.lock:
            if len(text) == bound and self.fits(text):
                return text
            kept = bisect_left(range(1, bound), True, key=lambda count: not self.fits(joined(text, count)))
            if kept:
                return joined(text, kept)
            return next((note for note in (joined(text, 0).strip(), "...") if self.fits(note)), "")

    def fits(self, text: str) -> bool:
        ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return len(ids) <= self.most


def joined(text: str, kept: int) -> str:
    head = (kept + 1) // 2
    tail = text[len(text) - (kept - head):]
    return f"{text[:head]}\n[... {len(text) - kept} characters left out ...]\n{tail}"
