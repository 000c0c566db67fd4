"""Rows for supervised fine-tuning: the token ids of a prompt, and of the completion that follows it.

Prompt and completion are tokenised separately, exactly as in a rollout: first the prompt as the template renders it for
the assistant's turn, then what the model should say, including the token that ends it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.data.prompts import DataError, Prompt, PromptEncoder, check_dataset, is_chat

SHOWN = 60  # characters of a text in a message


@dataclass
class Example(Prompt):
    """A usable row: its prompt, and the ids (C,) that are trained, with the end token."""

    completion_ids: list[int] = field(default_factory=list)


class ExampleEncoder(PromptEncoder):
    """Turns a row's `prompt` and `completion` (strings or chat messages) into an Example, or says why it cannot.

    `end_ids` are the tokens that end a sampled completion.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, end_ids: list[int],
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(tokenizer, max_length, template_kwargs)
        self.end_ids = end_ids

    def encode(self, row: dict[str, Any]) -> Example | str:
        """The example, or the reason for leaving the row out."""
        prompt = super().encode(row)
        if isinstance(prompt, str):
            return prompt
        completion = row.get("completion")
        if reason := unusable(row["prompt"], completion):
            return reason
        chat = not isinstance(row["prompt"], str)
        ids = self.ended(self.chat_text(row["prompt"], completion, prompt.text) if chat else str(completion))
        if ids is None:
            return "completion goes on after an end token"
        if len(prompt.ids) + len(ids) > self.max_prompt_length:
            return f"prompt and completion longer than {self.max_prompt_length} tokens"
        return Example(row, prompt.ids, prompt.text, completion_ids=ids)

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


@dataclass
class Conversations:
    """Rows with `messages`, read as a prompt (all but the last message) and a completion (the last one)."""

    dataset: Any
    column_names: Sequence[str] = ("prompt", "completion")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        messages = self.dataset[index].get("messages")
        if not isinstance(messages, list):
            return {"prompt": messages, "completion": None}
        return {"prompt": messages[:-1], "completion": messages[-1:]}


def as_examples(dataset: Any) -> Any:
    """The dataset with columns `prompt` and `completion`; DataError if it has neither these nor `messages`."""
    columns = getattr(dataset, "column_names", None)
    if columns is None and isinstance(dataset, Sequence) and len(dataset):
        columns = list(dataset[0])
    if columns and "messages" in columns and "completion" not in columns:
        return Conversations(dataset)
    if columns and not {"prompt", "completion"} <= set(columns):
        raise DataError(
            f"the dataset's columns are {', '.join(columns)}; needed are prompt and completion (text, or chat "
            "messages), or messages whose last one is the assistant's. Rename some (dataset.rename_column('answer', "
            "'completion')) or make them with dataset.map(...)"
        )
    check_dataset(dataset)
    return dataset
