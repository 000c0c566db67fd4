"""Encoders of rows for supervised fine-tuning that are one text, one conversation, or token ids."""

import re
from bisect import bisect_left
from typing import Any

from lowmem_grpo.data.examples import IGNORED, Example, ExampleEncoder, Examples, shared_start
from lowmem_grpo.data.prompt_inputs import CLOSED, half_pair, readable, text_ids
from lowmem_grpo.data.prompts import DataError, is_chat, no_chat, odd_role

MASKS = ("completion_mask", "assistant_masks")  # columns of rows that are token ids
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # in a template that marks the assistant's tokens
WORD = "Zq7answer"  # rendered in place of a message, to find its position
BEGUN = re.compile(r"(?:</?think>\s*)+$")  # an empty or opened thinking block at the end of a prompt
THINK, THOUGHT, THOUGHTS = "<think>", "</think>", ("reasoning_content", "thinking")  # tags, and message fields


class TextEncoder(ExampleEncoder):
    """Turns the text in one column, with an end token, into an Example that trains all tokens after the first."""

    column = "text"

    def encode(self, row: dict[str, Any]) -> Example | Examples | str:
        text = row.get(self.column)
        if not isinstance(text, str):
            return f"{self.column} is {type(text).__name__}, not text"
        if not text.strip():
            return f"empty {self.column}"
        if why := half_pair(text, self.column):
            return why
        ids = self.with_end(text_ids(self.tokenizer, text))
        return self.example(row, text, ids, [True] * len(ids), self.column)


class ConversationEncoder(ExampleEncoder):
    """Turns a row's `messages` into an Example that trains all tokens, or only the assistant's: those in the template's
    {% generation %} marks. Without marks, an answer begins where the prompt of the earlier messages ends, and ends with
    the token that ends a sampled completion, even if the template writes that token at the start of the next message,
    as GLM 4 does. If the template rewrites earlier answers, each answer becomes an Example of its own."""

    column = "messages"
    assistant_only = continues = False

    def encode(self, row: dict[str, Any], behind: int = 0) -> Example | Examples | str:
        """Return the example, or the reason to leave the row out. The first `behind` messages are not trained."""
        messages: Any = row.get("messages")
        if not is_chat(messages):
            return no_chat(messages, self.source.strip("`"))
        if why := odd_role(messages, self.tokenizer):
            return why
        text = self.render_whole(messages, row)
        if why := half_pair(text, self.source.strip("`")):
            return why
        try:
            return self.example_of(row, text, behind=behind)
        except UntoldError as error:
            return self.apart(row, behind, error)

    def example_of(
        self, row: dict[str, Any], text: str, places: list[int] | None = None, behind: int = 0
    ) -> Example | str:
        """Return the example of a conversation, or the reason to skip it. `places` are the messages to train, if not
        None."""
        encoded: Any = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, starts = list(encoded["input_ids"]), [start for start, _ in encoded["offset_mapping"]]
        trained = self.mask(row, text, ids, starts) if places is None else self.marked(row, text, ids, starts, places)
        messages = row["messages"]
        if behind:
            first = bisect_left(starts, len(shared_start(text, self.render(messages[:behind], self.options(row)))))
            trained[:first] = [False] * first
        if messages[-1]["role"] == "assistant" and trained[-1]:
            ids = self.with_end(ids)
            trained += [True] * (len(ids) - len(trained))
        return self.example(row, text, ids, trained, "messages")

    def mask(self, row: dict[str, Any], text: str, ids: list[int], starts: list[int]) -> list[bool]:
        """Return for each token whether it is trained; `starts` are the tokens' character offsets in the text."""
        if not self.assistant_only:
            return [True] * len(ids)
        messages, options = row["messages"], self.options(row) | CLOSED
        if MARKED.search(self.tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))):
            encoded: Any = self.tokenizer.apply_chat_template(
                readable(self.tokenizer, messages, options), return_dict=True, return_assistant_tokens_mask=True,
                **options)
            return [bool(counts) for counts in encoded["assistant_masks"]]
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        return self.marked(row, text, ids, starts, places)

    def marked(
        self, row: dict[str, Any], text: str, ids: list[int], starts: list[int], places: list[int]
    ) -> list[bool]:
        trained = [False] * len(ids)
        for place in places:
            first, last = (bisect_left(starts, at) for at in self.span(row, place, text))
            last = self.through_end(ids, last)
            trained[first:last] = [True] * (last - first)
        return trained

    def apart(self, row: dict[str, Any], behind: int, error: Exception) -> Examples | str:
        """Return one example for each answer after the first `behind` messages: the conversation up to that answer.
        This is for templates that render an answer differently, for example without thoughts, if messages follow."""
        messages, examples = row["messages"], list[Any]()
        for place, message in enumerate(messages):
            if message["role"] == "assistant" and place >= behind:
                begun = messages[: place + 1]
                try:
                    examples.append(self.example_of(row | {"messages": begun}, self.render_whole(begun, row), [place]))
                except UntoldError:
                    examples.append(self.behind_prompt(row, begun, error))
        self.say_once("the chat template rewrites earlier answers of a conversation (it leaves out their thoughts, say)"
                      ": of such rows each answer is trained by itself, as the last one of its conversation")
        parts = [example for example in examples if isinstance(example, Example)]
        return Examples(row, [], "", parts=parts) if parts else str(examples[0])

    def behind_prompt(self, row: dict[str, Any], begun: list[Any], error: Exception) -> Example | Examples | str:
        """Return the example of the last message behind the prompt that a sampler would have; otherwise raise `error`.
        """
        try:
            return ExampleEncoder.encode(self, row | {"prompt": begun[:-1], "completion": begun[-1:]})
        except DataError:
            raise error from None

    def span(self, row: dict[str, Any], place: int, text: str) -> tuple[int, int]:
        """Return (first, end) of an answer's characters, without its end token; UntoldError if it cannot be located."""
        messages = row["messages"]
        try:
            before = self.render(messages[:place], self.options(row))
            after = self.render_whole(messages[: place + 1], row)
        except Exception:  # noqa: BLE001 - a template may raise anything where messages are left out
            return self.span_of_word(row, place, text)
        first = len(before if text.startswith(before) else BEGUN.sub("", before))
        said = after[: self.end_of_text(after, first)].rstrip()
        if text.startswith(before[:first]) and text.startswith(said):
            if before[first:]:
                self.say_once(f"the chat template writes {before[first:]!r} behind a prompt, but not before all "
                              "answers of a conversation: these are trained as it shows them, and sampled behind that")
            return first, max(len(said), first)
        if place == len(messages) - 1:
            return self.span_of_last(row, before, text)
        return self.span_of_word(row, place, text)

    def span_of_last(self, row: dict[str, Any], before: str, text: str) -> tuple[int, int]:
        """Return `span` of the last message, from the text's last generation prompt on, for a template that renders the
        message's prompt `before` differently in the whole text. UntoldError unless the text has as many generation
        prompts as assistant messages."""
        earlier = row["messages"][:-1]
        shown = self.render_whole(earlier, row)
        head = BEGUN.sub("", before[len(shown) :]) if before.startswith(shown) else ""
        if not head or text.count(head) != 1 + sum(message["role"] == "assistant" for message in earlier):
            raise UntoldError(len(earlier))
        first = text.rfind(head) + len(head)
        return first, self.end_of_text(text, first)

    def span_of_word(self, row: dict[str, Any], place: int, text: str) -> tuple[int, int]:
        """Return `span` from a marker word that is rendered in place of the message. This is for templates that refuse
        a part of the conversation, or that drop from earlier answers a thinking block that their prompts open."""
        messages = list(row["messages"])
        head = self.render(messages, self.options(row))[len(text) :].partition(THINK)[0]
        said, messages[place] = messages[place], {**messages[place], "content": WORD}
        if THOUGHT in (said.get("content") or "") or any(said.get(field) for field in THOUGHTS):
            raise UntoldError(place)
        told, word, rest = self.render_whole(messages, row).partition(WORD)
        first = told.rfind(head) + len(head)
        between = told[first:].replace(THINK, "").replace(THOUGHT, "").strip()  # empty for an empty thinking block
        if between or not (word and head and head in told and text[:first] == told[:first]):
            raise UntoldError(place)
        return first, self.end_of_text(text, first) if said.get("tool_calls") else len(text.removesuffix(rest))

    def end_of_text(self, text: str, first: int) -> int:
        """Return the position of the first end token at or after `first`; the text's length if there is none."""
        places = (text.find(word, first) for end in self.end_ids if (word := str(self.tokenizer.decode([end]))))
        return min((at for at in places if at >= 0), default=len(text))


class CompletionEncoder(ExampleEncoder):
    """Turns a row's `prompt` and `completion`, which may have several messages, into an Example. All tokens after the
    prompt are trained, or with `turns.assistant_only` the assistant's among them."""

    turns: ConversationEncoder

    def encode(self, row: dict[str, Any]) -> Example | Examples | str:
        prompt, completion = row.get("prompt"), row.get("completion")
        if not (is_chat(prompt) and is_chat(completion)):
            return super().encode(row)
        assert isinstance(prompt, list) and isinstance(completion, list)
        if len(completion) == 1 and not (self.prompt_too and self.turns.assistant_only):
            return super().encode(row)
        both = row | {"messages": [*prompt, *completion]}
        return self.turns.encode(both, 0 if self.prompt_too else len(prompt))


class AnswerEncoder(ExampleEncoder):
    """Turns `messages` into an Example that trains the last assistant message, with the earlier messages as prompt."""

    column = "messages"
    continues = False  # two assistant messages in a row are two turns

    def encode(self, row: dict[str, Any]) -> Example | Examples | str:
        messages, name = row["messages"], self.source.strip("`")
        if not is_chat(messages):
            return no_chat(messages, name)
        place = max((place for place, message in enumerate(messages) if message["role"] == "assistant"), default=None)
        if not place:
            return (f"{name} has no message of the assistant (assistant_only_loss=False trains all)" if place is None
                    else f"{name} has nothing before the assistant's answer (assistant_only_loss=True trains it)")
        return super().encode(row | {"prompt": messages[:place], "completion": messages[place : place + 1]})


class UntoldError(DataError):
    """The assistant's tokens cannot be located in the rendered conversation."""

    def __init__(self, place: int) -> None:
        super().__init__(
            f"the chat template renders message {place + 1} of a conversation differently once others follow, "
            "so the assistant's tokens in it cannot be found. Set assistant_only_loss=None, which trains only the last "
            "answer, split conversations into one row for each answer, or change tokenizer.chat_template"
        )


class TokenEncoder(ExampleEncoder):
    """Takes a row's `input_ids` unchanged. All tokens are trained except those that `attention_mask` or `labels` (-100)
    exclude. Without labels, `completion_mask` and `assistant_masks` exclude tokens as well."""

    column = "input_ids"
    source = "`input_ids`"

    def encode(self, row: dict[str, Any]) -> Example | Examples | str:
        ids = row.get("input_ids") or []
        if not ids or not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            return "input_ids is no list of token ids" if ids else "empty input_ids"
        trained = [True] * len(ids)
        for column, is_trained in (("labels", lambda value: value != IGNORED), ("completion_mask", bool),
                                   ("assistant_masks", bool), ("attention_mask", bool)):
            values = row.get(column)
            if values is None:
                continue
            if len(values) != len(ids):
                return f"{column} has another length than input_ids"
            if column == "labels" and any({token, IGNORED}.isdisjoint({value}) for token, value in zip(
                    ids, values, strict=True)):
                return "labels has other tokens than input_ids; where they differ, only -100 is allowed"
            if column in MASKS and (row.get("labels") is not None or (self.prompt_too and column == MASKS[0])):
                continue  # labels take precedence over masks, as in TRL
            trained = [counts and bool(is_trained(value)) for counts, value in zip(trained, values, strict=True)]
        return self.example(row, str(self.tokenizer.decode(ids)), ids, trained, "input_ids")
