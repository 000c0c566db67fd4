"""The prompts of a run: checked rows in a seeded order, with a position that can be saved and restored."""

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.data.difficulty import DifficultyPools
from lowmem_grpo.data.files import DataError as DataError
from lowmem_grpo.data.prompt_inputs import chat_text, half_pair, text_ids
from lowmem_grpo.types import Rollout, RolloutGroup

logger = logging.getLogger(__name__)

SPECIAL = 8  # tokens that a tokenizer may add to a text
SHOWN = 3  # skipped rows that are logged for each reason
ROLES = ("system", "user", "assistant", "tool", "developer", "function")
EFFORT = "reasoning_effort"  # a column, and an option of gpt-oss's chat template


@dataclass
class Prompt:
    """A usable row and its prompt's token ids."""

    row: dict[str, Any]
    ids: list[int]
    text: str  # rendered, as the model sees it
    index: int | None = None  # the row's index in the dataset
    epoch: int = 0  # the epoch in which it was drawn


def as_group(prompt: Prompt, rollouts: list[Rollout]) -> RolloutGroup:
    return RolloutGroup(prompt.row, prompt.ids, rollouts, row_index=prompt.index)


class PromptEncoder:
    """Turns a row's `prompt` (a string or chat messages) into token ids, or returns the reason to skip the row."""

    column = "prompt"  # required in the dataset
    source = "`prompt`"  # the user's name for the columns, used in messages
    by_text = True  # whether the prompt's text can tell that a row is usable
    images = False  # whether rows may have images
    refuses: Callable[[dict[str, Any]], str] | None = None  # gives a further reason to leave a row out, or ""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_prompt_length: int, template_kwargs: dict[str, Any] | None = None,
        truncate: bool = False,
    ) -> None:
        """`truncate`: cut longer prompts to their last `max_prompt_length` tokens, instead of skipping them."""
        self.tokenizer = tokenizer
        self.max_prompt_length, self.truncate = max_prompt_length, truncate
        self.template_kwargs = template_kwargs or {}

    def encode(self, row: dict[str, Any]) -> Prompt | str:
        return (self.refuses(row) if self.refuses else "") or self.fitted(row, self.of_any_length(row))

    def fitted(self, row: dict[str, Any], prompt: Prompt | str) -> Prompt | str:
        """Return a prompt within the limit, cut if it may be, or the reason for leaving the row out."""
        if isinstance(prompt, str) or len(prompt.ids) <= self.max_prompt_length:
            return prompt
        if not self.truncate:
            return f"prompt longer than {self.max_prompt_length} tokens"
        ids = prompt.ids[-self.max_prompt_length :]
        return Prompt(row, ids, str(self.tokenizer.decode(ids)))

    def of_any_length(self, row: dict[str, Any]) -> Prompt | str:
        """Return the prompt, however long, or the reason for leaving the row out."""
        text, why = self.text_of(row)
        if why:
            return why
        chat = not isinstance(row["prompt"], str)
        ids = self.tokenizer(text, add_special_tokens=False).input_ids if chat else text_ids(self.tokenizer, text)
        return Prompt(row, ids, text)

    def text_of(self, row: dict[str, Any]) -> tuple[str, str]:
        """Return the prompt's text as the model sees it, and the reason for leaving the row out, or ""."""
        prompt: Any = row.get("prompt")
        if isinstance(prompt, str):
            return prompt, half_pair(prompt, "prompt") if prompt.strip() else "empty prompt"
        if not is_chat(prompt):
            return "", no_chat(prompt, "prompt")
        if why := odd_role(prompt, self.tokenizer):
            return "", why
        text = self.render(prompt, self.options(row))
        return text, half_pair(text, "prompt")

    def surely(self, row: dict[str, Any]) -> bool:
        """Return whether the row is usable without doubt: its text has few bytes, and a token has at least one."""
        text, why = self.text_of(row) if self.by_text and not self.refuses else ("", "more than the text decides")
        return not why and (self.truncate or len(text.encode()) + SPECIAL <= self.max_prompt_length)

    def options(self, row: dict[str, Any]) -> dict[str, Any]:
        return self.template_kwargs | effort_of(row, self.tokenizer)

    def render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """Return the chat template's text of the messages, with the generation prompt."""
        self.need_template()
        return chat_text(self.tokenizer, messages, options)

    def need_template(self) -> None:
        """Raise DataError if the tokenizer has no chat template."""
        if not self.tokenizer.chat_template:
            raise DataError("the dataset holds chat messages, and the tokenizer has no chat template: set "
                            "tokenizer.chat_template, load an instruct model, or make `prompt` a plain string")


def effort_of(row: Mapping[str, Any], tokenizer: Any) -> dict[str, str]:
    """Return a row's `reasoning_effort` as an option for a chat template that reads it, as in Unsloth; else {}."""
    effort = row.get(EFFORT)
    return {EFFORT: effort} if isinstance(effort, str) and EFFORT in str(tokenizer.chat_template) else {}


def is_chat(prompt: Any) -> bool:
    """Return whether `prompt` is a list of messages, of which at least one has text or tool calls."""
    return isinstance(prompt, list) and all(map(is_message, prompt)) and any(
        message.get("tool_calls") or message["content"].strip() for message in prompt)


def odd_role(messages: list[Any], tokenizer: Any) -> str:
    """Return the reason to refuse an unusual role that the chat template does not mention; "" if there is none."""
    template = str(tokenizer.chat_template)
    odd = [role for role in (str(message["role"]) for message in messages)
           if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template]
    return f"a message has the role {odd[0]!r}; the roles are {', '.join(ROLES)}" if odd else ""


def no_chat(value: Any, name: str) -> str:
    """Return the reason to refuse a value that is neither text nor a chat; `name` is its column."""
    if value is None or (isinstance(value, list) and not value):
        return f"empty {name}"
    if not isinstance(value, list):
        return f"{name} is {type(value).__name__}, not text or chat"
    place, wrong = next(((place, message) for place, message in enumerate(value, 1) if not is_message(message)),
                        (0, None))
    parts = wrong.get("content") if isinstance(wrong, dict) else None
    kind = next((str(part["type"]) for part in parts if isinstance(part, dict) and "type" in part), "") \
        if isinstance(parts, list) else ""
    return (f"message {place} of {name} has a part of type {kind!r}, and only text is read here" if kind else
            f"message {place} of {name} has no role, or no text" if place else f"no message of {name} has a text")


def is_message(message: Any) -> bool:
    """Return whether a value is a message with a role and text; with tool calls the text may be None or missing."""
    said = message.get("content") if isinstance(message, dict) and "role" in message else 0
    return isinstance(said, str) or (said is None and bool(message.get("tool_calls")))


def check_dataset(dataset: Any, column: str = "prompt") -> None:
    """Raise DataError for a dataset that lacks a length, access by index, rows, or the column `column`."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(f"the dataset is a {type(dataset).__name__}; pass a datasets.Dataset or a list of rows (a "
                        "streamed dataset can be made into one with datasets.Dataset.from_list(list(stream.take(N))))")
    if len(dataset) == 0:
        raise DataError("the dataset has no rows")
    form = getattr(dataset, "format", None)
    changed = isinstance(form, dict) and form.get("type") == "custom"  # by a transform, which `column_names` ignores
    columns = (None if changed else getattr(dataset, "column_names", None)) or list(dataset[0])
    if column not in columns:
        raise DataError(f"the dataset has no column {column!r}; its columns are {', '.join(columns)}. Rename one "
                        f"(dataset.rename_column('question', {column!r})) or add it with dataset.map(...)")


@dataclass
class PromptSource:
    """An endless sequence of usable prompts, epoch after epoch, each epoch in its own seeded order.

    `next_batch` never draws from two epochs, unless `whole` is None. The last prompts of an epoch are left out if they
    are fewer than `whole`, except in an epoch that has not even so many.
    """

    dataset: Any
    encoder: PromptEncoder
    seed: int
    shuffle: bool = True
    pools: DifficultyPools | None = None  # resting rows are passed over; if all rest, all return
    whole: int | None = None
    micro_batch: int = 1  # prompts by which `epoch` counts
    horizon: int = 0  # prompts of the whole run, if the rows are a stream and that is known
    position: int = 0  # rows drawn so far, over all epochs
    taken: int = 0  # prompts returned by `next_batch` in this epoch
    last: float = 0.0  # the part of an epoch that its last call returned
    reached: float = 0.0  # `epoch` after that call
    unusable: set[int] = field(default_factory=set)  # rows known to be unusable
    all_read: bool = False  # True if all other rows are known to be usable
    skipped: Counter[str] = field(default_factory=Counter)  # rows by reason
    order: list[int] = field(default_factory=list, repr=False)
    order_epoch: int = -1

    def __post_init__(self) -> None:
        check_dataset(self.dataset, self.encoder.column)

    @property
    def epoch(self) -> float:
        """The passes over the rows so far; the micro-batches of a pass count alike, as in transformers."""
        done, place = divmod(self.position, len(self.dataset))
        if self.whole is None or not place:
            return self.position / len(self.dataset)
        return done + self.share(self.taken)

    def share(self, prompts: int) -> float:
        """Return which part of an epoch so many prompts are."""
        return math.ceil(prompts / self.micro_batch) / math.ceil(self.used / self.micro_batch)

    @property
    def used(self) -> int:
        """The prompts of an epoch, as far as is known."""
        usable = max(1, len(self.dataset) - len(self.unusable))
        return usable - usable % (self.whole or 1) or usable

    @property
    def round(self) -> int:
        """The number of the epoch in which the next prompt is drawn."""
        return self.position // len(self.dataset)

    def count_rows(self, read: bool = False) -> int | None:
        """Return the rows that are not known to be unusable; `read` looks at all rows first, unless they are packs, or
        are made at each reading, by a transform or by a class of the user's."""
        read = read and getattr(self.dataset, "stored", True)
        self.all_read |= read
        for index in range(len(self.dataset)) if read and self.encoder.column != "rows" else ():
            with suppress(Exception):  # the checks before the run report a row that cannot be read
                row = self.dataset[index]
                if not self.encoder.surely(row) and isinstance(self.encoder.encode(row), str):
                    self.unusable.add(index)
        return max(1, len(self.dataset) - len(self.unusable))

    def record(self, prompts: list[Prompt], groups: list[RolloutGroup]) -> None:
        """Record the rewards of the groups sampled for `prompts`, which this source returned, in the pools."""
        if self.pools is None:
            return
        for prompt, group in zip(prompts, groups, strict=True):
            assert prompt.index is not None
            self.pools.record(prompt.index, prompt.epoch, [rollout.reward for rollout in group.rollouts])

    def next_batch(self, count: int) -> list[Prompt]:
        """Return the next `count` usable prompts, fewer at the end of an epoch. DataError if all rows are unusable."""
        kept: list[Prompt] = self.take(count) if self.whole is None else []
        while self.whole is not None and not kept:
            begins = self.begins
            prompts = self.take(count, across=False)
            kept = prompts[: len(prompts) - len(prompts) % self.whole] or (prompts if begins else [])
            if kept:
                self.taken, self.last = len(kept) + (0 if begins else self.taken), self.share(len(kept))
                self.leave_rest(self.whole)
        self.reached = self.epoch
        return kept

    @property
    def begins(self) -> bool:
        """True if the next prompt is the first of an epoch."""
        return not self.position % len(self.dataset)

    def leave_rest(self, whole: int) -> None:
        """End the epoch if fewer than `whole` prompts are left of it."""
        left = (index for index in islice(self.order, self.position % len(self.dataset), None)
                if index not in self.unusable)
        if not self.begins and len(list(islice(left, whole))) < whole:
            self.end_epoch()

    def take(self, count: int, across: bool = True) -> list[Prompt]:
        """Return the next `count` usable prompts, or without `across` fewer at the end of an epoch; skip and count
        unusable rows. DataError if all rows are unusable."""
        prompts: list[Prompt] = []
        until = math.inf if across else (self.round + 1) * len(self.dataset)
        fruitless: set[int] = set()  # unusable rows since the last usable one, possibly of two epochs
        passed = 0  # rows drawn since then, including those that rest
        while len(prompts) < count and self.position < until:
            epoch, index = self.position // len(self.dataset), self.next_index()
            passed += 1
            if self.pools is not None and self.pools.rests(index, epoch):
                if passed >= len(self.dataset):
                    self.pools.wake()
                continue
            encoded = self.encoder.encode(self.dataset[index])
            if isinstance(encoded, Prompt):
                prompts.append(replace(encoded, index=index, epoch=epoch))
                self.unusable.discard(index)  # as the run that was resumed had other settings
                fruitless.clear()
                passed = 0
                continue
            self.count_skip(index, encoded)
            self.unusable.add(index)
            fruitless.add(index)
            if len(fruitless) == len(self.dataset):
                raise DataError(f"no row of the dataset can be used: {self.skip_summary()}")
        return prompts

    def next_index(self) -> int:
        epoch, place = divmod(self.position, len(self.dataset))
        if epoch != self.order_epoch:
            self.order, self.order_epoch = list(range(len(self.dataset))), epoch
            if self.shuffle:
                random.Random(f"{self.seed}-{epoch}").shuffle(self.order)
        self.position += 1
        return self.order[place]

    def end_epoch(self) -> None:
        self.position += -self.position % len(self.dataset)

    def count_skip(self, index: int, reason: str) -> None:
        self.skipped[reason] += 1
        if self.skipped[reason] <= SHOWN:
            logger.warning("row %d skipped: %s", index, reason)

    def skip_summary(self) -> str:
        return ", ".join(f"{reason} ({count})" for reason, count in self.skipped.items()) or "nothing skipped"

    def state(self) -> dict[str, Any]:
        state = {"position": self.position, "skipped": dict(self.skipped), "rows": len(self.dataset),
                 "taken": self.taken, "unusable": sorted(self.unusable)}
        return state if self.pools is None else state | {"pools": self.pools.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved position; DataError if the dataset has another number of rows."""
        if state["rows"] != len(self.dataset):
            raise DataError(f"the checkpoint was made with a dataset of {state['rows']} rows, this one has "
                            f"{len(self.dataset)}; resume with the same dataset")
        self.position, self.skipped = state["position"], Counter(state["skipped"])
        self.taken = state.get("taken", self.position % len(self.dataset))  # older checkpoints have neither
        if not self.all_read:
            self.unusable.update(state.get("unusable", ()))
        self.reached = self.epoch
        if self.pools is not None and "pools" in state:
            self.pools.restore(state["pools"])
