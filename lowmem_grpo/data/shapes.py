"""What the columns of a dataset mean for supervised fine-tuning, and who turns its rows into examples.

In this order: `formatting_func`, `input_ids`, `prompt` with `completion`, `messages`, the column of texts, and
`conversations`, which is `messages` under another name.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sft import SFTConfig
from lowmem_grpo.data.examples import Example, ExampleEncoder, Examples, each_of
from lowmem_grpo.data.owned import owned
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
    with_answer,
)

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Shapes:
    """The way in which a run reads rows."""

    config: SFTConfig
    tokenizer: PreTrainedTokenizerBase
    longest: int  # tokens
    end_ids: list[int]
    formatting_func: Callable[..., Any] | None = None
    wrap: Callable[[Any], Any] | None = None  # makes another encoder of one, as `train_on_responses_only` does

    def read(self, dataset: Any, parameter: str = "train_dataset") -> tuple[Any, Any]:
        """Return the rows, or packs of them, and what encodes them; DataError where no column says what to train on."""
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
        rows = rows_of(dataset, parameter)
        columns = columns_of(rows)
        if not columns and not isinstance(rows, Stream):
            raise DataError(f"{parameter} has no rows")
        if self.formatting_func is not None and not callable(self.formatting_func):
            raise DataError(f"formatting_func is {self.formatting_func!r}; it must be a function that makes a text of "
                            "a row")
        if self.formatting_func is not None:
            rows.change_each(self.formatted(rows))
            return rows, self.encoder(TextEncoder)
        if "input_ids" in columns:
            return rows, self.encoder(TokenEncoder, prompt_too=self.config.completion_only_loss is False)
        if {"prompt", "completion"} <= set(columns):
            return rows, self.completions()
        if "messages" in columns:
            return self.conversations(rows, "messages")
        if self.config.dataset_text_field in columns:
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
        """Rows with chat messages: of the assistant's last one, of all of the assistant's, or of all tokens."""
        encoder = self.encoder(ConversationEncoder if self.config.assistant_only_loss is not None else AnswerEncoder)
        encoder.source = f"`{column}`"
        if self.config.assistant_only_loss is None:
            rows.change_each(lambda row: kept(row) | with_answer(messages_of(row, column), column))
            return rows, encoder
        encoder.assistant_only = self.config.assistant_only_loss
        rows.change_each(lambda row: kept(row) | {"messages": messages_of(row, column)})
        return rows, encoder

    def formatted(self, rows: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """Return what makes a row of one text by `formatting_func`, which takes one row or a batch of columns."""
        plain: Any = self.formatting_func

        def function(row: dict[str, Any]) -> Any:
            return plain(owned(row))

        first = rows.peek(1)[0] if isinstance(rows, Stream) else rows[0]
        if takes_batches(function, first):
            return lambda row: {"text": function({name: [value] for name, value in row.items()})[0]}
        made = function(first)
        if isinstance(made, list) and len(made) == 1 and isinstance(made[0], str):
            return lambda row: {"text": function(row)[0]}
        if not isinstance(made, str):
            raise DataError(f"formatting_func returned a {type(made).__name__} for the first row; it must return the "
                            "row's text, or a list of texts for a batch of columns")
        return lambda row: {"text": function(row)}


def takes_batches(function: Callable[..., Any], row: dict[str, Any]) -> bool:
    """Return whether a formatting function makes two texts of a batch of two rows, given as columns."""
    try:
        made = function({name: [value, value] for name, value in row.items()})
    except Exception:  # noqa: BLE001 - a function for one row may raise anything for two
        return False
    return isinstance(made, list) and len(made) == 2 and all(isinstance(text, str) for text in made)


def kept(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("tools", "chat_template_kwargs") if name in row}


def messages_of(row: dict[str, Any], column: str) -> Any:
    """Return the chat messages of a row; those with `from` and `value` get the usual names."""
    messages = row.get(column)
    if not isinstance(messages, list):
        return messages
    return [{"role": ROLES.get(message["from"], message["from"]), "content": message.get("value")}
            if isinstance(message, dict) and "from" in message and "role" not in message else message
            for message in messages]


# The rows as TRL shows them after its trainer was made. Packs have `seq_lengths` too, and no other columns; of a stream
# the rows are tokenised when they are drawn.


def tokenised(dataset: Any, rows: Any, encoder: Any) -> Any:
    """Return what an encoder makes of `rows`, which were passed as `dataset`; DataError where no row can be used."""
    if isinstance(rows, Stream):
        return tokenised_stream(dataset, rows, encoder)
    results, packs = encoded(rows, encoder), isinstance(encoder, PackEncoder)
    placed = [(index, part) for index, result in enumerate(results) if not isinstance(result, str)
              for part in ([result] if packs else each_of(result))]
    made = [columns_of_row(part) for _, part in placed]
    columns = Dataset.from_dict({name: [row[name] for row in made] for name in made[0]})
    kept = None if len(dataset) != len(results) or packs else own_columns(dataset, [index for index, _ in placed])
    return columns if kept is None else concatenate_datasets([kept, columns], axis=1)


def columns_of_row(example: Example | Examples) -> dict[str, list[int]]:
    """Return the columns that training makes of a row, or of a pack."""
    if isinstance(example, Example):
        return {"input_ids": example.input_ids, "labels": example.labels}
    parts = example.parts
    return {"input_ids": [token for part in parts for token in part.input_ids],
            "labels": [label for part in parts for label in part.labels],
            "seq_lengths": [len(part.input_ids) for part in parts]}


def own_columns(dataset: Any, places: list[int]) -> Dataset | None:
    """Return these rows with their own columns, without those that training makes; None where there are no others.
    Columns of a list that Arrow cannot hold are left out."""
    if comes_from(dataset, "datasets", "Dataset"):
        kept = dataset.with_format(None).select(places)
        kept = kept.remove_columns([name for name in ("input_ids", "labels", *MASKS) if name in kept.column_names])
        return kept if kept.column_names else None
    rows = dataset.to_dict("records") if comes_from(dataset, "pandas", "DataFrame") else dataset
    rows = rows.to_pylist() if comes_from(rows, "pyarrow", "Table") else rows
    chosen = [row for row in (rows[place] for place in places) if isinstance(row, Mapping)]
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for row in chosen for name in row if name not in ("input_ids", "labels", *MASKS)):
        values = [row.get(name) for row in chosen]
        with suppress(Exception):  # values of several types, or of a class that Arrow does not know
            Dataset.from_dict({name: values})
            columns[name] = values
    return Dataset.from_dict(columns) if columns else None


def tokenised_stream(dataset: Any, rows: Stream, encoder: Any) -> Any:
    """Return a stream of the hub's library whose rows are tokenised as they are drawn; another one as it was passed."""
    if not comes_from(dataset, "datasets", "IterableDataset"):
        return dataset

    def read(row: dict[str, Any]) -> dict[str, Any]:
        example = encoder.encode(rows.read(row))
        return columns_of_row(example) if isinstance(example, Example) else {"input_ids": [], "labels": []}

    return dataset.map(read).filter(lambda row: len(row["input_ids"]) > 0)
