"""Completions of plain prompts in OpenAI's older shape, and the texts of tokens."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
from served import chat_over, scripted_worker
from small_models import TINY
from transformers import AutoTokenizer

from lowmem_grpo.agents.endpoint import Endpoint
from lowmem_grpo.server.openai.chat_handler import ChatHandler
from lowmem_grpo.server.openai.request import TextRequest
from lowmem_grpo.server.openai.token_texts import TokenTexts
from lowmem_grpo.server.requests import ChatError

ASKED: dict[str, Any] = {"model": "agent", "prompt": "Once upon"}


@pytest.fixture
def chat() -> Iterator[ChatHandler]:
    worker = scripted_worker(lambda prompt: f"<{len(prompt)}> a time", context=1000)
    yield chat_over(worker)
    worker.close()


def engine(chat: ChatHandler) -> Any:
    return chat.worker.engine


def asked(chat: ChatHandler, **fields: Any) -> dict[str, Any]:
    return asyncio.run(chat.create(ASKED | fields, texts=True))


def test_prompts_are_continued_in_their_order_with_openais_bound_and_seeds_of_their_own(chat: ChatHandler) -> None:
    reply = asked(chat, prompt=["Once upon", "long one"], n=2, seed=7, return_token_ids=True)
    choice, _, other, _ = reply["choices"]
    assert [one["text"] for one in reply["choices"]] == ["<9> a time", "<9> a time", "<8> a time", "<8> a time"]
    assert engine(chat).tokenizer.decode(choice["prompt_token_ids"]) == "Once upon"
    assert (choice["finish_reason"], choice["logprobs"], reply["id"][:5]) == ("stop", None, "cmpl-")
    assert reply["usage"]["prompt_tokens"] == len(choice["prompt_token_ids"]) + len(other["prompt_token_ids"])
    seeds, lengths = zip(*((request.seed, request.max_tokens) for request in engine(chat).requests), strict=True)
    assert seeds[:2] == seeds[2:] and seeds[0] != seeds[1] and set(lengths) == {16}
    asked(chat, max_tokens=5000)
    assert engine(chat).requests[-1].max_tokens == 1000 - len(choice["prompt_token_ids"])


def test_an_endpoint_of_agents_has_the_route_and_its_sessions_do_not(chat: ChatHandler) -> None:
    with Endpoint(chat) as endpoint, endpoint.session() as session:
        of_all, of_session = (Request(f"{one.base_url}/completions", json.dumps(ASKED).encode(), {
            "Authorization": f"Bearer {endpoint.api_key}"}) for one in (endpoint, session))
        with urlopen(of_all, timeout=60) as reply:
            assert json.loads(reply.read())["choices"][0]["text"] == "<9> a time"
        with pytest.raises(OSError, match="404"):
            urlopen(of_session, timeout=60)


def test_an_id_that_pads_the_vocabulary_has_no_text_and_every_token_has_its_own() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    texts = TokenTexts(tokenizer)
    assert texts.entry(371, -1.5) == {"token": "", "bytes": [], "logprob": -1.5}
    assert [texts.bytes_of(token).decode() for token in tokenizer(" What is 7?").input_ids] == [
        tokenizer.decode([token]) for token in tokenizer(" What is 7?").input_ids]


def test_more_completions_than_a_request_may_ask_for_are_refused_before_one_is_sampled() -> None:
    assert TextRequest.from_body({"model": "agent", "prompt": ["a"] * 2048, "n": 2}).n == 2
    with pytest.raises(ChatError, match="ask for 4098 completions; at most 4096"):
        TextRequest.from_body({"model": "agent", "prompt": ["a"] * 2049, "n": 2})
