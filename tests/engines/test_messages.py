"""Messages without the keys that Arrow filled: each is what it was before it went through Arrow."""

from typing import Any

import pytest
from datasets import Dataset

from lowmem_grpo.engines.messages import plain_message
from lowmem_grpo.server.openai.messages import plain

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi", "name": "Ada"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}]},
    {"role": "tool", "content": "2", "tool_call_id": "1"},
    {"role": "assistant", "content": "Two.", "reasoning_content": "1 + 1"},
]


def test_what_went_through_arrow_is_what_it_was() -> None:
    through = Dataset.from_list([{"messages": MESSAGES}])[0]["messages"]
    assert through != MESSAGES and [plain_message(message) for message in through] == MESSAGES


def test_parts_of_a_content_lose_the_keys_of_other_parts() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "Hi", "image": None}]}
    assert plain_message(message) == {"role": "user", "content": [{"type": "text", "text": "Hi"}]}


@pytest.mark.parametrize(("message", "expected"), [
    ({"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "tool_calls": [CALL], "content": None}),
    ({"role": "user", "content": None}, {"role": "user", "content": None}),
    ({"role": "assistant", "content": "a", "tool_calls": []}, {"role": "assistant", "content": "a"}),
    ({"role": "knight", "name": None}, {"role": "knight", "name": None}), ("text", "text"),
])
def test_a_missing_content_beside_calls_is_none_and_what_is_no_message_stays(message: Any, expected: Any) -> None:
    assert plain_message(message) == expected


def test_a_server_takes_messages_of_a_dataset_for_those_that_were_put_in() -> None:
    through = Dataset.from_list([{"messages": MESSAGES}])[0]["messages"]
    assert plain(through) == plain(MESSAGES)
