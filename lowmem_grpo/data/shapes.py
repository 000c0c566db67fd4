"""The choice of a dataset's encoder for supervised fine-tuning, by its columns.

The first of these that is present decides: `formatting_func`, `input_ids`, `prompt` with `completion`, `messages`
(chats, or texts if there is no text column), the text column, or `conversations`, which is read as `messages`.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sft import SFTConfig
from lowmem_grpo.data.examples import Example, ExampleEncoder, Examples
from lowmem_grpo.data.packing import PackEncoder, encoded, packed
from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.data.stream import Stream, columns_of, comes_from, rows_of
from lowmem_grpo.data.texts import (
    MASKS,
    AnswerEncoder,
    CompletionEncoder,
    ConversationEncoder,
    TextEncoder,
    TokenEncoder,
)
from lowmem_grpo.types import owned

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Shapes:
    """Reads the datasets of a fine-tuning run: chooses and wraps their encoders, and packs their rows."""

    config: SFTConfig
    tokenizer: PreTrainedTokenizerBase
    longest: int  # tokens of a row
    end_ids: list[int]
    formatting_func: Callable[..., Any] | None = None
    wrap: Callable[[Any], Any] | None = None  # wraps the encoder, for `train_on_responses_only`

    def read(self, dataset: Any, parameter: str = "train_dataset") -> tuple[Any, Any]:
        """Return (rows or packs, their encoder); DataError if the columns fit no layout, or contradict the settings."""
        rows, encoder = self.read_rows(dataset, parameter)
        config = self.config
        packing = config.packing if parameter == "train_dataset" or config.eval_packing is None else config.eval_packing
        if config.assistant_only_loss and isinstance(encoder, (TextEncoder, TokenEncoder)):
            raise DataError(f"assistant_only_loss=True, and {parameter} has no conversations but {encoder.column}; "
                            "leave it out, or pass `messages`")
        encoder = self.wrap(encoder) if self.wrap else encoder
        if not packing:
            return rows, encoder
        return packed(rows, encoder, config.packing_strategy, self.encoder(TokenEncoder))

    def read_rows(self, dataset: Any, parameter: str) -> tuple[Any, ExampleEncoder]:
        """Return the rows, not packed, and the encoder for their columns; DataError if the columns fit no layout."""
        held = getattr(dataset, "rows", dataset)  # those of rows by index
        if comes_from(held, "datasets", "Dataset") and held.format["type"] == "custom":
            raise DataError(f"{parameter} has a transform (with_transform, set_transform), which may make other rows "
                            "at each reading, and fine-tuning tokenises its rows once; store what it makes: "
                            "dataset.with_format(None).map(function, batched=True)")
        rows = rows_of(dataset, parameter)
        columns = columns_of(rows)
        if not columns and not isinstance(rows, Stream):
            raise DataError(f"{parameter} has no rows")
        if self.formatting_func is not None and not callable(self.formatting_func):
            raise DataError(f"formatting_func is {self.formatting_func!r}; it must be a function that makes a text of "
                            "a row")
        if self.formatting_func is not None:
            rows.change_each(self.formatted(rows))
            encoder = self.encoder(TextEncoder)
            encoder.source = "`text`, which formatting_func makes"
            return rows, encoder
        if "input_ids" in columns:
            return rows, self.encoder(TokenEncoder, prompt_too=self.config.completion_only_loss is False)
        if {"prompt", "completion"} <= set(columns):
            return rows, self.completions()
        has_text = self.config.dataset_text_field in columns
        if "messages" in columns and not (has_text and isinstance(first_of(rows).get("messages"), str)):
            return self.conversations(rows, "messages")
        if has_text:
            encoder = self.encoder(TextEncoder)
            encoder.column = self.config.dataset_text_field
            encoder.source = f"`{encoder.column}`"
            return rows, encoder
        if "conversations" in columns:
            return self.conversations(rows, "conversations")
        raise DataError(f"the dataset's columns are {', '.join(columns)}; needed are prompt and completion (text, or "
                        "chat messages), messages, or a text: dataset_text_field names its column, which is now "
                        f"{self.config.dataset_text_field!r}. Rename some (dataset.rename_column('answer', "
                        "'completion')), or pass a formatting_func that makes a text of a row")

    def encoder(self, kind: type[ExampleEncoder], prompt_too: bool = False) -> Any:
        return kind(self.tokenizer, self.longest, self.end_ids, self.config.chat_template_kwargs,
                    self.config.truncation_mode, prompt_too)

    def completions(self) -> ExampleEncoder:
        encoder = self.encoder(CompletionEncoder, prompt_too=self.config.completion_only_loss is False)
        encoder.turns = self.encoder(ConversationEncoder)
        encoder.turns.assistant_only = bool(self.config.assistant_only_loss)
        encoder.source = encoder.turns.source = "`prompt` or `completion`"
        return encoder

    def conversations(self, rows: Any, column: str) -> tuple[Any, ExampleEncoder]:
        """Return rows of chats, and the encoder that trains the last assistant message (assistant_only_loss=None), all
        assistant messages (True) or all tokens (False)."""
        answers = self.config.assistant_only_loss
        encoder = self.encoder(AnswerEncoder if answers is None else ConversationEncoder)
        encoder.source, encoder.assistant_only = f"`{column}`", answers
        rows.change_each(lambda row: kept(row) | {"messages": messages_of(row, column)})
        return rows, encoder

    def formatted(self, rows: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """Return a function that maps a row to {"text": ...} with `formatting_func`, which takes one row or a batch of
        columns. DataError if `formatting_func` returns no text for the first row."""
        plain: Any = self.formatting_func

        def function(row: dict[str, Any]) -> Any:
            return plain(owned(row))

        first = first_of(rows)
        if takes_batches(function, first):
            return lambda row: {"text": function({name: [value] for name, value in row.items()})[0]}
        made = function(first)
        if isinstance(made, list) and len(made) == 1 and isinstance(made[0], str):
            return lambda row: {"text": function(row)[0]}
        if not isinstance(made, str):
            raise DataError(f"formatting_func returned a {type(made).__name__} for the first row; it must return the "
                            "row's text, or a list of texts for a batch of columns")
        return lambda row: {"text": function(row)}


def first_of(rows: Any) -> Any:
    return rows.peek(1)[0] if isinstance(rows, Stream) else rows[0]


def takes_batches(function: Callable[..., Any], row: dict[str, Any]) -> bool:
    """Return whether a formatting function returns two texts for a batch of two rows, passed as columns."""
    try:
        made = function({name: [value, value] for name, value in row.items()})
    except Exception:  # noqa: BLE001 - a function for one row may raise anything for two
        return False
    return isinstance(made, list) and len(made) == 2 and all(isinstance(text, str) for text in made)


def kept(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that go to the chat template."""
    return {name: row[name] for name in ("tools", "chat_template_kwargs") if name in row}


def messages_of(row: dict[str, Any], column: str) -> Any:
    """Return the chat messages of a row; ShareGPT's `from` and `value` become `role` and `content`."""
    messages = row.get(column)
    if not isinstance(messages, list):
        return messages
    return [{"role": ROLES.get(message["from"], message["from"]), "content": message.get("value")}
            if isinstance(message, dict) and "from" in message and "role" not in message else message
            for message in messages]


# The functions below make the trainer's `train_dataset`, tokenised as in TRL; encoders may have other `columns`. Packs
# have `seq_lengths` and no other columns; the rows of a stream are tokenised when they are drawn.


def tokenised(dataset: Any, rows: Any, encoder: Any) -> Any:
    """Return the tokenised `rows` with the other columns of `dataset`; DataError if no row can be used."""
    if isinstance(rows, Stream):
        return tokenised_stream(dataset, rows, encoder)
    results, packs = encoded(rows, encoder), isinstance(encoder, PackEncoder)
    placed = [(index, part) for index, result in enumerate(results) if not isinstance(result, str)
              for part in (result.parts if isinstance(result, Examples) and not packs else [result])]
    made = [getattr(encoder, "columns", columns_of_row)(part) for _, part in placed]
    columns = Dataset.from_dict({name: [row[name] for row in made] for name in made[0]})
    places = [index for index, _ in placed]
    kept = None if len(dataset) != len(results) or packs else own_columns(dataset, places, {*made[0], *MASKS})
    return columns if kept is None else concatenate_datasets([kept, columns], axis=1)


def columns_of_row(example: Example | Examples) -> dict[str, list[int]]:
    if isinstance(example, Example):
        return {"input_ids": example.input_ids, "labels": example.labels}
    parts = example.parts
    return {"input_ids": [token for part in parts for token in part.input_ids],
            "labels": [label for part in parts for label in part.labels],
            "seq_lengths": [len(part.input_ids) for part in parts]}


def own_columns(dataset: Any, places: list[int], tokens: set[str]) -> Dataset | None:
    """Return the rows at `places` without their columns `tokens`; None if that leaves no column. From a dataset that is
    a list, columns that Arrow cannot hold are left out."""
    if comes_from(dataset, "datasets", "Dataset"):
        kept = dataset.with_format(None).select(places)
        kept = kept.remove_columns([name for name in kept.column_names if name in tokens])
        return kept if kept.column_names else None
    rows = dataset.to_dict("records") if comes_from(dataset, "pandas", "DataFrame") else dataset
    rows = rows.to_pylist() if comes_from(rows, "pyarrow", "Table") else rows
    chosen = [row for row in (rows[place] for place in places) if isinstance(row, Mapping)]
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for row in chosen for name in row if name not in tokens):
        values = [row.get(name) for row in chosen]
        with suppress(Exception):  # values of several types, or of a class that Arrow does not know
            Dataset.from_dict({name: values})
            columns[name] = values
    return Dataset.from_dict(columns) if columns else None


def tokenised_stream(dataset: Any, rows: Stream, encoder: Any) -> Any:
    """Return a `datasets.IterableDataset` that tokenises its rows as they are drawn; any other stream unchanged."""
    if not comes_from(dataset, "datasets", "IterableDataset"):
        return dataset

    def read(row: dict[str, Any]) -> Any:
        return encoder.encode(rows.read(row))

    usable = dataset.filter(lambda row: not isinstance(read(row), (str, Examples)))
    return usable.map(lambda row: getattr(encoder, "columns", columns_of_row)(read(row)))
