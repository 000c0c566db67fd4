"""Requests and replies in OpenAI's shape."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from desks import chat_over, scripted_desk

from lowmem_grpo.service.chat import Chat
from lowmem_grpo.service.errors import ChatError

HELLO: dict[str, Any] = {"model": "agent", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def chat() -> Iterator[Chat]:
    desk = scripted_desk(lambda prompt: "Good day.", context=200)
    yield chat_over(desk)
    desk.close()


def test_a_reply_has_openais_shape_and_names_its_turn(chat: Chat) -> None:
    reply = asyncio.run(chat.create(HELLO | {"return_token_ids": True, "logprobs": True}))
    (choice,) = reply["choices"]
    turn = chat.turn(choice["turn"])
    assert turn is not None
    assert choice["message"] == {"role": "assistant", "content": "Good day.", "refusal": None}
    assert (reply["object"], reply["model"], choice["finish_reason"]) == ("chat.completion", "agent", "stop")
    assert (reply["prompt_token_ids"], choice["token_ids"]) == (turn.prompt_ids, turn.completion_ids)
    told = choice["logprobs"]["content"]
    assert [one["logprob"] for one in told] == turn.logprobs
    assert b"".join(bytes(one["bytes"]) for one in told).decode() == "Good day.<|im_end|>"
    assert reply["usage"] == {"prompt_tokens": len(turn.prompt_ids), "completion_tokens": len(turn.completion_ids),
                              "total_tokens": len(turn.prompt_ids) + len(turn.completion_ids),
                              "prompt_tokens_details": {"cached_tokens": 0}}


def test_a_prompt_that_fills_the_context_is_refused_with_the_figures(chat: Chat) -> None:
    with pytest.raises(ChatError, match=r"maximum context length is 200 tokens\. .*resulted in 472 tokens") as caught:
        asyncio.run(chat.create(HELLO | {"messages": [{"role": "user", "content": "word " * 200}]}))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
