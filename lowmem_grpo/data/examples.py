"""Rows for supervised fine-tuning: their token ids, and which of these are trained.

Prompt and completion are tokenised separately, exactly as in a rollout: first the prompt as the template renders it for
the assistant's turn, then what the model should say, including the token that ends it. Texts and whole conversations
are in texts.py, and shapes.py says what the columns of a dataset mean.
"""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.data.prompts import DataError, Prompt, PromptEncoder, is_chat

SHOWN = 60  # characters of a text in a message


@dataclass
class Example(Prompt):
    """A usable row: what comes before its first trained token, and the ids (C,) from that one on."""

    completion_ids: list[int] = field(default_factory=list)
    trained: list[bool] | None = None  # (C,) which of these are trained; None for all


class ExampleEncoder(PromptEncoder):
    """Turns a row's `prompt` and `completion` (strings or chat messages) into an Example, or says why it cannot.

    `end_ids` are the tokens that end a sampled completion. `truncation` is what is cut off a row of more than
    `max_length` tokens: its end ("keep_start"), its beginning ("keep_end"), or nothing (None), and it is left out.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, end_ids: list[int],
        template_kwargs: dict[str, Any] | None = None, truncation: str | None = None, prompt_too: bool = False,
    ) -> None:
        """`prompt_too` trains the prompt's tokens as well."""
        super().__init__(tokenizer, max_length, template_kwargs)
        self.end_ids, self.truncation, self.prompt_too = end_ids, truncation, prompt_too

    def encode(self, row: dict[str, Any]) -> Example | str:
        """The example, or the reason for leaving the row out."""
        prompt = super().encode(row) if self.truncation is None else self.of_any_length(row)
        if isinstance(prompt, str):
            return prompt
        completion = row.get("completion")
        if reason := unusable(row["prompt"], completion):
            return reason
        chat = not isinstance(row["prompt"], str)
        ids = self.ended(self.chat_text(row["prompt"], completion, prompt.text) if chat else str(completion))
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
        return Example(row, ids[:first], text, completion_ids=ids[first:end], trained=None if all(mask) else mask)

    def chat_text(self, prompt: list[dict[str, str]], completion: Any, rendered: str) -> str:
        """What the template puts after the rendered prompt; DataError if it then renders the prompt differently."""
        answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        whole: Any = self.tokenizer.apply_chat_template([*prompt, *answer], tokenize=False, **self.template_kwargs)
        if not whole.startswith(rendered):
            at = next((i for i, (a, b) in enumerate(zip(whole, rendered, strict=False)) if a != b), len(whole))
            raise DataError(
                "the chat template renders a prompt differently once its answer follows: "
                f"{rendered[at : at + SHOWN]!r} without it, {whole[at : at + SHOWN]!r} with it. "
                "The model would be trained on other text than it samples from: change tokenizer.chat_template or "
                "chat_template_kwargs, or make prompt and completion plain strings"
            )
        return str(whole[len(rendered) :])

    def ended(self, text: str) -> list[int] | None:
        """The text's ids up to its end token, which is added if it has none; None if text follows the end token."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        ends = [place for place, token in enumerate(ids) if token in self.end_ids]
        if not ends:
            return [*ids, self.end_id]
        rest: Any = self.tokenizer.decode([token for token in ids[ends[0] :] if token not in self.end_ids])
        return None if rest.strip() else ids[: ends[0] + 1]

    @property
    def end_id(self) -> int:
        """The tokenizer's end token; DataError if it has none."""
        found: Any = self.tokenizer.eos_token_id
        if found is None:
            raise DataError("the tokenizer has no end token, so a model would never learn to stop; set "
                            "tokenizer.eos_token")
        return int(found)


def unusable(prompt: Any, completion: Any) -> str | None:
    """Why a completion cannot follow this prompt; None if it can."""
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
