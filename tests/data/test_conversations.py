"""Conversations under ShareGPT's names become chat messages, whatever holds them."""

from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from tables import every_row

from lowmem_grpo.chat_templates import standardize_data_formats, standardize_sharegpt
from lowmem_grpo.data.prompts import DataError

TOLD = [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"},
        {"from": "tool", "value": "T"}]
CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"},
        {"role": "tool", "content": "T"}]
HOLDERS: dict[str, Any] = {
    "list": (lambda rows: rows, list), "Dataset": (Dataset.from_list, list),
    "streamed": (lambda rows: Dataset.from_list(rows).to_iterable_dataset(), list),
    "DatasetDict": (lambda rows: DatasetDict(train=Dataset.from_list(rows)), lambda found: list(found["train"])),
}


@every_row("holder", HOLDERS)
@every_row(("column", "messages"), [("conversations", TOLD), ("messages", CHAT)])
def test_every_holder_and_spelling_gives_the_same_messages(holder: str, column: str, messages: Any) -> None:
    make, read = HOLDERS[holder]
    for call in (standardize_sharegpt, standardize_data_formats):
        found = read(call(make([{column: messages, "id": 1}, {column: messages[1:], "id": 2}])))
        assert [row[column] for row in found] == [CHAT, CHAT[1:]]
        assert [row["id"] for row in found] == [1, 2]


def test_other_names_of_roles_can_be_given() -> None:
    rows = [{"conversations": [{"from": "Alice", "value": "Q"}, {"from": "Bob", "value": "A"}]}]
    (found,) = standardize_sharegpt(rows, aliases_for_user=["alice"], aliases_for_assistant=["bob"])
    assert [message["role"] for message in found["conversations"]] == ["user", "assistant"]


@pytest.mark.parametrize(("row", "message"), [
    ({"question": "Q"}, "columns are question; one of conversations"),
    ({"conversations": [{"speaker": "x", "value": "Q"}]}, "a message has speaker, value; needed are role and content"),
])
def test_what_is_no_conversation_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        standardize_sharegpt([row])
