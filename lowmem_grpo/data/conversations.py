"""Conversations under the names of ShareGPT ("from", "value", "human", "gpt") as messages with role and content."""

from collections.abc import Sequence
from typing import Any

from lowmem_grpo.data.kinds import DataError

COLUMNS = ("conversations", "messages", "conversation")
ALIASES = {
    "system": ("system",), "user": ("user", "human", "input"), "assistant": ("gpt", "assistant", "output", "model"),
}
ROLE_KEYS, CONTENT_KEYS = ("role", "from"), ("content", "value")


def standardize_sharegpt(
    dataset: Any, tokenizer: Any = None, aliases_for_system: Sequence[str] = ALIASES["system"],
    aliases_for_user: Sequence[str] = ALIASES["user"], aliases_for_assistant: Sequence[str] = ALIASES["assistant"],
    batch_size: int = 1000, num_proc: int | None = None,
) -> Any:
    """Return the dataset with its conversations as lists of {"role", "content"}, in the same column.

    `dataset` is a Dataset, an IterableDataset or a DatasetDict, or a list of rows. The aliases are names of roles;
    other roles, such as "tool", stay as they are. `tokenizer` changes nothing. DataError where no column holds
    conversations.
    """
    names = {alias.lower(): role for role, aliases in zip(
        ALIASES, (aliases_for_system, aliases_for_user, aliases_for_assistant), strict=True) for alias in aliases}
    if isinstance(dataset, list):
        column = column_of(list(dataset[0]) if dataset else [])
        return [row | {column: [message_of(each, names) for each in row[column]]} for row in dataset]
    if isinstance(dataset, dict):
        return type(dataset)({key: standardize_sharegpt(
            part, tokenizer, aliases_for_system, aliases_for_user, aliases_for_assistant, batch_size, num_proc
        ) for key, part in dataset.items()})
    column = column_of(dataset.column_names or list(next(iter(dataset))))

    def convert(rows: dict[str, Any]) -> dict[str, Any]:
        return {column: [[message_of(each, names) for each in row] for row in rows[column]]}

    options = {"num_proc": num_proc} if hasattr(dataset, "__len__") else {}
    return dataset.map(convert, batched=True, batch_size=batch_size, **options)


standardize_data_formats = standardize_sharegpt  # Unsloth's newer name


def column_of(columns: list[str]) -> str:
    for column in COLUMNS:
        if column in columns:
            return column
    raise DataError(f"the dataset's columns are {', '.join(columns)}; one of {', '.join(COLUMNS)} must hold the "
                    "conversations: rename yours with dataset.rename_column(NAME, 'conversations')")


def message_of(message: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    role = next((message[key] for key in ROLE_KEYS if message.get(key) is not None), None)
    content = next((message[key] for key in CONTENT_KEYS if message.get(key) is not None), None)
    if role is None or content is None:
        raise DataError(f"a message has {', '.join(message)}; needed are role and content, or from and value")
    return {"role": names.get(str(role).lower(), role), "content": content}
