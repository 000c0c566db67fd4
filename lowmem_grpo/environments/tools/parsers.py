"""Parsing of the tool calls in a policy's completion.

A malformed call is an error with a message for the policy, never plain text, which would silently end the episode.
Calls inside <think> are thoughts. If the marks around a call are tokens of the vocabulary, the token ids decide what is
a mark; otherwise the text does.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.environments.tools.bodies import (
    ARGUMENTS,
    CallError,
    Schemas,
    call_of,
    glm_calls,
    json_calls,
    mistral_calls,
    python_calls,
    xml_calls,
)
from lowmem_grpo.types import Message, ToolCall

THINK, THOUGHT = "<think>", "</think>"
CALL_LIKE = re.compile(r'\{\s*"[^"]*"\s*:')
UNMARKED = re.compile(r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:arguments|parameters)"\s*:|<function=\w')
LISTED = re.compile(r"\s*\[([\w.-]+)\(")
AROUND = re.compile(r"(?:```(?:json)?|[\s\[\],;])*+")  # what is left of a list of calls, and of a fence
MOST_FAULTS = 5  # errors reported per completion
Piece = tuple[str, str]  # (mark, "") or ("", text)


@dataclass
class Reading:
    """A parsed completion: its text, tool calls, and an error for each call that could not be read."""

    content: str
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    fields: Message = field(default_factory=dict)  # other fields of the message, such as thoughts

    def message(self) -> Message:
        """Return the assistant message in OpenAI's format."""
        called = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                  for call in self.calls]
        calls = {"tool_calls": called} if called else {}
        return {"role": "assistant", **self.fields, "content": self.content, **calls}


@dataclass(frozen=True)
class Form:
    """A format of tool calls."""

    name: str
    open: str  # the mark before a call; "" for bare JSON
    close: str  # the mark after a call; "" if the next call or the end of the turn ends it
    calls: Callable[[str, Schemas], list[ToolCall]]
    example: str  # shown to the policy after a malformed call
    inner: tuple[str, ...] = ()  # marks inside a call, which may be special tokens

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.open, self.close, *self.inner, THINK, THOUGHT) if mark)


HERMES = '<tool_call>\n{"name": "NAME", "arguments": {"KEY": VALUE}}\n</tool_call>'
XML = "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>"
FORMS = {form.name: form for form in (
    Form("hermes", "<tool_call>", "</tool_call>", json_calls, HERMES),
    Form("xml", "<tool_call>", "</tool_call>", xml_calls, XML),
    Form("glm", "<tool_call>", "</tool_call>", glm_calls, GLM),
    Form("python", "<|tool_call_start|>", "<|tool_call_end|>", python_calls,
         "<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>"),
    Form("mistral", "[TOOL_CALLS]", "", mistral_calls, '[TOOL_CALLS]NAME[ARGS]{"KEY": VALUE}',
         ("[CALL_ID]", "[ARGS]")),
    Form("json", "", "", json_calls, '{"name": "NAME", "parameters": {"KEY": VALUE}}'),
)}


class Parser:
    """The parser of one format for one tokenizer's completions. `thinking`: the prompt opens a thought."""

    def __init__(self, form: Form, schemas: Schemas, tokenizer: PreTrainedTokenizerBase | None = None,
                 thinking: bool = False) -> None:
        self.form, self.schemas, self.tokenizer, self.thinking = form, schemas, tokenizer, thinking
        known = tokenizer.get_added_vocab() if tokenizer is not None else {}
        self.tokens = {known[mark]: mark for mark in form.marks if mark in known}
        self.plain = [mark for mark in form.marks if mark not in known]

    def read(self, ids: Sequence[int], text: str) -> Reading:
        """Parse a completion. `text` is `ids` decoded without special tokens; without ids, only `text` is used."""
        by_ids = any(token in self.tokens for token in ids)
        thoughts, pieces, faults = self.thoughts(self.pieces_of_ids(ids) if by_ids else split(text, self.form.marks))
        calls, outside = [], []
        for is_call, part in self.parts(pieces, faults) if self.form.open else self.bare_parts(pieces, faults):
            try:
                calls += self.form.calls(part, self.schemas) if is_call else []
                outside += [] if is_call else [part]
            except CallError as error:
                faults.append(str(error))
        said = "".join(outside)
        if not calls and not faults and self.form.open and self.is_unmarked(said):
            faults.append("its marks are missing")
        if faults:
            return Reading(text, calls, [unreadable(fault, self.form.example) for fault in faults[:MOST_FAULTS]])
        said = said.rstrip() if calls else said
        return Reading(thoughts + ("" if calls and not self.form.open and AROUND.fullmatch(said) else said), calls)

    def pieces_of_ids(self, ids: Sequence[int]) -> list[Piece]:
        """Return marks and the text between them. A mark that is a vocabulary token is not looked for in text."""
        pieces: list[Piece] = []
        for token, run in groupby(ids, lambda token: token if token in self.tokens else None):
            if token is not None:
                pieces += [(self.tokens[token], "") for _ in run]
            elif self.tokenizer is not None:
                pieces += split(str(self.tokenizer.decode(list(run), skip_special_tokens=True)), self.plain)
        return pieces

    def thoughts(self, pieces: list[Piece]) -> tuple[str, list[Piece], list[str]]:
        """Return the thoughts at the beginning as text, the pieces after them, and faults."""
        first = next((mark for mark, text in pieces if mark or text.strip()), "")
        end = next((at for at, (mark, _) in enumerate(pieces) if mark == THOUGHT), -1)
        if end < 0 and first == THINK:  # the thought is not closed, so all of it is thought
            fault = f"it stands inside of {THINK}, which {THOUGHT} must close first"
            return joined(pieces), [], [fault] if (self.form.open, "") in pieces else []
        marks = [mark for mark, _ in pieces[:max(end, 0)] if mark and mark in (self.form.open, self.form.close)]
        if first != THINK and not self.thinking and marks[-1:] == [self.form.open]:  # </think> is inside a call
            end = -1
        return joined(pieces[:end + 1]), pieces[end + 1:], []

    def parts(self, pieces: list[Piece], faults: list[str]) -> Iterator[tuple[bool, str]]:
        """Yield pairs (is inside a call, text). The last closing mark may be missing if the call is complete."""
        inside: list[str] | None = None
        for mark, text in [*pieces, (self.form.open, "")]:
            if mark and mark in (self.form.open, self.form.close):
                if inside is not None:
                    yield True, "".join(inside)
                elif mark == self.form.close:
                    faults.append(f"{mark} stands without {self.form.open}")
                inside = [] if mark == self.form.open else None
            elif inside is None:
                yield False, mark or text
            else:
                inside.append(mark or text)

    def bare_parts(self, pieces: list[Piece], faults: list[str]) -> Iterator[tuple[bool, str]]:
        """Yield the pairs of `parts` for calls that are JSON without marks; other JSON objects are text."""
        text, at = joined(pieces), 0
        decoder = json.JSONDecoder()
        while begin := CALL_LIKE.search(text, at):
            yield False, text[at:begin.start()].strip(" ;\n") if at else text[:begin.start()]
            at = begin.start()
            try:
                value, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                if '"name"' in text[at:] and any(f'"{key}"' in text[at:] for key in ARGUMENTS):
                    why = "it is nested too deeply" if isinstance(error, RecursionError) else error
                    faults.append(f"it is not valid JSON: {getattr(error, 'msg', why)}")
                break
            yield is_call(value), text[at:end]
            at = end
        yield False, text[at:]

    def is_unmarked(self, said: str) -> bool:
        listed = LISTED.match(said)
        return UNMARKED.search(said) is not None or (listed is not None and listed[1] in self.schemas)


def is_call(value: dict[str, Any]) -> bool:
    """Return True if a JSON object is meant as a call, even if the parser then refuses it."""
    if "name" in value:
        return value.get("type") == "function" or any(key in value for key in ARGUMENTS)
    return isinstance(value.get("function"), dict) or next(iter(value), None) in ARGUMENTS


def split(text: str, marks: Sequence[str]) -> list[Piece]:
    if not marks:
        return [("", text)] if text else []
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text)
    return [(part, "") if at % 2 else ("", part) for at, part in enumerate(parts) if part]


def joined(pieces: Sequence[Piece]) -> str:
    return "".join(mark or text for mark, text in pieces)


def unreadable(why: str, example: str) -> str:
    return f"error: the tool call could not be read: {why}. Write it like this:\n{example}"


def custom(parse: Callable[..., Any], text: str) -> Reading:
    """Parse a completion with the user's function, which returns a Reading, or a list of calls (ToolCall, or in
    OpenAI's format). If it raises, the completion has a malformed call."""
    try:
        result = parse(text)
        if isinstance(result, Reading):
            return result
        calls = [item if isinstance(item, ToolCall) else call_of(item.get("function", item)) for item in result or []]
    except Exception as error:  # noqa: BLE001, of the user's function
        return Reading(text, errors=[f"error: the tool call could not be read: {error}"])
    return Reading("" if calls else text, calls)
