"""`ChatTemplate`: the text that a tokenizer's chat template makes of messages, and an error where it refuses them."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.engines.prompt_inputs import CLOSED, chat_text
from lowmem_grpo.environments.marks import Marks
from lowmem_grpo.types import Message

END = "</think>"
THOUGHTS = {"reasoning_content": "reasoning_content", "thinking": "<|channel|>analysis"}  # field, what reads it says
FAMILIES = "Qwen2.5, Qwen3, Llama 3.1 to 3.3, LFM2 or Gemma 4"


class RendererError(ValueError):
    """The chat template cannot render a conversation; the message says why (`problem`), and what to do (`fix`)."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}: {fix}")
        self.problem, self.fix = problem, fix


class ChatTemplate:
    """A chat template with the tools and options of a run."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None, kwargs: dict[str, Any] | None
    ) -> None:
        """`tools` are OpenAI schemas. RendererError without a chat template."""
        self.tokenizer, self.tools = tokenizer, tools or None  # of an empty list, Llama 3.1 writes a headline
        self.kwargs = dict(kwargs or {}) | ({"tools": tools} if tools else {})
        if not tokenizer.chat_template and "chat_template" not in self.kwargs:
            family = f"a model family whose template has tools ({FAMILIES})" if tools else "an instruct model"
            raise RendererError("the tokenizer has no chat template, which a conversation of turns needs",
                                f"set tokenizer.chat_template, or load {family}")
        self.source = tokenizer.get_chat_template(self.kwargs.get("chat_template"), self.kwargs.get("tools"))
        self.marks = Marks(tokenizer, self.source)

    def text(self, messages: Sequence[Message], generation: bool = True) -> str:
        """Return the messages as text, up to where the policy goes on or to their end. RendererError where the template
        refuses them."""
        try:
            return chat_text(self.tokenizer, list(messages), self.kwargs | ({} if generation else CLOSED))
        except Exception as error:  # templates raise what they like: TemplateError, TypeError, KeyError
            raise refusal(messages, f"{type(error).__name__}: {error}") from error

    def text_of_calls(self, messages: Sequence[Message], generation: bool = True) -> str:
        """Return the same of messages that hold tool calls, whose arguments some templates want as text. RendererError
        where the template leaves a call out."""
        numbered = with_call_ids(messages)
        try:
            return self.text(numbered, generation)
        except RendererError:
            as_text = [with_arguments(one, json.dumps) for one in numbered]
            if as_text == numbered:
                raise
            return self.text(as_text, generation)


def thought_apart(message: Message, source: str) -> Message:
    """An answer with its thought in a field of its own, where the template reads such a field. The thought ends at
    `</think>`, and began in the prompt or at `<think>`."""
    field = next((name for name, sign in THOUGHTS.items() if sign in source), "")
    said = message.get("content")
    if message["role"] != "assistant" or not field or field in message or not isinstance(said, str) or END not in said:
        return message
    thought, _, rest = said.partition(END)
    return message | {field: thought.rpartition("<think>")[2].strip("\n"), "content": rest.lstrip("\n")}


def checked(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages. RendererError where one of them is no message with a role and text."""
    for message in messages:
        said = message.get("content") if isinstance(message, dict) else None
        if not isinstance(said, str) or not isinstance(message.get("role"), str):
            raise RendererError(f"{str(message)[:200]!r} is no message with a role and text",
                                "a message is {'role': 'user', 'content': text}")
    if not messages:
        raise RendererError("nothing was said to the policy", "give at least {'role': 'user', 'content': text}")
    return messages


def refusal(messages: Iterable[Message], why: str) -> RendererError:
    """An error that says which messages a template cannot render, and what to do."""
    roles = ", ".join(one["role"] for one in messages)
    fix = f"use a model family whose template has tools ({FAMILIES})" if "tool" in roles else "use another template"
    return RendererError(f"the chat template cannot render messages of the roles {roles} ({' '.join(why.split())})",
                         f"{fix}, or set tokenizer.chat_template")


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages, with an id for each call and each result that has none, in order. Some templates look the name of a
    result up by it, and some want exactly nine letters and digits."""
    done, waiting, number = [], list[str](), 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or []:
            calls.append({"id": f"call{number:05d}"} | call)
            number += 1
        if calls:
            message, waiting = message | {"tool_calls": calls}, [call["id"] for call in calls]
        if message["role"] == "tool" and waiting:
            message = {"tool_call_id": waiting[0]} | message
            waiting = waiting[1:]
        done.append(message)
    return done


def with_arguments(message: Message, form: Callable[[Any], Any]) -> Message:
    """The message with the arguments of its calls in another form, where they are no text."""
    calls = [call | {"function": call["function"] | {"arguments": form(call["function"]["arguments"])}}
             if not isinstance(call["function"]["arguments"], str) else call
             for call in message.get("tool_calls") or []]
    return message | {"tool_calls": calls} if calls else message
