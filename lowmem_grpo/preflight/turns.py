"""Checks of runs of several turns: whether the chat template can render them, and what it does to what was sampled."""

from collections.abc import Iterator
from typing import Any

from lowmem_grpo.environments.plain import PlainRenderer, renderer_for
from lowmem_grpo.environments.renderer import Renderer, RendererError
from lowmem_grpo.environments.transitions import QUESTION, Tried, cost, no_tool_support, try_transitions
from lowmem_grpo.preflight.subject import Subject
from lowmem_grpo.runs.findings import Finding

SOME = 8  # turns for which the cost is told where the settings do not bound them


def not_rendered(subject: Subject) -> Iterator[Finding]:
    """Turns that cannot become tokens: the first reason."""
    try:
        refuse(subject)
    except RendererError as error:
        yield Finding("error", "", error.problem, error.fix)


def refuse(subject: Subject) -> None:
    """RendererError where the turns of a run cannot be rendered."""
    renderer = renderer_of(subject)
    anew = renderer is not None and subject.args.history == "template"
    if isinstance(renderer, Renderer):
        lacking = no_tool_support(renderer, prompt_of(subject)) if renderer.template.tools else None
        each = [one.refused or (one.never_anew if anew else None) for one in tried(subject, renderer)]
        for error in filter(None, [lacking, *each]):
            raise error
    elif renderer is not None and anew:
        renderer.whole([])  # which says why it cannot


def rewritten(subject: Subject) -> Iterator[Finding]:
    """A template that renders what was sampled differently once more messages follow."""
    try:
        renderer = renderer_of(subject)
    except RendererError:
        return  # `not_rendered` says so
    changed = [one.transition.name for one in tried(subject, renderer)
               if not (one.appends or one.refused or one.never_anew)]
    if not changed:
        return
    problem = f"the chat template rewrites what was sampled before {', '.join(changed)}"
    if subject.args.history == "append":
        yield Finding("warning", "", f"{problem}; history='append' trains what was sampled, and a server that renders "
                      "each turn anew shows the model something else", "nothing, or history='template' to train on "
                      "what such a server shows")
    else:
        turns = subject.args.turn_limit or SOME
        yield Finding("warning", "", f"{problem}, and there history='template' begins another sequence; if each turn "
                      f"does, an episode of {turns} turns has {cost(turns):.1f} times the tokens",
                      "history='append' has each token once")


def renderer_of(subject: Subject) -> Renderer | PlainRenderer | None:
    """The renderer of the run; None for single turns."""
    if subject.turns is None:
        return None
    kwargs = subject.sample.encoder.template_kwargs
    return renderer_for(prompt_of(subject), subject.tokenizer, subject.turns.tools, kwargs)


def tried(subject: Subject, renderer: Renderer | PlainRenderer | None) -> list[Tried]:
    """What the template does at the transitions of the run; nothing where the prompts are plain strings."""
    if subject.turns is None or not isinstance(renderer, Renderer):
        return []
    return try_transitions(renderer, bool(subject.turns.tools), subject.turns.replies)


def prompt_of(subject: Subject) -> Any:
    """The prompt of the first usable row: text, or messages."""
    return next((looked.row.get("prompt") for looked in subject.sample.usable), [QUESTION])
