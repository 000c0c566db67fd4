"""Renders messages with a tokenizer's chat template, so that untrusted text cannot become a special token.

Text of tools and environments may contain the characters of a special token (a mark), such as `<|im_end|>`. While the
template renders the messages, a stand-in word replaces these characters. Afterwards they are put back in two pieces
that are encoded separately. Other text is encoded together with the text around it, as inference servers do.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.data.prompt_inputs import CLOSED, chat_text
from lowmem_grpo.types import Message

STEM = "Zq7w"  # prefix of stand-in words, extended until it does not occur in the messages or the template
ANCHOR = "Zq7answer"  # the text of made-up answers; in untrusted text it is split like a mark
ANYTHING = re.compile(r"(?s).*\S.*")
END = "</think>"
THOUGHTS = {"reasoning_content": "reasoning_content", "thinking": "<|channel|>analysis"}  # field -> sign in template
FAMILIES = "Qwen2.5, Qwen3, Llama 3.1 to 3.3, LFM2 or Gemma 4"


class SpecialTokens:
    """Special tokens, and other added tokens that the chat template writes, such as Qwen's `<tool_response>`."""

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
        """Return the special tokens among `ids`, in order, without the unknown token, which any text may become."""
        unknown = self.tokenizer.unk_token_id
        return [number for number in ids if number in self.every and number != unknown]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


def pattern(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class StandIns:
    """Words that replace special tokens in untrusted text while a template renders the messages."""

    def __init__(self, marks: SpecialTokens, messages: Any, whole: bool = False) -> None:
        """With `whole`, words replace all untrusted text, which is encoded by characters, not only special tokens."""
        self.marks, self.whole, self.stem = marks, whole, STEM
        everything = repr(messages) + marks.template
        while self.stem in everything:
            self.stem += "q"
        self.texts: dict[str, int] = {}  # what each word stands for, with the word's number
        self.words = re.compile(self.stem + r"(\d+)e")

    def word(self, text: str) -> str:
        return f"{self.stem}{self.texts.setdefault(text, len(self.texts))}e"

    def defused(self, message: Message) -> Message:
        """Return a message with words in place of special and added tokens. Assistant messages keep added tokens that
        are not special, such as `<think>`, because templates read them there."""
        answer = message["role"] == "assistant"
        marks = self.marks.of_special if answer else ANYTHING if self.whole else self.marks.of_every
        return {key: value if key == "role" else self.replaced(value, marks) for key, value in message.items()}

    def replaced(self, value: Any, marks: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return marks.sub(lambda match: self.word(match[0]), value)
        if isinstance(value, dict):
            return {self.replaced(key, marks): self.replaced(inner, marks) for key, inner in value.items()}
        return [self.replaced(inner, marks) for inner in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text, with each stand-in word replaced by the split text that it stands for."""
        first, *rest = self.words.split(text)
        pieces, texts = [first], list(self.texts)
        for number, after in zip(rest[::2], rest[1::2], strict=True):
            letters = texts[int(number)]
            begin, *more = ["", *letters, ""] if self.whole else [letters[:1], letters[1:]]
            pieces[-1] += begin
            pieces += more
            pieces[-1] += after
        return [number for piece in pieces if piece for number in self.marks.encode(piece)]


class RendererError(ValueError):
    """The chat template cannot render a conversation; the message says why (`problem`) and what to do (`fix`)."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}: {fix}")
        self.problem, self.fix = problem, fix


class ChatTemplate:
    """A tokenizer's chat template with the tools and template kwargs of a run."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None, kwargs: dict[str, Any] | None
    ) -> None:
        """`tools` are OpenAI schemas. RendererError if there is no chat template."""
        self.tokenizer, self.tools = tokenizer, tools or None  # Llama 3.1 writes a headline for an empty list
        self.kwargs = dict(kwargs or {}) | ({"tools": tools} if tools else {})
        if not tokenizer.chat_template and "chat_template" not in self.kwargs:
            family = f"a model family whose template has tools ({FAMILIES})" if tools else "an instruct model"
            raise RendererError("the tokenizer has no chat template, which a conversation of turns needs",
                                f"set tokenizer.chat_template, or load {family}")
        self.source = tokenizer.get_chat_template(self.kwargs.get("chat_template"), self.kwargs.get("tools"))
        self.marks = SpecialTokens(tokenizer, self.source)

    def text(self, messages: Sequence[Message], generation: bool = True) -> str:
        """Return the rendered messages, with a generation prompt if `generation`; RendererError if that fails."""
        try:
            return chat_text(self.tokenizer, list(messages), self.kwargs | ({} if generation else CLOSED))
        except Exception as error:  # templates may raise anything: TemplateError, TypeError, KeyError
            raise refusal(messages, f"{type(error).__name__}: {error}") from error

    def text_of_calls(self, messages: Sequence[Message], generation: bool = True) -> str:
        return self.text(with_call_ids(messages), generation)


def thought_apart(message: Message, source: str) -> Message:
    """Return a message with its text before `</think>` in the field that the template has for thoughts, if any."""
    field = next((name for name, sign in THOUGHTS.items() if sign in source), "")
    if field and (other := next((name for name in {*THOUGHTS} - {field} if message.get(name)), "")):
        message = {field: message[other]} | {key: value for key, value in message.items() if key != other}
    said = message.get("content")
    if message["role"] != "assistant" or not field or field in message or not isinstance(said, str) or END not in said:
        return message
    thought, _, rest = said.partition(END)
    return message | {field: thought.rpartition("<think>")[2].strip("\n"), "content": rest.lstrip("\n")}


def checked(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages. RendererError if there are none, or if one is not a message with a role and text."""
    for message in messages:
        said = message.get("content") if isinstance(message, dict) else None
        if not isinstance(said, str) or not isinstance(message.get("role"), str):
            raise RendererError(f"{str(message)[:200]!r} is no message with a role and text",
                                "a message is {'role': 'user', 'content': text}")
    if not messages:
        raise RendererError("nothing was said to the policy", "give at least {'role': 'user', 'content': text}")
    return messages


def refusal(messages: Iterable[Message], why: str) -> RendererError:
    """Return a RendererError that names the roles of the messages, the reason, and what to do."""
    roles = ", ".join(message["role"] for message in messages)
    fix = f"use a model family whose template has tools ({FAMILIES})" if "tool" in roles else "use another template"
    return RendererError(f"the chat template cannot render messages of the roles {roles} ({' '.join(why.split())})",
                         f"{fix}, or set tokenizer.chat_template")


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with an id added to each call and result that has none, matched in order. Some templates look
    up the tool name of a result by the id, and some require exactly nine letters and digits."""
    done, waiting, numbers = [], list[str](), count()
    for message in messages:
        calls = [{"id": f"call{next(numbers):05d}"} | call for call in message.get("tool_calls") or []]
        if calls:
            message, waiting = message | {"tool_calls": calls}, [call["id"] for call in calls]
        if message["role"] == "tool" and waiting:
            message = {"tool_call_id": waiting[0]} | message
            waiting = waiting[1:]
        done.append(message)
    return done
