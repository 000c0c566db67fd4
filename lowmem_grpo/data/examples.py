"""Rows for supervised fine-tuning: their token ids, and which of these are trained.

Prompt and completion are tokenised separately, exactly as in a rollout: first the prompt as the template renders it for
the assistant's turn, then what the model should say, including the token that ends it. Texts and whole conversations
are in texts.py, and shapes.py says what the columns of a dataset mean.
"""

import json
import logging
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.data.prompts import DataError, Prompt, PromptEncoder, is_chat
from lowmem_grpo.engines.prompt_inputs import CLOSED, chat_text

logger = logging.getLogger(__name__)

IGNORED = -100  # a label that is not trained
SHOWN = 60  # characters of a text in a message
NEW_TURN = {"add_generation_prompt": True, "continue_final_message": False}  # also behind a turn of the assistant


@dataclass
class Example(Prompt):
    """A usable row: what comes before its first trained token, and the ids (C,) from that one on."""

    completion_ids: list[int] = field(default_factory=list)
    trained: list[bool] | None = None  # (C,) which of these are trained; None for all
    input_ids: list[int] = field(default_factory=list)  # the whole row, as it was cut
    labels: list[int] = field(default_factory=list)  # these where they are trained, else IGNORED


@dataclass
class Examples(Prompt):
    """Several examples that are one row: those of a pack, or the answers of a conversation."""

    parts: list[Example] = field(default_factory=list)


def each_of(encoded: Any) -> list[Example]:
    """Return the examples of what an encoder made of a row: one, several, or none where it gave a reason."""
    return encoded.parts if isinstance(encoded, Examples) else [encoded] if isinstance(encoded, Example) else []


class ExampleEncoder(PromptEncoder):
    """Turns a row's `prompt` and `completion` (strings or chat messages) into an Example, or says why it cannot.
    `end_ids` are the tokens that end a sampled completion. `truncation` is what is cut off a row of more than
    `max_length` tokens: its end ("keep_start"), its beginning ("keep_end"), or nothing (None), and it is left out. The
    columns `tools` (a list, or its JSON) and `chat_template_kwargs` are for the chat template, as in TRL."""

    continues = True  # whether a completion goes on with a prompt's last message, where that is the assistant's

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, end_ids: list[int],
        template_kwargs: dict[str, Any] | None = None, truncation: str | None = None, prompt_too: bool = False,
    ) -> None:
        """`prompt_too` trains the prompt's tokens as well."""
        super().__init__(tokenizer, max_length, template_kwargs)
        self.end_ids, self.truncation, self.prompt_too = end_ids, truncation, prompt_too
        self.said: set[str] = set()

    def say_once(self, message: str) -> None:
        if message not in self.said:
            self.said.add(message)
            logger.warning(message)

    def encode(self, row: dict[str, Any]) -> Example | Examples | str:
        """Return the example, or the reason for leaving the row out."""
        prompt = super().encode(row) if self.truncation is None else self.of_any_length(row)
        if isinstance(prompt, str):
            return prompt
        completion = row.get("completion")
        if reason := unusable(row["prompt"], completion):
            return reason
        chat = not isinstance(row["prompt"], str)
        ids = self.ended(self.behind(prompt.text, row) if chat else str(completion))
        if ids is None:
            return "completion goes on after an end token"
        trained = [self.prompt_too] * len(prompt.ids) + [True] * len(ids)
        return self.example(row, prompt.text, [*prompt.ids, *ids], trained, "prompt and completion")

    def example(self, row: dict[str, Any], text: str, ids: list[int], trained: list[bool], what: str) -> Example | str:
        """The example of a row's tokens, of which `trained` are; or why there is none. Nothing predicts the first
        token, and what follows the last trained one is left out."""
        limit = self.max_prompt_length
        if len(ids) > limit:
            if self.truncation is None:
                return f"{what} longer than {limit} tokens"
            kept = slice(limit) if self.truncation == "keep_start" else slice(-limit, None)
            ids, trained = ids[kept], trained[kept]
        places = [place for place, counts in enumerate(trained) if counts and place]
        if not places:
            return f"no token of {what} is trained" + (" within max_length" if len(ids) == limit else "")
        first, end = places[0], places[-1] + 1
        mask = trained[first:end]
        labels = [token if counts else IGNORED for token, counts in zip(ids, trained, strict=True)]
        return Example(row, ids[:first], text, None, 0, ids[first:end], None if all(mask) else mask, ids, labels)

    def options(self, row: dict[str, Any]) -> dict[str, Any]:
        tools, own = row.get("tools"), row.get("chat_template_kwargs") or {}
        try:
            tools = json.loads(tools) if isinstance(tools, str) and tools else tools
        except ValueError as error:
            raise DataError(f"tools is a text that is no JSON ({error}): make it a list of schemas, or JSON") from error
        own = {name: value for name, value in own.items() if value is not None} | ({"tools": tools} if tools else {})
        return {**self.template_kwargs, **own, **({} if self.continues else NEW_TURN)}

    def render_whole(self, messages: list[dict[str, Any]], row: dict[str, Any]) -> str:
        """Return the template's text of messages to which nothing is added."""
        self.need_template()
        return chat_text(self.tokenizer, messages, self.options(row) | CLOSED)

    def behind(self, rendered: str, row: dict[str, Any]) -> str:
        """Return what the template puts after the rendered prompt; DataError if it renders that differently then."""
        *prompt, last = row["prompt"]
        said = row["completion"]
        answer = {"role": "assistant", "content": said} if isinstance(said, str) else said[0]
        if self.continues and last["role"] == "assistant":
            answer = {**last, **answer, "content": last["content"] + (answer.get("content") or "")}
        else:
            prompt = row["prompt"]
        whole = self.render_whole([*prompt, answer], row)
        if not whole.startswith(rendered):
            at = len(shared_start(whole, rendered))
            raise DataError("the chat template renders a prompt differently once its answer follows: "
                            f"{rendered[at : at + SHOWN]!r} without it, {whole[at : at + SHOWN]!r} with it. The model "
                            "would be trained on other text than it samples from: change tokenizer.chat_template or "
                            "chat_template_kwargs, or make prompt and completion plain strings")
        return whole[len(rendered) :]

    def ended(self, text: str) -> list[int] | None:
        """Return the text's ids up to its end token, or with one behind them; None if text follows the end token."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        ends = [place for place, token in enumerate(ids) if token in self.end_ids]
        if not ends:
            return [*ids, self.end_id]
        rest: Any = self.tokenizer.decode([token for token in ids[ends[0] :] if token not in self.end_ids])
        return None if rest.strip() else ids[: ends[0] + 1]

    def through_end(self, ids: list[int], at: int) -> int:
        """Return where an answer whose text is ids[:at] ends: behind the end token that follows it, or behind the white
        space with which the text ends. Where another token follows, nothing of it belongs to the answer."""
        seen = (place for place in range(at, len(ids)) if str(self.tokenizer.decode([ids[place]])).strip())
        stop = next(seen, len(ids))
        return stop + 1 if stop < len(ids) and ids[stop] in self.end_ids else at if stop < len(ids) else stop

    def with_end(self, ids: list[int]) -> list[int]:
        """Return the ids with the tokenizer's end token behind them, unless they end with one and white space."""
        last = next((token for token in reversed(ids) if str(self.tokenizer.decode([token])).strip()), None)
        return ids if last in self.end_ids else [*ids, self.end_id]

    @property
    def end_id(self) -> int:
        """The tokenizer's end token; DataError if it has none."""
        if self.tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end token, so a model would never learn to stop; set "
                            "tokenizer.eos_token")
        return int(self.tokenizer.eos_token_id)


def shared_start(text: str, other: str) -> str:
    """Return the longest text with which both begin."""
    pairs = enumerate(zip(text, other, strict=False))
    return text[: next((at for at, (letter, another) in pairs if letter != another), min(len(text), len(other)))]


def unusable(prompt: Any, completion: Any) -> str | None:
    """Return why a completion cannot follow this prompt; None if it can."""
    if completion in (None, [], "") or (isinstance(completion, str) and not completion.strip()):
        return "empty completion"
    if isinstance(completion, str):
        return None
    if not isinstance(completion, list):
        return f"completion is {type(completion).__name__}, not text or chat"
    if isinstance(prompt, str):
        return "prompt is text and completion is chat messages"
    if len(completion) == 1 and is_chat(completion) and completion[0]["role"] == "assistant":
        return None
    return "completion is not one message of the assistant, with text"
