"""Rows for supervised fine-tuning that are one text, one conversation, or token ids already.

Of a text every token is trained but the first, which nothing predicts; of a conversation every token, or those of the
assistant; of token ids those that the row's own columns say.
"""

import re
from typing import Any

from lowmem_grpo.data.examples import Example, ExampleEncoder
from lowmem_grpo.data.prompts import DataError, is_chat

IGNORED = -100  # a label that is not trained
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template that marks what the assistant says


class TextEncoder(ExampleEncoder):
    """Turns the text in one column into an Example. An end token is added where the text has none."""

    column = "text"

    def encode(self, row: dict[str, Any]) -> Example | str:
        """The example, or the reason for leaving the row out."""
        text = row.get(self.column)
        if not isinstance(text, str):
            return f"{self.column} is {type(text).__name__}, not text"
        if not text.strip():
            return f"empty {self.column}"
        start, end = self.tokenizer.bos_token, self.tokenizer.eos_token
        whole = text if end is None or text.rstrip().endswith(str(end)) else text + str(end)
        ids: list[int] = self.tokenizer(
            whole, add_special_tokens=start is None or not whole.startswith(str(start))
        ).input_ids
        return self.example(row, text, ids, [True] * len(ids), self.column)


class ConversationEncoder(ExampleEncoder):
    """Turns a row's `messages` into an Example: of all tokens, or of those of the assistant's messages."""

    column = "messages"
    assistant_only = False

    def encode(self, row: dict[str, Any]) -> Example | str:
        """The example, or the reason for leaving the row out."""
        messages = row.get("messages")
        if not is_chat(messages):
            return "empty messages" if messages in (None, []) else "messages are not chat messages with text"
        assert messages is not None
        text = self.whole(messages)
        spans = self.spans(messages, text) if self.assistant_only else [(0, len(text))]
        encoded: Any = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        trained = [any(begin <= at < end for begin, end in spans) for at, _ in encoded["offset_mapping"]]
        return self.example(row, text, encoded["input_ids"], trained, "messages")

    def whole(self, messages: list[dict[str, Any]]) -> str:
        """The template's text of the messages; DataError without a template."""
        self.render(messages[:1])
        text: Any = self.tokenizer.apply_chat_template(messages, tokenize=False, **self.template_kwargs)
        return str(text)

    def spans(self, messages: list[dict[str, Any]], text: str) -> list[tuple[int, int]]:
        """(first, end) of what the assistant says in the text, as characters, each with what ends its turn."""
        found = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self.render(messages[:place]), self.whole(messages[: place + 1])
            if not (text.startswith(before) and text.startswith(after.rstrip())):
                raise DataError(
                    f"the chat template renders message {place + 1} of a conversation differently once others follow, "
                    "so it cannot be told which tokens are the assistant's. Leave assistant_only_loss out (the last "
                    "message is trained), split conversations into one row for each answer, or change "
                    "tokenizer.chat_template"
                )
            found.append((len(before), len(after.rstrip())))
        return found


class TokenEncoder(ExampleEncoder):
    """Takes a row's `input_ids` as they are. `labels` (-100 is not trained), `completion_mask` and `assistant_masks`
    say which are trained; without them all are."""

    column = "input_ids"

    def encode(self, row: dict[str, Any]) -> Example | str:
        """The example, or the reason for leaving the row out."""
        ids = [int(token) for token in row.get("input_ids") or []]
        if not ids:
            return "empty input_ids"
        trained = [True] * len(ids)
        for column, is_trained in (("labels", lambda value: value != IGNORED), ("completion_mask", bool),
                                   ("assistant_masks", bool), ("attention_mask", bool)):
            values = row.get(column)
            if values is None:
                continue
            if len(values) != len(ids):
                return f"{column} has another length than input_ids"
            trained = [one and bool(is_trained(value)) for one, value in zip(trained, values, strict=True)]
        return self.example(row, str(self.tokenizer.decode(ids)), ids, trained, "input_ids")
