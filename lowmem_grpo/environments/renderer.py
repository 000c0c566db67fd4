"""How messages become the tokens of the first prompt, and those between two turns of the policy: with the chat template
(`Renderer`), or for prompts that are plain strings (`PlainRenderer`).

A `TurnBoundary` is where sampled tokens end and the bridge to the next turn begins, found in a made-up conversation.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.data.examples import shared_start
from lowmem_grpo.engines.prompt_inputs import text_ids
from lowmem_grpo.environments.template import (
    ANCHOR,
    FAMILIES,
    ChatTemplate,
    RendererError,
    SpecialTokens,
    StandIns,
    checked,
    refusal,
    thought_apart,
    with_arguments,
)
from lowmem_grpo.types import Message

Shape = tuple[tuple[str, bool, bool], ...]  # for each message: role, whether it has a name, whether it says anything


@dataclass(frozen=True)
class TurnBoundary:
    """The text after an answer that was made up: `cut`, then the mark `end`, then all that comes after it."""

    form: int  # which of `answers` the template can render
    called: bool  # the answer is a tool call, so that what the template writes behind the anchor is the call's
    cut: str
    end: str  # the mark that ends the turn, or nothing where a template has none
    ends: frozenset[int]  # the tokens that end a turn here
    marks: tuple[list[int], list[int]]  # the marks of the bridge behind a completion that was cut, and behind its end

    def tail(self, template: ChatTemplate, messages: Sequence[Message], ended: bool) -> str:
        """Return what the template writes for messages behind the answer, from the mark that ends it. Behind a
        completion that was cut also what comes before that mark, unless it belongs to a call."""
        text = behind_anchor(template.text_of_calls([*answers(messages)[self.form], *messages]))
        return text[len(self.cut):] if ended or self.called else text


def find_seam(template: ChatTemplate, messages: Sequence[Message]) -> TurnBoundary:
    """Return the seam before messages of such roles and number. RendererError where the template leaves one out."""
    stand_ins = StandIns(template.marks, messages)
    words = [stand_ins.defused(message) for message in messages]
    words = [message | {"content": stand_ins.word(f"{at} {message['content']}")}
             if str(message["content"]).strip() else message for at, message in enumerate(words)]
    why = ""
    for form, before in enumerate(answers(words)):
        try:
            text = template.text_of_calls([*before, *words])
        except RendererError as error:
            why = why or str(error.__cause__)
            continue
        said = behind_anchor(text)
        if ANCHOR in text and all(str(message["content"]).strip() in said for message in words):
            return seam_of(template, form, said, words)
        why = "it leaves out the text of one of them, or of the answer before them"
    raise refusal(messages, why)


def answers(messages: Sequence[Message]) -> list[list[Message]]:
    """Return what may come before messages, the likeliest first: calls, in the forms of templates, or an answer."""
    question = {"role": "user", "content": "Question"}
    names = [str(message.get("name") or "tool") for message in messages if message["role"] == "tool"]
    calls = [{"type": "function", "function": {"name": name, "arguments": {"value": ANCHOR}}} for name in names]
    turns = []
    for some in (calls, calls[:1]) if messages[0]["role"] == "tool" else ():
        asked = {"role": "assistant", "content": "", "tool_calls": some}
        as_text = with_arguments(asked, lambda arguments: arguments["value"])
        turns += [asked, as_text, as_text | {"content": None}]
    return [[question, message] for message in (*turns, {"role": "assistant", "content": ANCHOR})]


def seam_of(template: ChatTemplate, form: int, said: str, words: Sequence[Message]) -> TurnBoundary:
    """Return the seam of a conversation that the template renders; `said` is what follows the anchor."""
    before = answers(words)[form]
    called = "tool_calls" in before[-1]
    alone = behind_anchor(template.text_of_calls(before, generation=False))
    texts = [text for message in words if (text := str(message["content"])).strip()]
    head = said[:min(map(said.index, texts), default=len(said))]
    shared = shared_start(alone, head)
    cut, end = split_at_end(template, shared, head)
    if not end and called:
        cut = shared
    ends = {end} if shared.startswith(cut + end) else {end, next(special(template, alone), end)}
    numbers = frozenset(number for number, text in template.marks.every.items() if text and text in ends)
    rest = said[len(cut):]
    marks = tuple(template.marks.among(template.marks.encode(text)) for text in (rest if called else said, rest))
    return TurnBoundary(form, called, cut, end, numbers, (marks[0], marks[1]))


def split_at_end(template: ChatTemplate, shared: str, head: str) -> tuple[str, str]:
    """Return what comes before the mark that ends a turn, and that mark: the tokenizer's end token, or the last mark
    that the template writes behind an answer; without one, the first of the next message, as `<|user|>` in GLM 4."""
    eos = template.tokenizer.eos_token
    tokens = list(special(template, shared)) or list(special(template, head))[:1]
    if not tokens:
        return "", ""
    end = eos if isinstance(eos, str) and eos in tokens else tokens[-1]
    text = shared if end in shared else head
    return text[:text.rindex(end)] if text is shared else text[:text.index(end)], end


def special(template: ChatTemplate, text: str) -> Iterator[str]:
    return (match[0] for match in template.marks.of_special.finditer(text))


def behind_anchor(text: str) -> str:
    return text.rpartition(ANCHOR)[2]


class Renderer:
    """Renders with the tokenizer's chat template. `bridge` neither renders nor encodes what was sampled. Messages of
    tools and environments are rendered as the template does it, but their text cannot become a mark (see template.py);
    messages of the dataset are trusted."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None,
                 template_kwargs: dict[str, Any] | None = None) -> None:
        """`tools` are OpenAI schemas. RendererError without a chat template."""
        self.template = ChatTemplate(tokenizer, tools, template_kwargs)
        self.marks = self.template.marks
        self.seams: dict[Shape, TurnBoundary] = {}

    def first(self, messages: Sequence[Message], trusted: int | None = None) -> list[int]:
        """Return the prompt of the first turn, (P,). All messages are trusted, or as many of the first as are said."""
        return self.rendered(messages, len(messages) if trusted is None else trusted)

    def render_anew(self, messages: Sequence[Message], trusted: int | None = None) -> list[int]:
        """Return the prompt of a later turn, (P,): the whole conversation, rendered anew. The first `trusted` messages
        are the dataset's; without a number, those before the first answer."""
        if trusted is None:
            trusted = next((at for at, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        return self.rendered(messages, trusted)

    def rendered(self, messages: Sequence[Message], trusted: int) -> list[int]:
        """Return the ids of a conversation with the generation prompt; marks count only in the first messages."""

        def text(stand_ins: StandIns) -> str:
            later = [thought_apart(stand_ins.defused(message), self.template.source) for message in messages[trusted:]]
            return self.template.text_of_calls([*messages[:trusted], *later])

        if trusted >= len(messages):
            return self.marks.encode(self.template.text(messages))
        return self.encode(messages, text)

    def bridge(self, messages: Sequence[Message], ended: bool) -> list[int]:
        """Return the tokens (B,) between a sampled completion and the next one: the rest of the turn's end, the new
        messages, and the generation prompt. `ended`: the completion's last token is one that ends a turn here; `closed`
        tells. Whatever else it ended with (nothing, since it was cut, or another of the model's end tokens) stays, and
        the end of the turn follows it."""
        seam = self.seam(checked(messages))

        def text(stand_ins: StandIns) -> str:
            return seam.tail(self.template, [stand_ins.defused(message) for message in messages], ended)

        ids = self.encode(messages, text, seam.marks[ended])
        return ids[1:] if ended and seam.end else ids

    def closed(self, completion_ids: Sequence[int], messages: Sequence[Message]) -> bool:
        """Return whether a completion ends with a token that ends a turn before such messages."""
        return bool(completion_ids) and completion_ids[-1] in self.seam(messages).ends

    def encode(
        self, messages: Sequence[Message], text: Callable[[StandIns], str], marks: list[int] | None = None
    ) -> list[int]:
        """Return the ids of a text whose marks are all the template's: `marks`, or those beside the stand-ins."""
        for whole in (False, True):
            stand_ins = StandIns(self.marks, messages, whole)
            rendered = text(stand_ins)
            ids = stand_ins.encode(rendered)
            own = self.marks.among(self.marks.encode(rendered)) if marks is None and stand_ins.texts else marks
            if own is None or self.marks.among(ids) == own:
                return ids
        raise RendererError("the chat template writes other special tokens around the text of a message than around "
                            "other text", "set tokenizer.chat_template to one that does not look into messages")

    def seam(self, messages: Sequence[Message]) -> TurnBoundary:
        """Return where the sampled tokens end before such messages, looked for once."""
        shape = tuple((str(message["role"]), bool(message.get("name")), bool(str(message["content"]).strip()))
                      for message in messages)
        if shape not in self.seams:
            self.seams[shape] = find_seam(self.template, messages)
        return self.seams[shape]


class PlainRenderer:
    """A text that goes on: what is said to the policy stands on lines of its own, `\\n...\\n`, without names of roles.
    The first prompt is encoded as in single-turn runs. An end token that was sampled stays where it is."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.marks = tokenizer, SpecialTokens(tokenizer)

    def first(self, prompt: str | Sequence[Message], trusted: int | None = None) -> list[int]:
        """Return the prompt of the first turn, (P,): a text, or the texts of messages."""
        text = prompt if isinstance(prompt, str) else "".join(str(message["content"]) for message in prompt)
        return text_ids(self.tokenizer, text)

    def bridge(self, messages: Sequence[Message], ended: bool) -> list[int]:
        """Return the tokens (B,) between a sampled completion and the next one, whether it `ended` or was cut."""
        stand_ins = StandIns(self.marks, messages)
        said = "".join(f"\n{stand_ins.defused(message)['content']}" for message in checked(messages)) + "\n"
        return stand_ins.encode(said)

    def closed(self, completion_ids: Sequence[int], messages: Sequence[Message]) -> bool:
        return bool(completion_ids) and completion_ids[-1] == self.tokenizer.eos_token_id

    def render_anew(self, messages: Sequence[Message], trusted: int | None = None) -> list[int]:
        """Raise RendererError: there is nothing that could render the conversation anew."""
        raise RendererError("history='template' renders the conversation with the chat template for each turn, and a "
                            "prompt that is a plain string has none",
                            "use history='append', or make `prompt` a list of chat messages")


def renderer_for(prompt: Any, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None,
                 template_kwargs: dict[str, Any] | None = None) -> Renderer | PlainRenderer:
    """Return the renderer of prompts. RendererError for tools with a plain string, or without a chat template."""
    if not isinstance(prompt, str):
        return Renderer(tokenizer, tools, template_kwargs)
    if tools:
        raise RendererError("tools are described to the policy by its chat template, and a prompt that is a plain "
                            "string has none", "make `prompt` a list of chat messages, with a model family whose "
                            f"template has tools ({FAMILIES})")
    return PlainRenderer(tokenizer)
