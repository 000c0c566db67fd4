"""Checks of the chat template, of the tokens that end a completion, and of token ids beyond the model's vocabulary.
Padding may be a token that ends completions, since masks come from lengths.

In a multi-turn run the template may rewrite earlier messages when new ones follow. `history="append"` never renders a
turn again. With `history="template"`, a new training sequence begins where sampled text was rewritten.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from lowmem_grpo.data.examples import Example, each_of
from lowmem_grpo.environments.renderer import PlainRenderer, Renderer, RendererError, renderer_for
from lowmem_grpo.environments.template import FAMILIES, thought_apart
from lowmem_grpo.trainer.preflight.subject import Messages, Subject
from lowmem_grpo.types import Finding, Message

QUESTION: Message = {"role": "user", "content": "What is 6 times 7?"}
ANSWER, THOUGHT = "Forty-two", "<think>\nSix sevens.\n</think>\n\n"
NO_THOUGHT = re.compile(r"\A\s*<think>\s*</think>\s*")
RESULT = "The result is 42."


@dataclass(frozen=True)
class Transition:
    """A transition between two turns: the policy's text, its number of tool calls, and whether a limit cut it off."""

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
    """The result of trying a template at a transition between turns."""

    transition: Transition
    appends: bool = False
    refused: RendererError | None = None  # set if the template cannot render it at all
    never_anew: RendererError | None = None  # set if only `history="template"` cannot render it


def try_transitions(renderer: Renderer, tools: bool, replies: bool) -> list[Tried]:
    """Try the template at each transition of a run with `tools`, or with an environment that `replies`."""
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
    """Return whether the template keeps the policy's text when replies follow; an empty thought may be dropped."""
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
    """Return the part of a rendered last answer that the policy samples. It includes the token that ends the policy's
    turn, unless a limit cut the turn off."""
    seam = renderer.seam(transition.replies)
    last = max(written.rfind(ANSWER), written.rfind("6 * 7"), 0)
    ends = sorted(at + len(end) * (not transition.cut) for number in seam.ends
                  if (at := written.find(end := renderer.marks.every[number], last)) >= 0)
    if ends:
        return written[:ends[0]]
    return written if transition.cut else written + seam.end  # e.g. GLM 4's `<|user|>`, which begins the next message


def no_tool_support(renderer: Renderer, messages: Sequence[Message] = (QUESTION,)) -> RendererError | None:
    """Return an error that says why a run with the renderer's tools cannot begin; None if it can begin."""
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


STOP = "a string of vllm_sampling_params=SamplingParams(stop=...)"
SOME = 8  # turns assumed for the cost if the settings have no limit


def no_generation_prompt(subject: Subject) -> Iterator[Finding]:
    """Find a chat template that adds nothing for `add_generation_prompt=True`."""
    for looked in subject.chats[:1]:
        messages = looked.row["prompt"]
        ready, whole = subject.render(messages, True), answered(subject, messages)
        if whole is None or subject.render(messages, False) != ready or not whole.startswith(ready):
            continue
        if head := whole[len(ready) :].partition(ANSWER)[0].strip():
            yield Finding("warning", "", f"the chat template leaves out {head!r} at the end of a prompt, so the model "
                          "must write it before each answer",
                          "let the template end with this text in {% if add_generation_prompt %}...{% endif %}")


def left_out(subject: Subject) -> Iterator[Finding]:
    """Find a chat template that leaves out system or user messages."""
    dropped = Counter(
        message["role"] for looked in subject.chats for message in looked.row["prompt"]
        if message["role"] in ("system", "user") and looked.prompt and message["content"].strip()
        not in looked.prompt.text
    )
    for role, count in dropped.items():
        yield Finding("warning", "", f"the chat template leaves out the text of {count} {role} messages in the "
                      f"{len(subject.chats)} sampled prompts", "put the text into a message that the template keeps, "
                      "or set another tokenizer.chat_template")


def answered(subject: Subject, messages: Messages) -> str | None:
    """Render the messages and ANSWER as their reply; return None if the template refuses that."""
    try:
        return subject.render([*messages, {"role": "assistant", "content": ANSWER}], False)
    except Exception:  # noqa: BLE001 - a template may raise anything; the prompt itself was rendered
        return None


def no_end(subject: Subject) -> Iterator[Finding]:
    """Find a model for which neither the tokenizer nor the generation config names an end token."""
    if not subject.end_ids and not subject.end_texts:
        yield Finding("warning", "", "no token ends a completion: neither the tokenizer nor the model's generation "
                      "config names one, so each completion goes on to max_completion_length",
                      f"set tokenizer.eos_token, or {STOP}")


def other_end(subject: Subject) -> Iterator[Finding]:
    """Find a chat template that ends answers, or calls of tools, with a token at which sampling does not stop."""
    yield from other_end_of_calls(subject)
    for looked in subject.chats[:1] if subject.end_ids else ():
        tail = (answered(subject, looked.row["prompt"]) or "").rpartition(ANSWER)[2]
        ids = subject.tokenizer(tail, add_special_tokens=False).input_ids if tail.strip() else []
        if not ids or subject.end_ids & {*ids} or any(text in tail for text in subject.end_texts):
            continue
        yield Finding("warning", "", f"the chat template ends an answer with {tail.strip()!r}, but only "
                      f"{names_of_ends(subject)} ends a completion, so answers may run on to their maximum length",
                      "set tokenizer.eos_token to the template's end token"
                      f"{f', or {STOP}' if subject.does_sampling else ''}")


def other_end_of_calls(subject: Subject) -> Iterator[Finding]:
    """Yield a warning if the token that ends a tool call in the chat template does not end a completion."""
    try:
        renderer, _ = try_turns(subject)
        if not isinstance(renderer, Renderer) or not renderer.template.tools:
            return
        ends = renderer.seam(OF_TOOLS[0].replies).ends
    except RendererError:
        return  # `not_rendered` reports it
    if ends and subject.end_ids and not ends & subject.end_ids:
        name = subject.tokenizer.decode([min(ends)])
        yield Finding("warning", "", f"the chat template ends a tool call with {name!r}, but only "
                      f"{names_of_ends(subject)} ends a completion, so a turn goes on after its call",
                      f"add {min(ends)} to model.generation_config.eos_token_id, or set vllm_sampling_params="
                      f"SamplingParams(stop_token_ids=[{min(ends)}])")


def names_of_ends(subject: Subject) -> str:
    """Return the end tokens as text: `'<|im_end|>' or '<|endoftext|>'`."""
    return " or ".join(repr(subject.tokenizer.decode([token])) for token in sorted(subject.end_ids))


def endless(subject: Subject) -> Iterator[Finding]:
    """Find rows of SFTTrainer with an answer that is trained without an end token. It is an error if no answer of a
    row has an end token, unless the rows are token ids."""
    ended = [[bool(subject.end_ids & {*answer}) for answer in answers(example)]
             for looked in subject.sample.fitting for example in each_of(looked.prompt)]
    never = "warning" if subject.sample.encoder.column == "input_ids" else "error"
    for which, severity, count in (("no answer", never, sum(not any(row) for row in ended)),
                                   ("not every answer", "warning", sum(any(row) > all(row) for row in ended))):
        if count and subject.end_ids:
            yield Finding(severity, "", f"in {subject.sample.share(count)}, {which} is trained with a token that ends "
                          f"a completion ({names_of_ends(subject)}), so the model does not learn to stop", "include "
                          "the end token in what is trained ({% generation %} marks in a chat template, labels, the "
                          "parts of train_on_responses_only), or set tokenizer.eos_token to what the chat template "
                          "writes there")


def answers(example: Example) -> list[list[int]]:
    """Return the example's answers: each sequence of consecutive trained tokens."""
    trained = example.trained or [True] * len(example.completion_ids)
    runs = groupby(zip(trained, example.completion_ids, strict=True), lambda pair: pair[0])
    return [[token for _, token in run] for counts, run in runs if counts]


def unknown_ids(subject: Subject) -> Iterator[Finding]:
    """Find end, padding or prompt tokens whose ids are beyond the model's vocabulary. The model would fail on them,
    or never sample them."""
    rows, tokenizer = int(subject.policy.base.get_input_embeddings().weight.shape[0]), subject.tokenizer
    fix = ("use the model's own tokenizer, or add tokens to it and to the model with lowmem_grpo.add_new_tokens before "
           "get_peft_model")
    ends = sorted(end for end in subject.end_ids if end >= rows)
    if ends:
        severity = "error" if len(ends) == len(subject.end_ids) and not subject.end_texts else "warning"
        yield Finding(severity, "", f"the end token {ends[0]} is beyond the model's vocabulary of {rows}, so it is "
                      "never sampled", fix)
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id >= rows:
        yield Finding("error", "", f"the padding token {tokenizer.pad_token_id} is beyond the model's vocabulary of "
                      f"{rows}", fix)
    unknown = (token for looked in subject.sample.fitting if looked.prompt
               for token in (*looked.prompt.ids, *getattr(looked.prompt, "completion_ids", ())) if token >= rows)
    for token in islice(unknown, 1):
        yield Finding("error", "", f"a row contains the token {token} ({tokenizer.decode([token])!r}), but the "
                      f"model's vocabulary has {rows} tokens", fix)


def not_rendered(subject: Subject) -> Iterator[Finding]:
    """Find a multi-turn run whose tools or messages the chat template cannot render. With `history="template"`, the
    template must also render the whole conversation again."""
    try:
        renderer, trials = try_turns(subject)
        anew = renderer is not None and subject.args.history == "template"
        for error in [trial.refused or (trial.never_anew if anew else None) for trial in trials]:
            if error is not None:
                raise error
        if anew and isinstance(renderer, PlainRenderer):
            renderer.render_anew([], 0)  # raises the error to report
    except RendererError as error:
        yield Finding("error", "", error.problem, error.fix)


def rewritten(subject: Subject) -> Iterator[Finding]:
    """Find a multi-turn run whose chat template changes earlier answers, for example by removing their thoughts. The
    finding says before which messages it does so, and what `history="template"` would cost."""
    try:
        trials = try_turns(subject)[1]
    except RendererError:
        return  # `not_rendered` reports it
    changed = [trial.transition.name for trial in trials if not (trial.appends or trial.refused or trial.never_anew)]
    if not changed:
        return
    problem = f"the chat template rewrites sampled text that stands before {', '.join(changed)}"
    if subject.args.history == "append":
        yield Finding("warning", "", f"{problem}; history='append' trains on the text as it was sampled, but a server "
                      "that renders all messages again for each turn shows the model the rewritten text",
                      "nothing, or set history='template' to train on what such a server shows")
    else:
        turns = subject.args.turn_limit or SOME
        yield Finding("warning", "", f"{problem}, so history='template' begins another training sequence there; if "
                      f"each turn does, an episode of {turns} turns has {cost(turns):.1f} times the tokens",
                      "use history='append', which has each token only once")


def try_turns(subject: Subject) -> tuple[Renderer | PlainRenderer | None, list[Tried]]:
    """Return the renderer of a multi-turn run, and the trial of the template at each transition between turns."""
    if subject.turns is None:
        return None, []
    prompt: Any = next((looked.row.get("prompt") for looked in subject.sample.usable), [QUESTION])
    tools = subject.turns.tools
    renderer = renderer_for(prompt, subject.tokenizer, tools, subject.sample.encoder.template_kwargs)
    if not isinstance(renderer, Renderer):
        return renderer, []
    trials = try_transitions(renderer, bool(tools), subject.turns.replies)
    if tools and (lacking := no_tool_support(renderer, prompt)):
        trials.insert(0, Tried(trials[0].transition, refused=lacking))
    return renderer, trials
