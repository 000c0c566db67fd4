"""Tool calls read by the tokenizer's own response template, for forms that `parsers` does not know.

See https://huggingface.co/docs/transformers/chat_response_parsing. TRL's `add_response_schema` sets the template for
the models that it knows.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.environments.tools.arguments import writable
from lowmem_grpo.environments.tools.bodies import call_of
from lowmem_grpo.environments.tools.parsers import Reading, unreadable

SHOWN = 160  # characters of an error of transformers


class TemplateParser:
    """Reads completions that follow `prefix`, the rendered prompt of a turn.

    `example` is a turn with a call as the template writes it. Its tokens that `answer`, a turn without one, has not are
    the `signs` of a call: the response template passes over what it cannot read, and that must not be taken for text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[dict[str, Any]], prefix: str, example: str,
                 answer: str) -> None:
        self.tokenizer, self.prefix, self.example = tokenizer, prefix, example.strip()
        self.schemas: list[Any] = [*schemas]
        self.signs = [token for token in tokenizer.get_added_vocab() if token in example and token not in answer]

    def read(self, ids: Sequence[int], text: str) -> Reading:
        """What a completion says. `text` is `ids` without special tokens; without ids the text is all there is."""
        whole = str(self.tokenizer.decode(list(ids))) if len(ids) else text
        try:
            found = dict(self.tokenizer.parse_response(whole, prefix=self.prefix, tools=self.schemas))
            calls = [call_of(writable(call["function"])) for call in found.pop("tool_calls", None) or []]
        except Exception as error:  # noqa: BLE001, of several kinds, as templates are data
            return self.failed(text, f"{(str(error) or type(error).__name__).strip().splitlines()[0][:SHOWN]}")
        if not calls and any(sign in whole for sign in self.signs):
            return self.failed(text, "it is not in the form of the chat template")
        content, _ = found.pop("content", None), found.pop("role", None)
        if not content and not calls:  # what the response template passed over
            return Reading(text)
        return Reading(content or "", calls, fields=found)

    def failed(self, text: str, why: str) -> Reading:
        return Reading(text, errors=[unreadable(why, self.example)])
