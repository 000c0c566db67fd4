"""`PlainRenderer`: turns of a prompt that is a plain string, which has no chat template."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.engines.prompt_inputs import text_ids
from lowmem_grpo.environments.marks import Marks, StandIns
from lowmem_grpo.environments.renderer import Renderer
from lowmem_grpo.environments.template import FAMILIES, RendererError, checked
from lowmem_grpo.types import Message


class PlainRenderer:
    """A text that goes on: what is said to the policy stands on lines of its own, `\\n...\\n`, without names of roles.

    The first prompt is encoded as in single-turn runs. An end token that was sampled stays where it is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.marks = tokenizer, Marks(tokenizer)

    def first(self, prompt: str | Sequence[Message], trusted: int | None = None) -> list[int]:
        """The prompt of the first turn, (P,): a text, or the texts of messages."""
        text = prompt if isinstance(prompt, str) else "".join(str(message["content"]) for message in prompt)
        return text_ids(self.tokenizer, text)

    def bridge(self, messages: Sequence[Message], ended: bool) -> list[int]:
        """Return the tokens (B,) between a sampled completion and the next one, whether it `ended` or was cut."""
        stand_ins = StandIns(self.marks, messages)
        said = "".join(f"\n{stand_ins.defused(one)['content']}" for one in checked(messages)) + "\n"
        return stand_ins.encode(said)

    def closed(self, completion_ids: Sequence[int], messages: Sequence[Message]) -> bool:
        """Return whether a completion ends with the tokenizer's end token."""
        return bool(completion_ids) and completion_ids[-1] == self.tokenizer.eos_token_id

    def whole(self, messages: Sequence[Message], trusted: int | None = None) -> list[int]:
        """RendererError: there is nothing that could render the conversation anew."""
        raise RendererError("history='template' renders the conversation with the chat template for each turn, and a "
                            "prompt that is a plain string has none",
                            "use history='append', or make `prompt` a list of chat messages")


def renderer_for(
    prompt: Any, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> Renderer | PlainRenderer:
    """The renderer for a dataset's prompts. RendererError for tools with a plain string, or without a chat template."""
    if not isinstance(prompt, str):
        return Renderer(tokenizer, tools, template_kwargs)
    if tools:
        raise RendererError("tools are described to the policy by its chat template, and a prompt that is a plain "
                            "string has none", "make `prompt` a list of chat messages, with a model family whose "
                            f"template has tools ({FAMILIES})")
    return PlainRenderer(tokenizer)
