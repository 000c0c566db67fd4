"""Which form of tool calls a chat template has: a call is rendered, and the form that reads it back is the one."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.environments.tools.parsers import FORMS, Form, Parser
from lowmem_grpo.types import Message, ToolCall

CALL = ToolCall("look_up_weather", {"place": "New York", "days": 3})
ASKED = "What is the weather there?"
SCHEMA = {"type": "function", "function": {
    "name": CALL.name, "description": "Looks up the weather.", "parameters": {
        "type": "object", "required": ["place", "days"], "properties": {
            "place": {"type": "string", "description": "Where."},
            "days": {"type": "integer", "description": "When."}}}}}
FAMILIES = "Qwen2.5, Qwen3, Llama 3.1, LFM2 and GLM 4.5 have one"


class ToolFormError(ValueError):
    """A tokenizer whose template has no tool calls, or has them in a form that is not known here."""


def form_of(tokenizer: PreTrainedTokenizerBase) -> Form:
    """The form that the tokenizer's template writes calls in. Raises ToolFormError."""
    if not tokenizer.chat_template:
        raise ToolFormError(f"the tokenizer has no chat template, so it cannot say how tools are called; {FAMILIES}")
    rendered = list(renderings(tokenizer))
    schemas = {CALL.name: SCHEMA["function"]["parameters"]}  # type: ignore[index]
    for form in FORMS.values():
        if any(Parser(form, schemas).read([], text).calls == [CALL] for text in rendered):
            return form
    shown = next((text for text in rendered if CALL.name in text), None)
    if shown is None:
        raise ToolFormError("the chat template of the tokenizer has no tool calls: it leaves them out. Take a model "
                            f"whose template has them ({FAMILIES}), or give the tokenizer such a template")
    raise ToolFormError(
        f"the chat template writes tool calls in a form that is not known here: {shown[-300:]!r}. Known are "
        f"{', '.join(FORMS)}: name one as in parse=\"hermes\", give a function of a completion's text that returns its "
        "calls, or set the tokenizer's response_template")


def renderings(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """A turn with a call as the template writes it, for each way in which templates want a message."""
    for arguments in (CALL.arguments, '{"place": "New York", "days": 3}'):
        for content in ("", None):
            called = {"id": "abcdefghi", "type": "function", "function": {"name": CALL.name, "arguments": arguments}}
            message = {"role": "assistant", "content": content, "tool_calls": [called]}
            try:
                yield rendered_turn(tokenizer, message)
            except Exception:  # noqa: BLE001, Jinja's and the template's own: another way may do
                continue


def rendered_turn(tokenizer: PreTrainedTokenizerBase, message: Message) -> str:
    """What the template writes behind the question."""
    asked: list[dict[str, Any]] = [{"role": "user", "content": ASKED}, message]
    text = tokenizer.apply_chat_template(asked, tools=[SCHEMA], tokenize=False)
    return str(text).rpartition(ASKED)[2]
