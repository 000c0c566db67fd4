"""What a tool returned, as the text that the policy reads, cut to so many tokens."""

import copy
import json
import threading
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.data.stream import IMAGE_PARTS

MOST_CHARACTERS = 64  # a token; of a longer text not all is looked at

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


def refuse_images(content: Any, source: str) -> None:
    """Raise DataError where one of the parts of a content is an image; the message names `source`."""
    if any(part.get("type") in IMAGE_PARTS for part in content if isinstance(part, dict)):
        raise DataError(f"{source} gave an image, and images are not supported: only text is trained here. "
                               "Return what it shows as text")


def text_of(result: Any) -> str:
    """Return text as it is, the text of a content's parts, and other plain data as JSON. DataError for an image,
    and ToolError for anything else."""
    if isinstance(result, str):
        return result
    if isinstance(result, list):
        refuse_images(result, "a tool")
        if result and all(isinstance(part, dict) and {*part} == {"type", "text"} and part["type"] == "text"
                          for part in result):
            return "".join(str(part["text"]) for part in result)
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError(f"the tool returned what is no text and no JSON ({type(result).__name__}: {error})") from error


def described(error: BaseException) -> str:
    """Return an exception in one line; one that has no text, or raises in telling it, by its type."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001, a class of the user's
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class TokenLimit:
    """Cuts texts to so many tokens, in any thread. A tokenizer keeps the options of its last call, so that two threads
    must not use one: this one has a copy."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int) -> None:
        self.tokenizer, self.most, self.lock = copy.deepcopy(tokenizer), most, threading.Lock()

    def cut(self, text: str) -> str:
        with self.lock:
            return within_tokens(text, self.tokenizer, self.most)


def within_tokens(text: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> str:
    """The text if it has at most `max_tokens` tokens, else its head and its tail with a note of what was left out. Only
    so much of the text is encoded as could be kept, however long it is. Half a surrogate pair, which no tokenizer
    takes, becomes a question mark."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    bound = MOST_CHARACTERS * max_tokens
    if len(text) <= bound and fits(text, tokenizer, max_tokens):
        return text
    kept = most_kept(text, tokenizer, max_tokens, min(bound, len(text)))
    if kept:
        return joined(text, kept)
    return next((note for note in (joined(text, 0).strip(), "...") if fits(note, tokenizer, max_tokens)), "")


def most_kept(text: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int, bound: int) -> int:
    """Return the largest number of characters, below `bound`, for which the cut text was seen to fit."""
    low, high = 0, bound
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(joined(text, middle), tokenizer, max_tokens) else (low, middle)
    return low


def joined(text: str, kept: int) -> str:
    """Head and tail, of `kept` characters together, around a note."""
    head = (kept + 1) // 2
    tail = text[len(text) - (kept - head):]
    return f"{text[:head]}\n[... {len(text) - kept} characters left out ...]\n{tail}"


def fits(text: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> bool:
    """Return whether a text has at most so many tokens. What looks like a special token counts as plain text."""
    return len(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)) <= max_tokens
