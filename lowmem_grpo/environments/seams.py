"""Where sampled tokens end and the bridge to the next turn begins, found in a conversation that is made up."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowmem_grpo.environments.marks import ANCHOR, StandIns
from lowmem_grpo.environments.template import ChatTemplate, RendererError, refusal, with_arguments
from lowmem_grpo.types import Message


@dataclass(frozen=True)
class Seam:
    """The text after an answer that was made up: `cut`, then the mark `end`, then all that comes after it."""

    form: int  # which of `answers` the template can render
    called: bool  # the answer is a tool call, so that what the template writes behind the anchor is the call's
    cut: str
    end: str  # the mark that ends the turn, or nothing where a template has none
    ends: frozenset[int]  # the tokens that end a turn here
    marks: tuple[list[int], list[int]]  # the marks of the bridge behind a completion that was cut, and behind its end

    def tail(self, template: ChatTemplate, messages: Sequence[Message], ended: bool) -> str:
        """Return what the template writes for messages behind the answer, from the mark that ends it.

        Behind a completion that was cut also what comes before that mark, unless it belongs to a call.
        """
        text = behind_anchor(template.text_of_calls([*answers(messages)[self.form], *messages]))
        return text[len(self.cut):] if ended or self.called else text


def find_seam(template: ChatTemplate, messages: Sequence[Message]) -> Seam:
    """The seam before messages of such roles and number. RendererError where the template leaves one out."""
    stand_ins = StandIns(template.marks, messages)
    words = [stand_ins.defused(one) for one in messages]
    words = [one | {"content": stand_ins.word(f"{at} {one['content']}")} if str(one["content"]).strip() else one
             for at, one in enumerate(words)]
    why = ""
    for form, before in enumerate(answers(words)):
        try:
            text = template.text_of_calls([*before, *words])
        except RendererError as error:
            why = why or str(error.__cause__)
            continue
        said = behind_anchor(text)
        if ANCHOR in text and all(str(one["content"]).strip() in said for one in words):
            return seam_of(template, form, said, words)
        why = "it leaves out the text of one of them, or of the answer before them"
    raise refusal(messages, why)


def answers(messages: Sequence[Message]) -> list[list[Message]]:
    """Conversations that may come before messages, the likeliest first: with calls of the tools whose results they are,
    in the forms that templates want, and with a plain answer."""
    question = {"role": "user", "content": "Question"}
    names = [str(one.get("name") or "tool") for one in messages if one["role"] == "tool"]
    calls = [{"type": "function", "function": {"name": name, "arguments": {"value": ANCHOR}}} for name in names]
    found = []
    for some in (calls, calls[:1]) if messages[0]["role"] == "tool" else ():
        asked = {"role": "assistant", "content": "", "tool_calls": some}
        as_text = with_arguments(asked, lambda arguments: arguments["value"])
        found += [asked, as_text, as_text | {"content": None}]
    return [[question, one] for one in (*found, {"role": "assistant", "content": ANCHOR})]


def seam_of(template: ChatTemplate, form: int, said: str, words: Sequence[Message]) -> Seam:
    """The seam of a conversation that the template renders; `said` is what follows the anchor."""
    before = answers(words)[form]
    called = "tool_calls" in before[-1]
    alone = behind_anchor(template.text_of_calls(before, generation=False))
    head = said[:min((said.index(text) for one in words if (text := str(one["content"])).strip()), default=len(said))]
    shared = head[:next((at for at, (one, other) in enumerate(zip(alone, head, strict=False)) if one != other),
                        min(len(alone), len(head)))]
    cut, end = split_at_end(template, shared, head)
    if not end and called:
        cut = shared
    ends = {end} if shared.startswith(cut + end) else {end, next(special(template, alone), end)}
    numbers = frozenset(number for number, text in template.marks.every.items() if text and text in ends)
    rest = said[len(cut):]
    found = tuple(template.marks.among(template.marks.encode(text)) for text in (rest if called else said, rest))
    return Seam(form, called, cut, end, numbers, (found[0], found[1]))


def split_at_end(template: ChatTemplate, shared: str, head: str) -> tuple[str, str]:
    """(what comes before the mark that ends a turn, the mark). It is the last one that the template writes behind an
    answer, whatever follows (the tokenizer's own end token where that is among them); where the template writes none,
    the first one of the next message ends the turn, as `<|user|>` in GLM 4."""
    eos = template.tokenizer.eos_token
    found = list(special(template, shared)) or list(special(template, head))[:1]
    if not found:
        return "", ""
    end = eos if isinstance(eos, str) and eos in found else found[-1]
    text = shared if end in shared else head
    return text[:text.rindex(end)] if text is shared else text[:text.index(end)], end


def special(template: ChatTemplate, text: str) -> Iterator[str]:
    """The special tokens of a text, in order."""
    return (found[0] for found in template.marks.of_special.finditer(text))


def behind_anchor(text: str) -> str:
    """Return what follows the answer that was made up."""
    return text.rpartition(ANCHOR)[2]
