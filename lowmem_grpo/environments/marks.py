"""The marks of a tokenizer (tokens that begin or end turns, thoughts and calls), which foreign text must not become.

Text of tools and environments may hold the letters of `<|im_end|>`. Before the chat template renders it, each such
place is replaced by a word that no template changes; in the rendered text the letters come back, cut in two pieces that
are encoded apart, so that no piece spells a mark. Text without marks is encoded together with what stands around it,
exactly as a server encodes it.
"""

import re
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.types import Message

STEM = "Zq7w"  # of stand-in words; it grows by a letter wherever somebody writes it
ANCHOR = "Zq7answer"  # ends the answers that are made up; foreign text that says it is cut as marks are
ANYTHING = re.compile(r"(?s).*\S.*")


class Marks:
    """Special tokens, and the other added tokens that the chat template itself writes, as Qwen's `<tool_response>`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = "") -> None:
        self.tokenizer, self.template = tokenizer, template
        added = tokenizer.added_tokens_decoder
        self.special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))  # id -> text
        self.special |= {number: str(token.content) for number, token in added.items() if token.special}
        texts = ((number, str(token.content)) for number, token in added.items())
        self.every = {number: text for number, text in texts if text.strip() and text in template} | self.special
        self.of_special = pattern(self.special.values())
        self.of_every = pattern([*self.every.values(), ANCHOR])

    def among(self, ids: list[int]) -> list[int]:
        """The marks among ids, in their order; without the token of unknown letters, which any text may become."""
        unknown = self.tokenizer.unk_token_id
        return [number for number in ids if number in self.every and number != unknown]

    def encode(self, text: str) -> list[int]:
        """The ids of a text whose marks count."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


def pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds one of the texts, the longest where several begin at a place."""
    longest_first = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class StandIns:
    """Words that stand for foreign text while a template renders the messages around it."""

    def __init__(self, marks: Marks, messages: Any, whole: bool = False) -> None:
        """`whole`: words stand for all that was said, which is then encoded letter by letter."""
        self.marks, self.whole, self.stem = marks, whole, STEM
        everything = repr(messages) + marks.template
        while self.stem in everything:
            self.stem += "q"
        self.texts: list[str] = []  # what each word stands for
        self.words = re.compile(self.stem + r"(\d+)e")

    def word(self, text: str) -> str:
        """The word that stands for a text."""
        if text not in self.texts:
            self.texts.append(text)
        return f"{self.stem}{self.texts.index(text)}e"

    def defused(self, message: Message) -> Message:
        """A message that is not trusted, with words for its marks. An answer may hold marks that are no special tokens,
        such as `<think>`, which templates read."""
        answer = message["role"] == "assistant"
        marks = self.marks.of_special if answer else ANYTHING if self.whole else self.marks.of_every
        return {key: value if key == "role" else self.replaced(value, marks) for key, value in message.items()}

    def replaced(self, value: Any, marks: re.Pattern[str]) -> Any:
        """The value with a word for each mark in its strings."""
        if isinstance(value, str):
            return marks.sub(lambda found: self.word(found[0]), value)
        if isinstance(value, dict):
            return {self.replaced(key, marks): self.replaced(inner, marks) for key, inner in value.items()}
        return [self.replaced(inner, marks) for inner in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered text, with the letters of each mark where its word stands."""
        first, *rest = self.words.split(text)
        pieces = [first]
        for number, after in zip(rest[::2], rest[1::2], strict=True):
            begin, *more = (letters if self.whole else halves)(self.texts[int(number)])
            pieces[-1] += begin
            pieces += more
            pieces[-1] += after
        return [number for piece in pieces if piece for number in self.marks.encode(piece)]


def halves(text: str) -> list[str]:
    """A text, cut behind its first letter."""
    return [text[:1], text[1:]]


def letters(text: str) -> list[str]:
    """A text, cut before, behind and between its letters."""
    return ["", *text, ""]
