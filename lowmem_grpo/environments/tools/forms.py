"""Detection of a chat template's tool call format: a call is rendered, and the format that parses it back is used."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.data.harmony import HarmonyReader, is_harmony
from lowmem_grpo.data.prompt_inputs import forms_of
from lowmem_grpo.environments.template import FAMILIES
from lowmem_grpo.environments.tools.arguments import writable
from lowmem_grpo.environments.tools.bodies import CallError, call_of
from lowmem_grpo.environments.tools.parsers import FORMS, THINK, THOUGHT, Form, Parser, Reading, unreadable
from lowmem_grpo.types import Message, ToolCall

logger = logging.getLogger(__name__)

OWN = "response_template"  # parsing by the tokenizer's own response template
HARMONY = "harmony"  # gpt-oss
HARMONY_CALL = ('<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"KEY": VALUE}'
                "<|call|>")
SHOWN = 160  # characters of transformers' errors that are shown
CALL = ToolCall("look_up_weather", {"place": "New York", "days": 3})
ASKED, ANSWER = "What is the weather there?", "Warm."
SCHEMA: dict[str, Any] = {"type": "function", "function": {
    "name": CALL.name, "description": "Looks up the weather.", "parameters": {
        "type": "object", "required": ["place", "days"], "properties": {
            "place": {"type": "string", "description": "Where."},
            "days": {"type": "integer", "description": "When."}}}}}


class ToolFormError(ValueError):
    """The tokenizer's chat template has no tool calls, or an unknown format of them."""


class TemplateParser:
    """The parser for formats that `FORMS` lacks: the tokenizer's own response template, which TRL's
    `add_response_schema` can set (https://huggingface.co/docs/transformers/chat_response_parsing). `prefix` is a turn's
    prompt, `example` a rendered turn with a call, and `answer` a rendered turn without. Response templates skip
    malformed calls, so a completion without a call is an error if it has an added token that only `example` has."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[dict[str, Any]], prefix: str, example: str,
                 answer: str) -> None:
        self.tokenizer, self.prefix, self.example = tokenizer, prefix, example.strip()
        self.schemas: list[Any] = [*schemas]
        self.signs = [token for token in tokenizer.get_added_vocab() if token in example and token not in answer]

    def read(self, ids: Sequence[int], text: str) -> Reading:
        whole = str(self.tokenizer.decode(list(ids))) if len(ids) else text
        try:
            fields = dict(self.tokenizer.parse_response(whole, prefix=self.prefix, tools=self.schemas))
            calls = [call_of(writable(call["function"])) for call in fields.pop("tool_calls", None) or []]
        except Exception as error:  # noqa: BLE001, response templates may raise anything
            return self.failed(text, f"{(str(error) or type(error).__name__).strip().splitlines()[0][:SHOWN]}")
        if not calls and any(sign in whole for sign in self.signs):
            return self.failed(text, "it is not in the form of the chat template")
        content, _ = fields.pop("content", None), fields.pop("role", None)
        if not content and not calls:  # the response template skipped the whole completion
            return Reading(text)
        return Reading(content or "", calls, fields=fields)

    def failed(self, text: str, why: str) -> Reading:
        return Reading(text, errors=[unreadable(why, self.example)])


class HarmonyParser:
    """The parser of Harmony, in which a call is a message whose recipient is the tool."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.reader = HarmonyReader(tokenizer)

    def read(self, ids: Sequence[int], text: str) -> Reading:
        content, fields, called = self.reader.read(ids)
        reading = Reading(content, fields=fields)
        for message in called:
            name = message.recipient.removeprefix("functions.")
            try:
                reading.calls.append(call_of({"name": name, "arguments": message.body or "{}"}))
            except CallError as error:
                reading.errors.append(unreadable(str(error), HARMONY_CALL))
        return reading


Reads = Parser | TemplateParser | HarmonyParser


def parser_of(tokenizer: PreTrainedTokenizerBase, schemas: list[dict[str, Any]], named: str | None,
              template_kwargs: Mapping[str, Any]) -> Reads:
    """Return the parser of tool calls in the format `named` or, if that is None, in the chat template's format.
    ToolFormError if there is no such format."""
    if named not in (None, OWN, HARMONY, *FORMS):
        raise ToolFormError(f"the parser of tool calls is {named!r}; allowed are {', '.join(FORMS)}, {HARMONY}, {OWN}, "
                            "or a function of a completion's text")
    if named == HARMONY or (named is None and is_harmony(tokenizer)):
        return HarmonyParser(tokenizer)
    template = ToolCallTemplate(tokenizer, template_kwargs)
    if named != OWN and (form := FORMS[named] if named else template.form()):
        properties = {schema["function"]["name"]: schema["function"].get("parameters") or {} for schema in schemas}
        return Parser(form, properties, tokenizer, template.opens_thought())
    if getattr(tokenizer, OWN, None) is not None:
        return TemplateParser(tokenizer, schemas, template.prompt(), template.call(), template.answer())
    raise template.error()


class ToolCallTemplate:
    """A tokenizer's chat template, tried on a question and an answer with and without a tool call."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> None:
        if not tokenizer.chat_template:
            raise ToolFormError(f"the tokenizer has no chat template, which says how tools are called; "
                                f"use a model family whose template has tools ({FAMILIES})")
        self.tokenizer, self.template_kwargs = tokenizer, dict(template_kwargs)
        self.calls = list(self.renderings())

    def renderings(self) -> Iterator[str]:
        """Yield a rendered turn with a call, for each message form that the template accepts."""
        for form in forms_of(self.tokenizer, self.template_kwargs | {"tools": [SCHEMA]}):
            for content in ("", None):
                called = form({"name": CALL.name, "arguments": CALL.arguments})
                calls = [{"id": "abcdefghi", "type": "function", "function": called}]  # Mistral wants 9 letters
                try:
                    yield self.turn({"role": "assistant", "content": content, "tool_calls": calls})
                except Exception as error:  # noqa: BLE001, Jinja's and the template's own; another form may work
                    logger.debug("the chat template refuses a call written as %s: %s", called, error)

    def turn(self, message: Message) -> str:
        return self.rendered([{"role": "user", "content": ASKED}, message], False).rpartition(ASKED)[2]

    def prompt(self) -> str:
        return self.rendered([{"role": "user", "content": ASKED}], True)

    def rendered(self, messages: list[Message], prompts: bool) -> str:
        return str(self.tokenizer.apply_chat_template(
            messages, tools=[SCHEMA], tokenize=False, add_generation_prompt=prompts, **self.template_kwargs))

    def call(self) -> str:
        """Return a rendered turn with a call; "" if the template leaves calls out."""
        return next((text for text in self.calls if CALL.name in text), "")

    def answer(self) -> str:
        return self.turn({"role": "assistant", "content": ANSWER})

    def opens_thought(self) -> bool:
        scaffold = self.prompt().rpartition(ASKED)[2]
        return THINK in scaffold and THOUGHT not in scaffold.rpartition(THINK)[2]

    def form(self) -> Form | None:
        """Return the format that parses the template's calls back; None if there is none."""
        if not self.call():
            return self.form_of_marks() if self.calls else None
        schemas = {CALL.name: SCHEMA["function"]["parameters"]}
        end = self.answer().rpartition(ANSWER)[2].strip()  # the end of the turn is not part of the call
        calls = [text.rstrip().removesuffix(end) for text in self.calls]
        return next((form for form in FORMS.values()
                     if any(Parser(form, schemas).read([], text).calls == [CALL] for text in calls)), None)

    def form_of_marks(self) -> Form | None:
        """Return the only format whose marks are tokens of the tokenizer; None if there are several, or none. This is
        for a template that describes tools but leaves calls out, as LFM2's first template does."""
        known = self.tokenizer.get_added_vocab()
        forms = [form for form in FORMS.values() if form.open in known and form.close in known]
        return forms[0] if len(forms) == 1 and CALL.name in self.prompt() else None

    def error(self) -> ToolFormError:
        if not self.call():
            return ToolFormError(
                "the chat template of the tokenizer has no tool calls: it leaves them out. Take a model whose template "
                f"has them ({FAMILIES}), or give the tokenizer such a template")
        return ToolFormError(
            f"the chat template writes tool calls in a form that is not known here: {self.call()[-300:]!r}. Known are "
            f"{', '.join(FORMS)}: name one as in parse=\"hermes\", give a function of a completion's text that returns "
            "its calls, or set the tokenizer's response_template, as TRL's add_response_schema does for its models")
