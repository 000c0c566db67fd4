"""Renders messages to tokens: the first prompt, and the bridge between two turns of the policy. Rendering a made-up
dialogue shows where a bridge begins (`TurnBoundary`)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.data.examples import shared_start
from lowmem_grpo.data.harmony import HarmonyReader, is_harmony
from lowmem_grpo.data.prompt_inputs import text_ids
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
)
from lowmem_grpo.environments.tools.parsers import Reading
from lowmem_grpo.types import Message

Shape = tuple[tuple[str, bool, bool], ...]  # for each message: (role, has a name, has nonblank content)


@dataclass(frozen=True)
class TurnBoundary:
    """The text that a template writes after an answer: `cut`, then the special token `end`, then the rest."""

    form: int  # index in `answers` of the first made-up conversation that the template renders
    called: bool  # the answer is a tool call, so the text after the anchor begins with the rest of the call
    cut: str
    end: str  # the special token that ends the turn; "" if the template has none
    ends: frozenset[int]  # ids of the tokens that end a turn here
    marks: tuple[list[int], list[int]]  # special tokens of the bridge: after a cut completion, after an ended one

    def tail(self, template: ChatTemplate, messages: Sequence[Message], ended: bool) -> str:
        """Return the rendered text of `messages`, beginning with the token that ends the turn before them. After a
        completion that was cut (not `ended`), it begins with `cut`, unless that turn is a call."""
        text = behind_anchor(template.text_of_calls([*answers(messages)[self.form], *messages]))
        return text[len(self.cut):] if ended or self.called else text


def find_seam(template: ChatTemplate, messages: Sequence[Message]) -> TurnBoundary:
    """Return the turn boundary before `messages`; RendererError if the template refuses them or leaves one out."""
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
    """Return made-up conversations that may precede `messages`, the likeliest first. They end with a call for each tool
    result, with one call, or with a plain answer."""
    question = {"role": "user", "content": "Question"}
    names = [str(message.get("name") or "tool") for message in messages if message["role"] == "tool"]
    calls = [{"type": "function", "function": {"name": name, "arguments": {"value": ANCHOR}}} for name in names]
    turns: list[Message] = [{"role": "assistant", "content": "", "tool_calls": some} for some in (calls, calls[:1])
                            if messages[0]["role"] == "tool"]
    return [[question, message] for message in (*turns, {"role": "assistant", "content": ANCHOR})]


def seam_of(template: ChatTemplate, form: int, said: str, words: Sequence[Message]) -> TurnBoundary:
    """Return the turn boundary before `words`, after conversation `form` of `answers`; `said` follows ANCHOR."""
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
    """Return the text before the special token that ends a turn, and that token. It is the EOS token, else the last
    special token after an answer, else the first of the next message (`<|user|>` in GLM 4)."""
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
    """Renders with the tokenizer's chat template. Text of tools and environments cannot become special tokens (see
    template.py); messages of the dataset are trusted."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None,
                 template_kwargs: dict[str, Any] | None = None) -> None:
        """`tools` are OpenAI schemas. RendererError if there is no chat template."""
        self.template = ChatTemplate(tokenizer, tools, template_kwargs)
        self.marks = self.template.marks
        self.seams: dict[Shape, TurnBoundary] = {}
        self.channels = HarmonyReader(tokenizer) if is_harmony(tokenizer) else None

    def read(self, completion_ids: Sequence[int], text: str) -> Reading:
        """Return a completion without tool calls, with its thoughts apart if they are in a channel of their own."""
        if self.channels is None:
            return Reading(text)
        content, fields, _ = self.channels.read(completion_ids)
        return Reading(content, fields=fields)

    def first(self, messages: Sequence[Message], trusted: int | None = None) -> list[int]:
        """Return the prompt of a turn, (P,): the conversation with the generation prompt. Only text of the first
        `trusted` messages, those of the dataset, can become special tokens; None trusts all."""
        if trusted is None or trusted >= len(messages):
            return self.marks.encode(self.template.text_of_calls(messages))

        def text(stand_ins: StandIns) -> str:
            later = [thought_apart(stand_ins.defused(message), self.template.source) for message in messages[trusted:]]
            return self.template.text_of_calls([*messages[:trusted], *later])

        return self.encode(messages, text)

    def render_anew(self, messages: Sequence[Message], trusted: int) -> list[int]:
        """Return the prompt of a later turn, (P,): the whole conversation, re-rendered (see `first`)."""
        return self.first(messages, trusted)

    def bridge(self, messages: Sequence[Message], ended: bool) -> list[int]:
        """Return the tokens (B,) between two sampled completions: the rest of the turn's end, the new messages, and the
        generation prompt. The whole end of the turn is included if the completion is not `ended` (see `closed`)."""
        seam = self.seam(checked(messages))

        def text(stand_ins: StandIns) -> str:
            return seam.tail(self.template, [stand_ins.defused(message) for message in messages], ended)

        ids = self.encode(messages, text, seam.marks[ended])
        return ids[1:] if ended and seam.end else ids

    def closed(self, completion_ids: Sequence[int], messages: Sequence[Message]) -> bool:
        """Return True if a completion ends with a token that ends a turn before `messages`."""
        return bool(completion_ids) and completion_ids[-1] in self.seam(messages).ends

    def encode(
        self, messages: Sequence[Message], text: Callable[[StandIns], str], marks: list[int] | None = None
    ) -> list[int]:
        """Return the ids of the text that `text` renders with stand-in words. RendererError if their special tokens are
        not `marks`, or by default not those of the template itself."""
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
        """Return the turn boundary before `messages`, cached by their roles and empty fields."""
        shape = tuple((str(message["role"]), bool(message.get("name")), bool(str(message["content"]).strip()))
                      for message in messages)
        if shape not in self.seams:
            self.seams[shape] = find_seam(self.template, messages)
        return self.seams[shape]


class PlainRenderer:
    """The renderer of prompts that are plain strings. Later messages follow on separate lines, without role names."""

    channels = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.marks = tokenizer, SpecialTokens(tokenizer)

    def first(self, prompt: str | Sequence[Message], trusted: int | None = None) -> list[int]:
        """Return the prompt of the first turn, (P,): a text, or the texts of messages."""
        text = prompt if isinstance(prompt, str) else "".join(str(message["content"]) for message in prompt)
        return text_ids(self.tokenizer, text)

    def bridge(self, messages: Sequence[Message], ended: bool) -> list[int]:
        """Return the tokens (B,) between a sampled completion and the next one; `ended` makes no difference."""
        stand_ins = StandIns(self.marks, messages)
        said = "".join(f"\n{stand_ins.defused(message)['content']}" for message in checked(messages)) + "\n"
        return stand_ins.encode(said)

    def closed(self, completion_ids: Sequence[int], messages: Sequence[Message]) -> bool:
        return bool(completion_ids) and completion_ids[-1] == self.tokenizer.eos_token_id

    def read(self, completion_ids: Sequence[int], text: str) -> Reading:
        return Reading(text)

    def render_anew(self, messages: Sequence[Message], trusted: int) -> list[int]:
        """Raise RendererError: without a chat template the conversation cannot be re-rendered."""
        raise RendererError("history='template' renders the conversation with the chat template for each turn, and a "
                            "prompt that is a plain string has none",
                            "use history='append', or make `prompt` a list of chat messages")


def renderer_for(prompt: Any, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None,
                 template_kwargs: dict[str, Any] | None = None) -> Renderer | PlainRenderer:
    """Return a prompt's renderer. RendererError for a plain string with tools, or messages without a chat template."""
    if not isinstance(prompt, str):
        return Renderer(tokenizer, tools, template_kwargs)
    if tools:
        raise RendererError("tools are described to the policy by its chat template, and a prompt that is a plain "
                            "string has none", "make `prompt` a list of chat messages, with a model family whose "
                            f"template has tools ({FAMILIES})")
    return PlainRenderer(tokenizer)
