"""A check before a run: does the chat template append new messages between turns, or rewrite earlier ones?

`history="append"` never renders a turn again, so any template is safe. With `history="template"`, wherever the template
rewrites sampled text, the episode's sequence ends and another begins.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lowmem_grpo.environments.renderer import Renderer
from lowmem_grpo.environments.template import FAMILIES, RendererError, thought_apart
from lowmem_grpo.types import Message

QUESTION: Message = {"role": "user", "content": "What is 6 times 7?"}
ANSWER, THOUGHT = "Forty-two", "<think>\nSix sevens.\n</think>\n\n"
NO_THOUGHT = re.compile(r"\A\s*<think>\s*</think>\s*")
RESULT = "The result is 42."


@dataclass(frozen=True)
class Transition:
    """A transition between two turns: the policy's text, its number of tool calls, and whether its turn was cut."""

    name: str
    said: str
    calls: int = 0
    cut: bool = False

    @property
    def replies(self) -> list[Message]:
        result = {"role": "tool", "name": "calculator", "content": RESULT}
        return [result] * self.calls or [{"role": "user", "content": "And 6 times 8?"}]


OF_TOOLS = (
    Transition("a tool result", "", 1), Transition("two tool results", "", 2),
    Transition("a tool result after words and a call", "I look it up.", 1),
    Transition("a tool result after a thought and a call", THOUGHT, 1),
)
OF_REPLIES = (
    Transition("a user message", ANSWER), Transition("a user message after a thought", THOUGHT + ANSWER),
    Transition("a user message after a turn that was cut", ANSWER, cut=True),
)


@dataclass(frozen=True)
class Tried:
    """The result of trying a template at a transition."""

    transition: Transition
    appends: bool = False
    refused: RendererError | None = None  # set if the template cannot render it at all
    never_anew: RendererError | None = None  # set if only `history="template"` cannot render it


def try_transitions(renderer: Renderer, tools: bool, replies: bool) -> list[Tried]:
    """Return the template's result at each transition of a run with `tools`, or whose environment `replies`."""
    transitions = (*(OF_TOOLS if tools else ()), *(OF_REPLIES if replies else ()))
    return [tried(renderer, transition) for transition in transitions]


def tried(renderer: Renderer, transition: Transition) -> Tried:
    try:
        renderer.bridge(transition.replies, ended=not transition.cut)
    except RendererError as error:
        return Tried(transition, refused=error)
    try:
        return Tried(transition, appends(renderer, transition))
    except RendererError as error:
        return Tried(transition, never_anew=error)


def appends(renderer: Renderer, transition: Transition) -> bool:
    """Return True if the conversation, rendered with the replies, begins with the prompt and the policy's text. That
    text is the answer as the template renders it when it comes last, with or without an empty thought."""
    template = renderer.template
    before = [QUESTION, thought_apart(answer(transition), template.source)]
    prompt = template.text([QUESTION])
    alone = template.text_of_calls(before, generation=False)
    later = template.text_of_calls([*before, *transition.replies])
    if not alone.startswith(prompt):
        return False
    written = written_by_policy(renderer, transition, alone[len(prompt):])
    return any(later.startswith(prompt + words) for words in (written, NO_THOUGHT.sub("", written)))


def answer(transition: Transition) -> Message:
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "6 * 7"}}}
    called = {"tool_calls": [call] * transition.calls} if transition.calls else {}
    return {"role": "assistant", "content": transition.said, **called}


def written_by_policy(renderer: Renderer, transition: Transition, written: str) -> str:
    """Return the part of a rendered last answer that the policy samples: up to and including the token that ends its
    turn, or excluding it for a cut turn."""
    seam = renderer.seam(transition.replies)
    last = max(written.rfind(ANSWER), written.rfind("6 * 7"), 0)
    ends = sorted(at + len(end) * (not transition.cut) for number in seam.ends
                  if (at := written.find(end := renderer.marks.every[number], last)) >= 0)
    if ends:
        return written[:ends[0]]
    return written if transition.cut else written + seam.end  # e.g. GLM 4's `<|user|>`, which begins the next message


def no_tool_support(renderer: Renderer, messages: Sequence[Message] = (QUESTION,)) -> RendererError | None:
    """Return an error that says why a run with these tools cannot begin; None if it can."""
    if refused := tried(renderer, OF_TOOLS[0]).refused:
        return refused
    names = [str(tool.get("function", tool).get("name")) for tool in renderer.template.tools or []]
    prompt = renderer.template.text(messages)
    missing = [name for name in names if name not in prompt]  # the policy would not know these tools
    return RendererError(f"the chat template does not tell the policy about its tools ({', '.join(missing)})",
                         f"use a model family whose template has tools ({FAMILIES}), set tokenizer.chat_template, or "
                         "describe each tool by its name in the prompt") if missing else None


def cost(turns: int) -> float:
    """Return the factor by which an episode's tokens grow if each of its equally long turns begins a new sequence."""
    return (turns + 1) / 2
