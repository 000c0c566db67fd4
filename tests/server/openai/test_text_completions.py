"""Completions of plain prompts in OpenAI's older shape."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
from served import chat_over, scripted_desk

from lowmem_grpo.server.openai.chat_handler import ChatHandler
from lowmem_grpo.server.openai.endpoint import Endpoint

ASKED: dict[str, Any] = {"model": "agent", "prompt": "Once upon"}


@pytest.fixture
def chat() -> Iterator[ChatHandler]:
    worker = scripted_desk(lambda prompt: f"<{len(prompt)}> a time", context=1000)
    yield chat_over(worker)
    worker.close()


def engine(chat: ChatHandler) -> Any:
    return chat.worker.engine


def asked(chat: ChatHandler, **fields: Any) -> dict[str, Any]:
    return asyncio.run(chat.create(ASKED | fields, texts=True))


def test_a_prompt_is_continued_as_it_is_with_openais_usual_bound(chat: ChatHandler) -> None:
    reply = asked(chat, return_token_ids=True)
    (choice,) = reply["choices"]
    assert engine(chat).tokenizer.decode(choice["prompt_token_ids"]) == "Once upon"
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("<9> a time", "stop", None)
    assert engine(chat).requests[-1].max_tokens == 16 and reply["id"].startswith("cmpl-")
    asked(chat, max_tokens=5000)
    assert engine(chat).requests[-1].max_tokens == 1000 - len(choice["prompt_token_ids"])


def test_several_prompts_answer_in_their_order_and_choices_have_seeds_of_their_own(chat: ChatHandler) -> None:
    reply = asked(chat, prompt=["a", "long one"], n=2, seed=7)
    assert [choice["text"] for choice in reply["choices"]] == ["<1> a time", "<1> a time", "<8> a time", "<8> a time"]
    seeds = [request.seed for request in engine(chat).requests]
    assert seeds[:2] == seeds[2:] and seeds[0] != seeds[1]
    ids = engine(chat).tokenizer(["a", "long one"]).input_ids
    assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_what_waits_is_taken_back_when_the_reader_of_a_stream_leaves(chat: ChatHandler) -> None:
    async def leave() -> None:
        engine(chat).gate.clear()
        task = asyncio.ensure_future(anext(chat.stream(ASKED | {"n": 3}, texts=True)))
        assert await asyncio.to_thread(engine(chat).began.wait, 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine(chat).gate.set()

    asyncio.run(leave())
    assert asked(chat)["choices"] and not chat.worker.waiting.lines


def test_an_endpoint_of_agents_has_the_route_and_its_sessions_do_not(chat: ChatHandler) -> None:
    with Endpoint(chat) as endpoint, endpoint.session() as session:
        of_all, of_session = (Request(f"{one.base_url}/completions", json.dumps(ASKED).encode(), {
            "Authorization": f"Bearer {endpoint.api_key}"}) for one in (endpoint, session))
        with urlopen(of_all, timeout=60) as reply:
            assert json.loads(reply.read())["choices"][0]["text"] == "<9> a time"
        with pytest.raises(OSError, match="404"):
            urlopen(of_session, timeout=60)
