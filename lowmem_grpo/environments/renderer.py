"""`Renderer`: how messages become the tokens of the first prompt, and those between two turns of the policy."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.environments.marks import StandIns
from lowmem_grpo.environments.seams import Seam, find_seam
from lowmem_grpo.environments.template import ChatTemplate, RendererError, checked, thought_apart
from lowmem_grpo.types import Message

__all__ = ["Renderer", "RendererError"]

Shape = tuple[tuple[str, bool, bool], ...]  # of each message: role, whether it has a name, whether it says anything


class Renderer:
    """Renders with the tokenizer's chat template.

    `bridge` neither renders nor encodes what was sampled. Messages of tools and environments are rendered as the
    template does it, but their text cannot become a mark (see marks.py); messages of the dataset are trusted.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """`tools` are OpenAI schemas. RendererError without a chat template."""
        self.template = ChatTemplate(tokenizer, tools, template_kwargs)
        self.marks = self.template.marks
        self.seams: dict[Shape, Seam] = {}

    def first(self, messages: Sequence[Message], trusted: int | None = None) -> list[int]:
        """The prompt of the first turn, (P,). All messages are trusted, or as many of the first as are said."""
        return self.rendered(messages, len(messages) if trusted is None else trusted)

    def whole(self, messages: Sequence[Message], trusted: int | None = None) -> list[int]:
        """The prompt of a later turn, (P,), with the whole conversation rendered anew.

        The first `trusted` messages are the dataset's; without a number, those before the first answer.
        """
        if trusted is None:
            trusted = next((at for at, one in enumerate(messages) if one["role"] == "assistant"), len(messages))
        return self.rendered(messages, trusted)

    def rendered(self, messages: Sequence[Message], trusted: int) -> list[int]:
        """The ids of a conversation with the generation prompt; marks count only in the first messages."""

        def text(stand_ins: StandIns) -> str:
            later = [thought_apart(stand_ins.defused(one), self.template.source) for one in messages[trusted:]]
            return self.template.text_of_calls([*messages[:trusted], *later])

        if trusted >= len(messages):
            return self.marks.encode(self.template.text(messages))
        return self.encode(messages, text)

    def bridge(self, messages: Sequence[Message], ended: bool) -> list[int]:
        """Return the tokens (B,) between a sampled completion and the next one: the rest of the turn's end, the new
        messages, and the generation prompt.

        `ended`: the completion's last token is one that ends a turn here; `closed` tells. Whatever else it ended with
        (nothing, since it was cut, or another of the model's end tokens) stays, and the end of the turn follows it.
        """
        seam = self.seam(checked(messages))

        def text(stand_ins: StandIns) -> str:
            return seam.tail(self.template, [stand_ins.defused(one) for one in messages], ended)

        ids = self.encode(messages, text, seam.marks[ended])
        return ids[1:] if ended and seam.end else ids

    def closed(self, completion_ids: Sequence[int], messages: Sequence[Message]) -> bool:
        """Return whether a completion ends with a token that ends a turn before such messages."""
        return bool(completion_ids) and completion_ids[-1] in self.seam(messages).ends

    def encode(
        self, messages: Sequence[Message], text: Callable[[StandIns], str], marks: list[int] | None = None
    ) -> list[int]:
        """The ids of a text whose marks are all the template's: `marks`, or those that it has beside the stand-ins."""
        for whole in (False, True):
            stand_ins = StandIns(self.marks, messages, whole)
            rendered = text(stand_ins)
            ids = stand_ins.encode(rendered)
            own = self.marks.among(self.marks.encode(rendered)) if marks is None and stand_ins.texts else marks
            if own is None or self.marks.among(ids) == own:
                return ids
        raise RendererError("the chat template writes other special tokens around the text of a message than around "
                            "other text", "set tokenizer.chat_template to one that does not look into messages")

    def seam(self, messages: Sequence[Message]) -> Seam:
        """Return where the sampled tokens end before such messages, looked for once."""
        shape = tuple((str(one["role"]), bool(one.get("name")), bool(str(one["content"]).strip())) for one in messages)
        if shape not in self.seams:
            self.seams[shape] = find_seam(self.template, messages)
        return self.seams[shape]
