"""Finds the tool calls in what a policy wrote.

A call that cannot be read is an error with a text for the policy, never plain text: an episode would end unremarked.
Calls inside of <think> are thoughts. Where the marks around a call are tokens of the vocabulary, the token ids decide
what is a mark; else the text does.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.environments.tools.bodies import (
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
CALL_LIKE = re.compile(r'\{\s*"(?:name|arguments|parameters|type|function)"\s*:')
UNMARKED = re.compile(r'\A\s*(?:```(?:json)?\s*)?\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:arguments|parameters)"|<function=')
Piece = tuple[str, str]  # a mark and "", or "" and text


@dataclass
class Reading:
    """What a policy said, the tools that it calls, and what is wrong with calls that could not be read."""

    content: str
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def message(self) -> Message:
        """The assistant's message, in OpenAI's form."""
        called = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                  for call in self.calls]
        return {"role": "assistant", "content": self.content, **({"tool_calls": called} if called else {})}


@dataclass(frozen=True)
class Form:
    """One way of writing tool calls."""

    name: str
    open: str  # the mark before a call; empty for bare JSON
    close: str  # the mark behind it; empty where the next call or the end of the turn ends it
    calls: Callable[[str, Schemas], list[ToolCall]]
    example: str  # for the policy
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
    Form("mistral", "[TOOL_CALLS]", "", mistral_calls, '[TOOL_CALLS]NAME[ARGS]{"KEY": VALUE}', ("[ARGS]",)),
    Form("json", "", "", json_calls, '{"name": "NAME", "parameters": {"KEY": VALUE}}'),
)}


class Parser:
    """Reads one form from the completions of one tokenizer."""

    def __init__(self, form: Form, schemas: Schemas, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.form, self.schemas, self.tokenizer = form, schemas, tokenizer
        known = tokenizer.get_added_vocab() if tokenizer is not None else {}
        self.tokens = {known[mark]: mark for mark in form.marks if mark in known}
        self.plain = [mark for mark in form.marks if mark not in known]

    def read(self, ids: Sequence[int], text: str) -> Reading:
        """What a completion says. `text` is `ids` without special tokens; without ids the text is all there is."""
        if not self.form.open:
            return read_bare(text, self.form)
        pieces = self.pieces_of_ids(ids) if any(token in self.tokens for token in ids) else split(text, self.form.marks)
        return Walk(self.form, self.schemas, text).read(pieces)

    def pieces_of_ids(self, ids: Sequence[int]) -> list[Piece]:
        """Marks and the text between them. Text that only looks like a mark, and has a token of its own, is text."""
        pieces: list[Piece] = []
        run: list[int] = []
        for token in [*ids, None]:
            if token is not None and token not in self.tokens:
                run.append(token)
                continue
            if run:
                assert self.tokenizer is not None
                pieces += split(str(self.tokenizer.decode(run, skip_special_tokens=True)), self.plain)
                run = []
            if token is not None:
                pieces.append((self.tokens[token], ""))
        return pieces


def split(text: str, marks: Sequence[str]) -> list[Piece]:
    """Marks and the text between them."""
    if not marks:
        return [("", text)] if text else []
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text)
    return [(part, "") if at % 2 else ("", part) for at, part in enumerate(parts) if part]


class Walk:
    """One pass over the pieces of a completion."""

    def __init__(self, form: Form, schemas: Schemas, text: str) -> None:
        self.form, self.schemas, self.text = form, schemas, text
        self.outside: list[str] = []  # what is no call
        self.inside: list[str] | None = None  # of the call that is open
        self.found = Reading("")

    def read(self, pieces: list[Piece]) -> Reading:
        at = self.thought(pieces)
        for mark, text in pieces[at:]:
            if mark == self.form.open:
                self.end()
                self.inside = []
            elif mark and mark == self.form.close:
                if self.inside is None:
                    self.fail(f"{mark} without {self.form.open}")
                self.end()
            else:
                (self.outside if self.inside is None else self.inside).append(mark or text)
        self.end()
        if not self.found.calls and not self.found.errors and UNMARKED.search("".join(self.outside)):
            self.fail("it is not marked as one")
        if self.found.errors:
            self.found.content = self.text
        else:
            content = "".join(self.outside)
            self.found.content = content.rstrip() if self.found.calls else content
        return self.found

    def thought(self, pieces: list[Piece]) -> int:
        """Pass over the thoughts at the beginning. The prompt may have opened them."""
        marks = [mark for mark, text in pieces if mark or text.strip()]
        opened = bool(marks) and marks[0] == THINK
        end = next((at for at, (mark, _) in enumerate(pieces) if mark == THOUGHT), None)
        if end is None and opened:
            if self.form.open in marks:
                self.fail(f"it stands inside of {THINK}, which {THOUGHT} must close first")
            end = len(pieces) - 1
        if end is None:
            return 0
        if not opened and self.whole_call(pieces, end):
            return 0
        self.outside += [mark or text for mark, text in pieces[:end + 1]]
        return end + 1

    def whole_call(self, pieces: list[Piece], end: int) -> bool:
        """Whether the end of a thought stands inside of a call, as a part of an argument."""
        marks = [mark for mark, _ in pieces[:end] if mark in (self.form.open, self.form.close)]
        return bool(marks) and marks[-1] == self.form.open

    def end(self) -> None:
        """The open call ends. Its last mark may be missing, if all of it is there."""
        if self.inside is None:
            return
        body, self.inside = "".join(self.inside), None
        try:
            self.found.calls += self.form.calls(body, self.schemas)
        except CallError as error:
            self.fail(str(error))

    def fail(self, why: str) -> None:
        self.found.errors.append(unreadable(why, self.form.example))


def unreadable(why: str, example: str) -> str:
    """What the policy reads of a call that could not be read."""
    return f"error: the tool call could not be read, as {why}. Write it like this:\n{example}"


def read_bare(text: str, form: Form) -> Reading:
    """Calls that are JSON among other text, without marks. Objects that are no calls are text."""
    found, at, rest = Reading(text), 0, list[str]()
    at_answer = text.find(THOUGHT) + len(THOUGHT) if THOUGHT in text else 0
    at = at_answer if text.lstrip().startswith(THINK) or at_answer else 0
    rest.append(text[:at])
    decoder = json.JSONDecoder()
    while begin := CALL_LIKE.search(text, at):
        try:
            value, end = decoder.raw_decode(text, begin.start())
        except (ValueError, RecursionError) as error:
            if is_attempt(text[begin.start():]):
                found.errors.append(unreadable(f"it is not valid JSON: {reason(error)}", form.example))
            break
        rest.append(text[at:begin.start()])
        at = end
        if not isinstance(value, dict) or not ({"arguments", "parameters"} & value.keys()):
            rest.append(text[begin.start():end])
            continue
        try:
            found.calls.append(checked(call_of(value), text[begin.start():end]))
        except CallError as error:
            found.errors.append(unreadable(str(error), form.example))
    if found.calls and not found.errors:
        found.content = "".join([*rest, text[at:]]).strip(" \n;")
    return found


def checked(call: ToolCall, text: str) -> ToolCall:
    """The call, once its numbers are known to be numbers of JSON."""
    json_calls(text, {})
    return call


def is_attempt(text: str) -> bool:
    """Whether broken JSON was to be a call."""
    return '"name"' in text and any(f'"{key}"' in text for key in ("arguments", "parameters"))


def reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def custom(parse: Callable[..., Any], text: str) -> Reading:
    """What the caller's function makes of a completion: a Reading, or calls as ToolCall or in OpenAI's form. An error
    that it raises is that of a call that could not be read."""
    try:
        given = parse(text)
        if isinstance(given, Reading):
            return given
        calls = [item if isinstance(item, ToolCall) else call_of(item.get("function", item)) for item in given or []]
    except Exception as error:  # noqa: BLE001, of the user's function
        return Reading(text, errors=[f"error: the tool call could not be read: {error}"])
    return Reading("" if calls else text, calls)
