"""Rows for supervised fine-tuning: their token ids, and the mask of the trained tokens.

Prompt and completion are tokenised separately, exactly as in a rollout: first the prompt with its generation prompt,
then the completion with its end token.
"""

import json
import logging
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.shared import TEMPLATE_VARIABLES
from lowmem_grpo.data.prompt_inputs import CLOSED, chat_text, half_pair
from lowmem_grpo.data.prompts import DataError, Prompt, PromptEncoder, is_chat

logger = logging.getLogger(__name__)

IGNORED = -100  # a label that is not trained
SHOWN = 60  # characters of a text in a message
NEW_TURN = {"add_generation_prompt": True, "continue_final_message": False}  # even after an assistant message


@dataclass
class Example(Prompt):
    """A usable row. `ids` end before the first trained token; `completion_ids` (C,) end with the last trained one."""

    completion_ids: list[int] = field(default_factory=list)
    trained: list[bool] | None = None  # (C,) mask of the trained completion tokens; None for all
    input_ids: list[int] = field(default_factory=list)  # the whole row, after truncation
    labels: list[int] = field(default_factory=list)  # `input_ids` where they are trained, else IGNORED


@dataclass
class Examples(Prompt):
    """Several examples from one row: the examples of a pack, or one for each answer of a conversation."""

    parts: list[Example] = field(default_factory=list)


def each_of(encoded: Any) -> list[Example]:
    """Return the examples in an encoder's result: one, several (a pair has two), or none if the result is a reason to
    skip the row."""
    return [encoded] if isinstance(encoded, Example) else getattr(encoded, "parts", [])


class ExampleEncoder(PromptEncoder):
    """Turns a row's `prompt` and `completion` (strings or chat messages) into an Example, or returns the reason to skip
    the row. `end_ids` are the tokens that end a sampled completion. `truncation` applies to rows of more than
    `max_length` tokens: cut the end ("keep_start"), cut the beginning ("keep_end"), or skip the row (None). The columns
    `tools` (a list, or its JSON) and `chat_template_kwargs` are passed to the chat template, as in TRL."""

    continues = True  # a completion continues the prompt's last message if that is an assistant message
    by_text = False  # a token must be trained

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, end_ids: list[int],
        template_kwargs: dict[str, Any] | None = None, truncation: str | None = None, prompt_too: bool = False,
    ) -> None:
        """If `prompt_too`, the prompt's tokens are trained as well."""
        super().__init__(tokenizer, max_length, template_kwargs)
        self.end_ids, self.truncation, self.prompt_too = end_ids, truncation, prompt_too
        self.said: set[str] = set()

    def say_once(self, message: str) -> None:
        if message not in self.said:
            self.said.add(message)
            logger.warning(message)

    def encode(self, row: dict[str, Any]) -> Example | Examples | str:
        prompt = super().encode(row) if self.truncation is None else self.of_any_length(row)
        if isinstance(prompt, str):
            return prompt
        completion = row.get("completion")
        if reason := unusable(row["prompt"], completion):
            return reason
        said = str(completion) if isinstance(row["prompt"], str) else self.behind(prompt.text, row)
        if reason := half_pair(said, "completion"):
            return reason
        ids = self.ended(said)
        if ids is None:
            return "completion goes on after an end token"
        trained = [self.prompt_too] * len(prompt.ids) + [True] * len(ids)
        return self.example(row, prompt.text, [*prompt.ids, *ids], trained, "prompt and completion")

    def example(self, row: dict[str, Any], text: str, ids: list[int], trained: list[bool], what: str) -> Example | str:
        """Return the Example of the tokens `ids`, or the reason to skip the row, in which `what` names the tokens. The
        first token is never trained, since nothing predicts it. The completion ends with the last trained token."""
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
        """Return the chat template's keyword arguments. DataError for malformed `tools` or `chat_template_kwargs`."""
        tools, own = row.get("tools"), row.get("chat_template_kwargs") or {}
        own = {name: value for name, value in own.items() if value is not None} if isinstance(own, dict) else own
        if not TEMPLATE_VARIABLES[1](own):
            raise DataError(f"chat_template_kwargs is {own!r}; it must be {TEMPLATE_VARIABLES[0]}")
        try:
            tools = json.loads(tools) if isinstance(tools, str) and tools else tools
        except (ValueError, RecursionError) as error:
            raise DataError(f"tools is a text that is no JSON ({error}): make it a list of schemas, or JSON") from error
        listed = {"tools": tools} if tools else {}
        return {**super().options(row), **own, **listed, **({} if self.continues else NEW_TURN)}

    def render_whole(self, messages: list[dict[str, Any]], row: dict[str, Any]) -> str:
        """Return the chat template's text of the messages, without a generation prompt."""
        self.need_template()
        return chat_text(self.tokenizer, messages, self.options(row) | CLOSED)

    def behind(self, rendered: str, row: dict[str, Any]) -> str:
        """Return the answer's rendered text. DataError if the answer changes `rendered`, the prompt's rendered text."""
        *prompt, last = row["prompt"]
        said = row["completion"]
        answer = {"role": "assistant", "content": said} if isinstance(said, str) else said[0]
        if self.continues and last["role"] == "assistant":
            answer = {**last, **answer, "content": last["content"] + (answer.get("content") or "")}
        else:
            prompt = row["prompt"]
        whole = self.render_whole([*prompt, answer], row)
        if not whole.startswith(rendered):
            if last["role"] != "assistant" and (text := self.rendered_alone(answer, whole, row)):
                return text
            at = len(shared_start(whole, rendered))
            raise DataError("the chat template renders a prompt differently once its answer follows: "
                            f"{rendered[at : at + SHOWN]!r} without it, {whole[at : at + SHOWN]!r} with it. The model "
                            "would be trained on other text than it samples from: change tokenizer.chat_template or "
                            "chat_template_kwargs, or make prompt and completion plain strings")
        return whole[len(rendered) :]

    def rendered_alone(self, answer: dict[str, Any], whole: str, row: dict[str, Any]) -> str:
        """Return the text of an answer that ends `whole` as it ends another conversation, if there it continues its
        prompt; else "". Then the template changed only what is before it: gpt-oss's drops the thoughts of calls there.
        """
        asked = [{"role": "user", "content": "Question"}]
        before, after = self.render(asked, self.options(row)), self.render_whole([*asked, answer], row)
        text = after[len(before) :] if after.startswith(before) else ""
        return text if whole.endswith(text) else ""

    def ended(self, text: str) -> list[int] | None:
        """Return the text's ids up to its end token, appended if missing; None if more text follows the end token."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        ends = [place for place, token in enumerate(ids) if token in self.end_ids]
        if not ends:
            return [*ids, self.end_id]
        rest: Any = self.tokenizer.decode([token for token in ids[ends[0] :] if token not in self.end_ids])
        return None if rest.strip() else ids[: ends[0] + 1]

    def through_end(self, ids: list[int], at: int) -> int:
        """Return the end index of an answer whose text is in ids[:at]. If an end token follows, directly or after white
        space, the answer includes it. If only white space follows, it includes that. Otherwise return `at`."""
        seen = (place for place in range(at, len(ids)) if str(self.tokenizer.decode([ids[place]])).strip())
        stop = next(seen, len(ids))
        return stop + 1 if stop < len(ids) and ids[stop] in self.end_ids else at if stop < len(ids) else stop

    def with_end(self, ids: list[int]) -> list[int]:
        """Return the ids with the end token appended, unless they end with an end token (and any white space)."""
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
    pairs = enumerate(zip(text, other, strict=False))
    return text[: next((at for at, (letter, another) in pairs if letter != another), min(len(text), len(other)))]


def unusable(prompt: Any, completion: Any) -> str | None:
    """Return the reason why this completion cannot be trained after this prompt; None if it can."""
    blank = completion.strip() if isinstance(completion, str) else completion
    if blank is None or (isinstance(blank, (str, list)) and not blank):
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
