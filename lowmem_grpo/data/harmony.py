"""OpenAI's Harmony format, in which gpt-oss answers with several messages. The header of each names its channel, which
is analysis for thoughts and final for the answer, and the recipient of a tool call
(https://github.com/openai/harmony/blob/main/docs/format.md)."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from lowmem_grpo.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SIGN = "<|channel|>final<|message|>"  # in a chat template of this format
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", *ENDS)
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
FINAL = ("final", "")  # a message without a channel is an answer too
ReadMessage = Callable[[Sequence[int]], Message]  # of a completion (C,)


@dataclass
class ChannelMessage:
    """One of the messages of a completion."""

    header: str = ""
    body: str | None = None  # None: the completion ends within the header

    def add(self, text: str) -> None:
        if self.body is None:
            self.header += text
        else:
            self.body += text

    @property
    def channel(self) -> str:
        found = CHANNEL.search(self.header)
        return found[1] if found else ""

    @property
    def recipient(self) -> str:
        found = RECIPIENT.search(self.header)
        return found[1] if found else ""


class HarmonyReader:
    """Reads completions in Harmony's format. Only tokens are marks, not text that looks like one."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer, known = tokenizer, tokenizer.get_added_vocab()
        self.marks = {known[mark]: mark for mark in MARKS if mark in known}

    def messages(self, ids: Sequence[int]) -> list[ChannelMessage]:
        """Return the messages of a completion (C,), which begins in the header of the first."""
        messages = [ChannelMessage()]
        for is_mark, run in groupby(ids, self.marks.__contains__):
            if not is_mark:
                messages[-1].add(str(self.tokenizer.decode(list(run), skip_special_tokens=True)))
                continue
            for mark in [self.marks[token] for token in run]:
                if mark == "<|start|>" or mark in ENDS:
                    messages.append(ChannelMessage())
                elif mark == "<|message|>":
                    messages[-1].body = messages[-1].body or ""
                else:
                    messages[-1].add(mark)
        return messages

    def read(self, ids: Sequence[int]) -> tuple[str, Message, list[ChannelMessage]]:
        """Return the text of a completion's channel final, {"thinking": the text of its other channels} if there is
        any, and its calls of tools. Without marks, the whole completion is the first of these."""
        if not any(self.marks.get(token) in ("<|channel|>", "<|message|>") for token in ids):
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=True)), {}, []
        messages = [message for message in self.messages(ids) if message.body is not None]
        said = [message for message in messages if not message.recipient]
        answer, thoughts = ("\n\n".join(str(message.body) for message in said if (message.channel in FINAL) == final)
                            for final in (True, False))
        fields = {"thinking": thoughts} if thoughts else {}
        return answer, fields, [message for message in messages if message.recipient]


def is_harmony(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether a tokenizer's chat template writes this format, with marks that are tokens."""
    return SIGN in str(tokenizer.chat_template) and {"<|channel|>", "<|message|>"} <= {*tokenizer.get_added_vocab()}


def message_reader(tokenizer: "PreTrainedTokenizerBase") -> ReadMessage | None:
    """Return the function that reads a completion as a message with its channels; None for another format, in which a
    completion's text is its content."""
    if not is_harmony(tokenizer):
        return None
    reader = HarmonyReader(tokenizer)

    def message(ids: Sequence[int]) -> Message:
        content, fields, _ = reader.read(ids)
        return {"role": "assistant", **fields, "content": content}

    return message
